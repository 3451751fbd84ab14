"""Cases in interleaved rounds: what disturbs the machine disturbs all of them alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

_ROUND_SECONDS = 0.1
"""About what a case may take in a round."""


@dataclass(frozen=True)
class Case:
    """Something that all ranks do together."""

    call: Callable[[], None]
    finish: Callable[[], None]
    """Wait for what `call` has queued."""
    fill: Callable[[], None]
    """Set the buffers to what is sent."""
    wrong: Callable[[], int]
    """Elements of this rank that are not what they must be after `fill` and one `call`."""


def wrong_elements_of(cases: Sequence[Case]) -> list[int]:
    """Of each case, over all ranks; each is called once. Every rank calls it and gets the answer."""
    mine = []
    for case in cases:
        case.fill()
        case.call()
        case.finish()
        mine.append(case.wrong())
    total = torch.tensor(mine, dtype=torch.int64)
    dist.all_reduce(total)
    return [int(count) for count in total]


def take_rounds(cases: Sequence[Case], rounds: int, most: int) -> NDArray[np.float64]:
    """(rounds, cases): seconds a call of the slowest rank; every second round is in reverse order.

    most: calls of a case and round, which are fewer where they take long. Every rank calls it and gets the answer.
    """
    once = _slowest(np.array([_timed(case, 1) for case in cases]))  # it also warms up
    calls = [min(most, max(1, math.floor(_ROUND_SECONDS / seconds))) for seconds in once]
    seconds = np.zeros((rounds, len(cases)))
    for number in range(rounds):
        forward = range(len(cases))
        for index in forward if number % 2 == 0 else reversed(forward):
            seconds[number, index] = _timed(cases[index], calls[index])
    return _slowest(seconds)


def _timed(case: Case, calls: int) -> float:
    """Seconds a call of this rank."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        case.call()
    case.finish()
    return (time.perf_counter() - begin) / calls


def _slowest(mine: NDArray[np.float64]) -> NDArray[np.float64]:
    """The greatest value over the ranks, of each element."""
    seconds = torch.from_numpy(mine.copy())
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    greatest: NDArray[np.float64] = seconds.numpy()
    return greatest
