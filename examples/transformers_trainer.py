"""A plain transformers Trainer. The lines that hpc_train needs end in `# hpc_train`.

python examples/transformers_trainer.py --dir checkpoints/transformers
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import hpc_train  # hpc_train

GLOBAL_BATCH = 6


class SaveSteps(TrainerCallback):  # hpc_train
    """Loads the newest step before the training and saves every step: a callback for any model."""

    def __init__(self, directory: str, sampler: Any) -> None:
        self.checkpointer = hpc_train.Checkpointer(directory, keep=3)
        self.sampler = sampler

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **now: Any) -> None:
        """Model and optimizer are made by now; the first batch is not loaded yet."""
        loaded = self.checkpointer.load_latest(model=now["model"], optimizer=now["optimizer"])
        if loaded is not None:
            state.global_step, self.sampler.consumed = loaded.step, loaded.step * GLOBAL_BATCH
            now["lr_scheduler"].load_state_dict(loaded.extra["scheduler"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **now: Any) -> None:
        """A step has been made."""
        extra = {"scheduler": now["lr_scheduler"].state_dict()}
        step = state.global_step
        self.checkpointer.save_async(step, model=now["model"], optimizer=now["optimizer"], extra=extra)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **now: Any) -> None:
        """Wait for the last save."""
        self.checkpointer.close()


class OrderedTrainer(Trainer):  # hpc_train
    """A Trainer whose samples come in the order of a sampler."""

    order: Any

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:  # hpc_train
        return self.order  # hpc_train


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random tokens."""

    def __init__(self) -> None:
        self.rows = torch.randint(0, 64, (100, 16))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    """Train and save every step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model, data = LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape)).double(), Tokens()
    order = hpc_train.SampleOrder(len(data), seed=1)  # hpc_train
    sampler = order.sampler(GLOBAL_BATCH, until=options.steps * GLOBAL_BATCH)  # hpc_train
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            per_device_train_batch_size=GLOBAL_BATCH,
            max_steps=options.steps,
            learning_rate=1e-2,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        saver = SaveSteps(options.dir, sampler)  # hpc_train
        trainer = OrderedTrainer(model, settings, train_dataset=data, callbacks=[saver])  # hpc_train
        trainer.order = sampler  # hpc_train
        trainer.train()
    print(f"done: step {trainer.state.global_step}")


if __name__ == "__main__":
    main()
