"""Flow: what one mesh axis moves in one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv"]


@dataclass(frozen=True)
class Flow:
    """One kind of collective of one step, as every group of an axis runs it."""

    axes: tuple[str, ...]
    """Mesh axes whose ranks form the groups: ("tp",), or ("dp_shard", "cp") where both are one group."""
    collective: Collective
    bytes: float
    """Of one call, by the definition of nccl-tests: all_reduce, broadcast and reduce: the buffer; all_gather and
    reduce_scatter: the whole of it, all ranks' parts together; all_to_all: what a rank sends in all, its own part
    counted; send_recv: the message to the next rank of the axis."""
    calls: float
    """Of one step; on a pipeline, the most that any stage makes."""
    what: str
    """What is moved: gradients, parameters, activations, ..."""
    ring: bool = True
    """send_recv: whether the last rank of the axis sends to the first (ring attention) or not (a pipeline)."""
