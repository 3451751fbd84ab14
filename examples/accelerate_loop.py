"""A plain loop with Accelerate. The lines that hpc_train needs end in `# hpc_train`.

accelerate launch --num_processes 2 examples/accelerate_loop.py --dir checkpoints/accelerate
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpc_train  # hpc_train

GLOBAL_BATCH = 12


def main() -> None:
    """Train and save every step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(100, 8).double(), torch.randint(0, 4, (100,)))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    order = hpc_train.SampleOrder(len(data), seed=1)  # hpc_train
    sampler = order.sampler(GLOBAL_BATCH, until=options.steps * GLOBAL_BATCH)  # hpc_train
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // accelerator.num_processes, sampler=sampler)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    step = 0
    checkpointer = hpc_train.Checkpointer(options.dir, keep=3)  # hpc_train
    loaded = checkpointer.load_latest(model=model, optimizer=optimizer)  # hpc_train
    if loaded is not None:  # hpc_train
        step, sampler.consumed = loaded.step, loaded.step * GLOBAL_BATCH  # hpc_train
        scheduler.load_state_dict(loaded.extra["scheduler"])  # hpc_train
    with checkpointer:  # hpc_train
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step += 1
            extra = {"scheduler": scheduler.state_dict()}  # hpc_train
            checkpointer.save_async(step, model=model, optimizer=optimizer, extra=extra)  # hpc_train
    accelerator.print(f"done: step {step}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
