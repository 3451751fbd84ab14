"""Context parallelism: each rank of the cp axis takes a part of every sequence."""

from __future__ import annotations

from torch import nn

from hpc_train.api import MicroBatch, World
from hpc_train.config.run import RunConfig
from hpc_train.parallel.axes import degree


def apply(part: nn.Module, config: RunConfig, world: World) -> str | None:
    """A pass: exchange what attention needs over cp, and tell the model which positions it sees."""
    assert degree(world, "cp") == 1
    return None


def own_tokens(micro: MicroBatch, config: RunConfig, world: World) -> MicroBatch:
    """This rank's positions of a micro-batch."""
    assert degree(world, "cp") == 1
    return micro
