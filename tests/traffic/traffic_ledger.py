"""Record the collectives of a training step: on which mesh axes, with how many bytes by nccl-tests' definitions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpc_train.config.parallel import AXES, Degrees
from hpc_train.parallel import reduce_scatter

KINDS = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "send": "send_recv",
}
IGNORED = ("recv_", "wait_tensor", "barrier", "_wrap_tensor_autograd")
Key = tuple[tuple[str, ...], str]
"""Axes of the group, and the collective."""


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes and calls of every collective of this rank."""

    def __init__(self, degrees: Degrees, ep: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._degrees, self._ep = degrees, ep
        self.calls: dict[Key, list[int]] = defaultdict(list)
        """Bytes of each call."""
        self._reduce_by_all_to_all = reduce_scatter.reduce_by_all_to_all
        self._scatters = False

    def __enter__(self) -> Ledger:
        reduce_scatter.reduce_by_all_to_all = self._exchange
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        reduce_scatter.reduce_by_all_to_all = self._reduce_by_all_to_all
        super().__exit__(*error)

    def _exchange(self, *args: Any) -> None:
        """Do a reduce-scatter over gloo, which is an all-to-all and a sum."""
        self._scatters = True
        self._reduce_by_all_to_all(*args)
        self._scatters = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and name not in IGNORED:
            kind = "reduce_scatter" if self._scatters else KINDS[name]
            self.calls[axes(_ranks(args), self._degrees, self._ep), kind].append(_bytes(name, args))
        return func(*args, **(kwargs or {}))


def _bytes(name: str, args: Any) -> int:
    """Return the bytes of the buffer that the definitions mean: the largest one, or the sum of a list of gathered
    parts.
    """
    if name == "alltoall_base_":
        sent: Tensor = args[1]
        return sent.nbytes
    if name == "allgather_":
        return sum(tensor.nbytes for tensor in tree_leaves(args[0]))
    return max(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, Tensor))


def _ranks(args: Any) -> list[int]:
    for leaf in tree_leaves(args):
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            return dist.get_process_group_ranks(dist.ProcessGroup.unbox(leaf))
    return dist.get_process_group_ranks(_resolve_process_group(args[-1]))


def axes(ranks: Iterable[int], degrees: Degrees, ep: int = 1) -> tuple[str, ...]:
    """Return the mesh axes over which the ranks of a group differ; for a part of dp_shard x cp those of the experts."""
    places = [coordinates(rank, degrees) for rank in ranks]
    within = [place[2] * degrees.cp + place[3] for place in places]
    if ep > 1 and 1 < len(set(within)) < degrees.dp_shard * degrees.cp:
        return ("ep",) if max(within) - min(within) < ep else ("expert_shard",)
    return tuple(axis for index, axis in enumerate(AXES) if len({place[index] for place in places}) > 1)


def coordinates(rank: int, degrees: Degrees) -> tuple[int, ...]:
    """Return the coordinates of a rank on the mesh; the last axis varies fastest."""
    found = []
    for size in reversed(degrees.sizes):
        rank, place = divmod(rank, size)
        found.append(place)
    return tuple(reversed(found))
