"""Tensor parallelism: the model's plan, line by line, on the tp axis."""

from __future__ import annotations

from torch import nn

from hpc_train.api import World
from hpc_train.config.run import RunConfig
from hpc_train.parallel.axes import degree


def apply(part: nn.Module, config: RunConfig, world: World) -> str | None:
    """A pass: split the modules of the plan over tp."""
    assert degree(world, "tp") == 1
    return None
