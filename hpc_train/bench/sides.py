"""What is compared: our step as the training loop takes it, and the loop that a person writes without us.

Each is an iterator over training steps which gives the step's loss, so that a round of one can follow one of the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpc_train.api import World
from hpc_train.config.run import RunConfig
from hpc_train.data.datasets import Dataset, Indices
from hpc_train.parallel.precision import cast_forward
from hpc_train.training.loop import Run, report, train_step


def hpc_train(run: Run) -> Iterator[float]:
    """All that `hpc-train train` does in a step, but evaluation and checkpoints."""
    while True:
        step = train_step(run)
        report(run, step, None)
        loss: float = step.record["loss"]
        yield loss


def hand_written(
    model: nn.Module, data: Dataset, order: Iterable[Indices], config: RunConfig, world: World, tuned: bool
) -> Iterator[float]:
    """The shortest loop in plain PyTorch; `tuned` adds the two arguments that its tuning guide recommends.

    model: on its device. order: this rank's samples of each step. The loss is that of this rank's share.
    """
    if world.size > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=tuned)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr, fused=tuned or None)
    for indices in order:
        inputs, targets = data.get(indices)
        loss = _accumulate(model, inputs.to(world.device), targets.to(world.device), config)
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.max_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def _accumulate(model: nn.Module, inputs: Tensor, targets: Tensor, config: RunConfig) -> Tensor:
    """Forward and backward of one step; returns the mean loss."""
    total = torch.zeros((), device=targets.device)
    cuts = range(0, len(targets), config.train.micro_batch)
    for cut in cuts:
        x, y = (tensor[cut : cut + config.train.micro_batch] for tensor in (inputs, targets))
        last = cut == cuts[-1]
        with nullcontext() if last or not isinstance(model, DistributedDataParallel) else model.no_sync():
            with cast_forward(config.precision, y.device):
                loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten()) * (len(y) / len(targets))
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total
