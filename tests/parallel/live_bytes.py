"""Count which memory and which operators a piece of code really uses."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Watch(TorchDispatchMode):
    """Sees every operator of torch, and the memory of every result for as long as it is referenced."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.copied = 0
        """Bytes written by copy_."""
        self._memory: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.calls[name] += 1
        if name == "copy_":
            self.copied += args[0].nbytes
        given = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(out):
            reference = StorageWeakRef(tensor.untyped_storage())
            if reference.cdata not in given:  # a view of what was there before is no new memory
                self._memory[reference.cdata] = (reference, tensor.untyped_storage().nbytes())
        return out

    def alive(self) -> int:
        """Return the bytes of results that are still held."""
        return sum(size for reference, size in self._memory.values() if not reference.expired())


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
