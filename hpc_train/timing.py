"""Time repeated calls of work on a device, and order rounds so that drift affects all candidates alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch


def time_calls(work: Callable[[], object], calls: int, device: torch.device) -> float:
    """Return seconds per call, from an idle device until it has finished the last call."""
    synchronize_device(device)
    begin = time.perf_counter()
    for _ in range(calls):
        work()
    synchronize_device(device)
    return (time.perf_counter() - begin) / calls


def synchronize_device(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleave_rounds(rounds: int, candidates: int) -> Iterator[tuple[int, int]]:
    """Yield (round, candidate) pairs, every second round in reverse order: A B C, C B A, ...

    A machine that becomes slower (or faster) during the measurement then does so for all candidates alike.
    """
    for number in range(rounds):
        order = range(candidates)
        for candidate in order if number % 2 == 0 else reversed(order):
            yield number, candidate
