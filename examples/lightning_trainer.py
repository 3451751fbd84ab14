"""A plain Lightning Trainer. The lines that hpc_train needs end in `# hpc_train`.

python examples/lightning_trainer.py --dir checkpoints/lightning
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hpc_train  # hpc_train

GLOBAL_BATCH = 12


class SaveSteps(lightning.Callback):  # hpc_train
    """Loads the newest step before the training and saves every step: a callback for any module."""

    def __init__(self, directory: str) -> None:
        self.checkpointer = hpc_train.Checkpointer(directory, keep=3)
        self.first_step = 0

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """The optimizers are made by now, and the loader is not."""
        loaded = self.checkpointer.load_latest(model=pl_module, optimizer=trainer.optimizers)
        if loaded is not None:
            self.first_step = loaded.step
            for config, state in zip(trainer.lr_scheduler_configs, loaded.extra["schedulers"], strict=True):
                config.scheduler.load_state_dict(state)

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *_: Any) -> None:
        """Lightning has made a step, and counts from 0 in every process."""
        extra = {"schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]}
        step = self.first_step + trainer.global_step
        self.checkpointer.save_async(step, model=pl_module, optimizer=trainer.optimizers, extra=extra)

    def on_fit_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Wait for the last save."""
        self.checkpointer.close()


class Classifier(lightning.LightningModule):
    """A small network on random data."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.steps = steps

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """Return the loss of a batch."""
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        """Make AdamW with a schedule by steps."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Data(lightning.LightningDataModule):
    """Random samples."""

    def __init__(self, steps: int, saver: SaveSteps) -> None:
        super().__init__()
        self.data = TensorDataset(torch.randn(100, 8).double(), torch.randint(0, 4, (100,)))
        self.steps, self.saver = steps, saver

    def train_dataloader(self) -> DataLoader[Any]:
        """Load the samples that are left."""
        consumed, until = self.saver.first_step * GLOBAL_BATCH, self.steps * GLOBAL_BATCH  # hpc_train
        order = hpc_train.SampleOrder(len(self.data), seed=1)  # hpc_train
        sampler = order.sampler(GLOBAL_BATCH, consumed=consumed, until=until)  # hpc_train
        return DataLoader(self.data, batch_size=GLOBAL_BATCH, sampler=sampler)


def main() -> None:
    """Train and save every step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.manual_seed(0)
    saver = SaveSteps(options.dir)  # hpc_train
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        precision="64-true",
        plugins=[LightningEnvironment()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saver],  # hpc_train
    )
    trainer.fit(Classifier(options.steps), datamodule=Data(options.steps, saver))
    print(f"done: step {saver.first_step + trainer.global_step}")


if __name__ == "__main__":
    main()
