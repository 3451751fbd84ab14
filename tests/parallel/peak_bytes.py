"""Count how much memory the results of torch's operators take at most."""

from __future__ import annotations

import time
import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that are made inside this context. Kernels' own scratch memory is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self.largest = 0
        """Of one tensor."""
        self._known: set[int] = set()

    def settled(self, at_most: float, seconds: float = 10.0) -> int:
        """Return `now`, after waiting until it is at most `at_most`: the threads of collectives drop their tensors a
        little later.
        """
        deadline = time.monotonic() + seconds
        while self.now > at_most and time.monotonic() < deadline:
            time.sleep(0.005)
        return self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in before:
                self._count(leaf)
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
