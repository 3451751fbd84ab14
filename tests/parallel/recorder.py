"""Record which collectives over parameters and gradients run, when, and over how many bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpc_train.interfaces import Engine

GATHER, SCATTER, REDUCE = "_allgather_base_", "alltoall_base_", "allreduce_"
"""Over gloo; there a reduce-scatter is an all-to-all and a sum (parallel.reduce_scatter)."""


@dataclass(frozen=True)
class Call:
    """One collective over gradients or parameters."""

    name: str
    micro: int
    """Micro-batches whose forward had begun."""
    bytes: int
    """Of the largest of its tensors."""


class Recorder(TorchDispatchMode):
    """Sees every operation of torch and records the collectives. Scalars are sums of losses, int64 are counts."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.micro = 0
        engine.parts[0].register_forward_pre_hook(self._forward, prepend=True)  # before fully_shard gathers

    def _forward(self, *_: Any) -> None:
        self.micro += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            if all(tensor.ndim and tensor.is_floating_point() for tensor in tensors):
                name = func.overloadpacket.__name__
                self.calls.append(Call(name, self.micro, max(tensor.nbytes for tensor in tensors)))
        return func(*args, **(kwargs or {}))
