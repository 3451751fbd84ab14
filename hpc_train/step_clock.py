"""Measure, on one rank, how long each part of a step took, and how long the rank was blocked by other ranks in it.

A leaf: engines and the training loop mark where a part begins, and whoever waits for a collective says for how long.
Reading the host's clock costs 50 ns. On a GPU the marks are events in the current stream, which are read one step
later, so that nothing waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from threading import get_ident
from typing import Any, Protocol

WAIT_BINS = 16
"""Blocking times of the collectives of a step are added up in so many groups, in the order in which they ended."""


class StepPart(IntEnum):
    """Parts of a step, in order of time."""

    DATA = 0
    """Fetching the batch."""
    FORWARD = 1
    BACKWARD = 2
    """From the end of a forward to the next one, or to the end of all micro-batches: loss, backward, reductions."""
    CLIP = 3
    """The gradient's norm."""
    UPDATE = 4
    """The optimizer."""
    REST = 5
    """Everything else: records, and what comes between two steps."""


@dataclass
class StepTimes:
    """Seconds of one step on one rank, by part."""

    seconds: list[float] = field(default_factory=lambda: [0.0] * len(StepPart))
    """Wall time, blocked time included."""
    blocked: list[float] = field(default_factory=lambda: [0.0] * len(StepPart))
    """Time in which this rank, or its device, could only wait for a collective."""
    waits: list[float] = field(default_factory=lambda: [0.0] * WAIT_BINS)
    """The same time by collective: the first sixteenth of the collectives of the step first."""
    collectives: int = 0
    """That were waited for."""


class StepClock(Protocol):
    """What engines and the loop call. Marks outside a step are ignored."""

    observer: Callable[[StepPart], None] | None
    """Called with each part that begins: a profiler's."""

    def begin(self) -> None:
        """Begin a step, in DATA."""

    def enter(self, part: StepPart) -> None:
        """Begin a part, and end the one before."""

    def mark_bucket(self) -> None:
        """Say that this rank's gradients of a bucket are ready, whose reduction no Python code waits for."""

    def end_backward(self) -> None:
        """Count the time since the last `mark_bucket` as blocked: only the reductions of buckets were left."""

    def end(self) -> None:
        """End a step."""

    def begin_wait(self) -> Any:
        """Begin to wait for a collective; the result goes to `end_wait`."""

    def end_wait(self, begun: Any) -> None:
        """End the waiting."""

    def take(self) -> StepTimes | None:
        """Return the times of the step that ended last; None if they were not measured."""


class SilentClock:
    """Measures nothing, where nobody reads it."""

    def __init__(self) -> None:
        self.observer: Callable[[StepPart], None] | None = None

    def begin(self) -> None: ...

    def enter(self, part: StepPart) -> None:
        if self.observer is not None:
            self.observer(part)

    def mark_bucket(self) -> None: ...

    def end_backward(self) -> None: ...

    def end(self) -> None: ...

    def begin_wait(self) -> Any: ...

    def end_wait(self, begun: Any) -> None: ...

    def take(self) -> StepTimes | None: ...


class HostClock:
    """Measures a rank that computes on its processors, where a collective blocks the thread that waits for it.

    Waits of other threads, such as those of a save in the background, do not count.
    """

    def __init__(self) -> None:
        self.observer: Callable[[StepPart], None] | None = None
        self._thread = get_ident()
        self._active = False
        self._times = StepTimes()
        self._waits: list[float] = []
        self._part, self._since = StepPart.REST, 0.0
        self._bucket: tuple[float, int] | None = None
        """When the last bucket was ready, and how many waits had ended by then."""

    def begin(self) -> None:
        self._times, self._waits, self._bucket = StepTimes(), [], None
        self._part, self._since, self._active = StepPart.DATA, time.perf_counter(), True

    def enter(self, part: StepPart) -> None:
        if self.observer is not None:
            self.observer(part)
        if not self._active:
            return
        now = time.perf_counter()
        self._times.seconds[self._part] += now - self._since
        self._part, self._since = part, now

    def mark_bucket(self) -> None:
        if self._active:
            self._bucket = time.perf_counter(), len(self._waits)

    def end_backward(self) -> None:
        if self._bucket is None:
            return
        at, waits = self._bucket
        # A wait in Python after the last bucket, as that for the loss, counts already.
        seconds = time.perf_counter() - at - sum(self._waits[waits:])
        self._times.blocked[self._part] += seconds
        self._waits.append(seconds)
        self._bucket = None

    def end(self) -> None:
        self.enter(StepPart.REST)
        self._active = False

    def begin_wait(self) -> float:
        return time.perf_counter()

    def end_wait(self, begun: float) -> None:
        if self._active and get_ident() == self._thread:
            seconds = time.perf_counter() - begun
            self._times.blocked[self._part] += seconds
            self._waits.append(seconds)

    def take(self) -> StepTimes | None:
        self._times.waits, self._times.collectives = sum_bins(self._waits), len(self._waits)
        return self._times


def sum_bins(values: list[float], bins: int = WAIT_BINS) -> list[float]:
    """Add up neighbours so that `bins` values remain; fewer values stand alone, and zeros follow."""
    if len(values) <= bins:
        return values + [0.0] * (bins - len(values))
    return [sum(values[i * len(values) // bins : (i + 1) * len(values) // bins]) for i in range(bins)]
