"""Overlap copies between a device and the host with the computation, and manage the page-locked memory for them.

Copies have their own stream. It waits for the computation that makes a tensor before it copies it, and the computation
waits for an event on it before it uses or frees what was copied. So memory is reused in stream order, and no tensor
needs record_stream, which would make the moment of reuse depend on timing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Mark = Any
"""A torch.Event of the device's own kind; None on a CPU, where copies are made at once."""


class CopyStream:
    """The stream of the copies of one device. On a CPU everything is done at once and there is nothing to wait for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream: Any = None

    @contextmanager
    def queue(self) -> Iterator[None]:
        """Queue the copies of this block of code after all work that the computation has queued so far."""
        if self._module is None:
            yield
            return
        if self._stream is None:
            self._stream = self._module.Stream(device=self.device)
        self._stream.wait_stream(self._module.current_stream(self.device))
        with self._module.stream(self._stream):
            yield

    def mark(self) -> Mark:
        """Return an event after the copies that were queued so far."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, mark: Mark) -> None:
        """Make the computation wait for the copies before a mark; the host does not wait."""
        if mark is not None:
            self._module.current_stream(self.device).wait_event(mark)

    def wait_on_host(self, mark: Mark) -> None:
        """Make the host wait for the copies before a mark."""
        if mark is not None:
            mark.synchronize()


@dataclass(frozen=True)
class HostPlace:
    """Memory of the host, and the tensor that is in it now."""

    tensor: Tensor
    memory: Tensor


class HostMemory:
    """Host memory for copies, page-locked for CUDA, and reused because locking pages takes long.

    Returned memory may be handed out while a copy from it is still queued: the next user fills it by a later copy on
    the same stream, or has waited for an event.
    """

    def __init__(self, device: torch.device) -> None:
        """device: that copies go to and come from."""
        self._pinned = device.type == "cuda" and torch.cuda.is_available()  # a rehearsal has no GPU
        self._free: dict[int, list[Tensor]] = defaultdict(list)

    def take(self, like: Tensor) -> HostPlace:
        """Return memory for a tensor, of the same layout unless it overlaps itself; its content is that of before."""
        layout = torch.empty_like(like, device="meta")  # the strides of `like`, or dense ones if it overlaps itself
        needed = 1 + sum((size - 1) * step for size, step in zip(layout.shape, layout.stride(), strict=True))
        size = needed * layout.dtype.itemsize if layout.numel() else 0
        free = self._free[size]
        memory = free.pop() if free else torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        return HostPlace(memory.view(layout.dtype).as_strided(layout.shape, layout.stride()), memory)

    def give_back(self, place: HostPlace) -> None:
        """Keep memory from `take` for another tensor."""
        self._free[place.memory.numel()].append(place.memory)

    def count_free_bytes(self) -> int:
        """Count the bytes that are kept and not in use."""
        return sum(size * len(free) for size, free in self._free.items())
