"""The libraries that move the data, behind one interface: torch (gloo on the CPU, NCCL on CUDA) and MPI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from hpc_train.bench.collectives.definitions import Operation
from hpc_train.bench.collectives.groups import Group
from hpc_train.bench.collectives.own import Wire

Call = Callable[[], None]
"""One collective on buffers that are fixed; returns when this rank may use them, on a GPU when that is queued."""


class Backend(Protocol):
    """One library."""

    name: str
    """gloo, nccl or mpi."""
    device: torch.device
    """Where its buffers are."""
    in_place: frozenset[str]
    """Operations that it has in place only: what is sent is put where the result is wanted."""

    def connect(self, group: Group) -> Connection:
        """The operations among the ranks of a group. Every rank of the job calls it, for groups in the same order."""

    def finish(self) -> None:
        """Wait until everything that was queued is done."""


class Connection(Protocol):
    """One backend in one group."""

    def call(self, operation: Operation, sent: Tensor, received: Tensor) -> Call:
        """The library's own collective. Where it is in place, `sent` is not looked at: `received` holds the values."""

    def wire(self) -> Wire:
        """Point to point messages."""
