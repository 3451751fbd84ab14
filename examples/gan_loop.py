"""A generative adversarial network: two models, two optimizers and alternating steps.

python examples/gan_loop.py --dir checkpoints/gan
torchrun --nproc-per-node=2 --standalone examples/gan_loop.py --dir checkpoints/gan

The lines that hpc_train needs end in `# hpc_train`.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import spectral_norm

import hpc_train  # hpc_train

WIDTH, NOISE, GLOBAL_BATCH, TRIES = 16, 4, 12, 2


def score(logits: Tensor, target: float) -> Tensor:
    """Return how far the discriminator's verdict on some samples is from `target`, 1 for real ones."""
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))


def main() -> None:
    """Train and save every step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    world = hpc_train.init(dp_replicate=-1)  # hpc_train
    rank, ranks = world.rank, world.size

    torch.manual_seed(0)
    data = torch.randn(100, WIDTH).double()
    generator: nn.Module = nn.Sequential(
        nn.Linear(NOISE, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)
    ).double()
    discriminator: nn.Module = nn.Sequential(
        spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(WIDTH, 1)
    ).double()
    if ranks > 1:
        generator = DistributedDataParallel(generator)
        discriminator = DistributedDataParallel(discriminator)
    creator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    critic = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(one, options.steps) for one in (creator, critic)]

    first = 0
    order = hpc_train.SampleOrder(len(data), seed=1)  # hpc_train
    checkpointer = hpc_train.Checkpointer(options.dir, world, keep=3)  # hpc_train
    models = {"generator": generator, "discriminator": discriminator}  # hpc_train
    loaded = checkpointer.load_latest(model=models, optimizer=[creator, critic])  # hpc_train
    if loaded is not None:  # hpc_train
        first = loaded.step  # hpc_train
        for scheduler, state in zip(schedulers, loaded.extra["schedulers"], strict=True):  # hpc_train
            scheduler.load_state_dict(state)  # hpc_train
    with checkpointer:  # hpc_train
        for step in range(first, options.steps):
            torch.manual_seed(step * ranks + rank)  # noise and dropout: another on each rank, and nothing to save
            real = data[order.batch(step * GLOBAL_BATCH, GLOBAL_BATCH, rank, ranks)]  # hpc_train
            for _ in range(TRIES):
                fake = generator(torch.randn(len(real), NOISE).double()).detach()
                (score(discriminator(real), 1.0) + score(discriminator(fake), 0.0)).backward()
                critic.step()
                critic.zero_grad()
            loss = score(discriminator(generator(torch.randn(len(real), NOISE).double())), 1.0)
            loss.backward()
            creator.step()
            creator.zero_grad()
            critic.zero_grad()
            for scheduler in schedulers:
                scheduler.step()
            extra = {"schedulers": [scheduler.state_dict() for scheduler in schedulers]}  # hpc_train
            checkpointer.save_async(step + 1, model=models, optimizer=[creator, critic], extra=extra)  # hpc_train
    if rank == 0:
        print(f"done: step {options.steps}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
