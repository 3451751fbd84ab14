"""Measure, on one rank, how long each part of a step took, and how long the rank was blocked by other ranks in it.

This is a leaf: engines and the training loop mark where a part begins, and code that waits for a collective reports for
how long. Reading the host's clock costs 50 ns. On a GPU the marks are events in the current stream, which are read one
step later, so that nothing waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from threading import get_ident
from typing import Any, Protocol

WAIT_BINS = 16
"""Number of groups in which the blocking times of a step's collectives are added up, in the order in which they ended.
"""


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
    """A clock that engines and the training loop mark. Marks outside a step are ignored."""

    observers: list[Callable[[StepPart], None]]
    """Called with each part that begins: a profiler's."""
    late: bool
    """The times of a step can be read only after one more step."""

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

    def take(self) -> ReadTimes:
        """Return what reads the times of the step that ended last: at once, or after one more step if `late`."""


ReadTimes = Callable[[], StepTimes | None]
"""Reads the times of one step, once; None if they were not measured, or are not there yet."""


class SilentClock:
    """Measures nothing, for runs whose clock is not read."""

    late = False

    def __init__(self) -> None:
        self.observers: list[Callable[[StepPart], None]] = []

    def begin(self) -> None: ...

    def enter(self, part: StepPart) -> None:
        for observe in self.observers:
            observe(part)

    def mark_bucket(self) -> None: ...

    def end_backward(self) -> None: ...

    def end(self) -> None: ...

    def begin_wait(self) -> Any: ...

    def end_wait(self, begun: Any) -> None: ...

    def take(self) -> ReadTimes:
        return lambda: None


class HostClock:
    """Measures a rank that computes on its processors, where a collective blocks the thread that waits for it.

    Waits of other threads, such as those of a save in the background, do not count.
    """

    late = False

    def __init__(self) -> None:
        self.observers: list[Callable[[StepPart], None]] = []
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
        for observe in self.observers:
            observe(part)
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

    def take(self) -> ReadTimes:
        times = self._times
        times.waits, times.collectives = sum_bins(self._waits), len(self._waits)
        return lambda: times


class DeviceEvent(Protocol):
    """A mark in the work of a device, such as torch.cuda.Event with timing."""

    def record(self) -> None:
        """Record the event after the work that this thread has given to the device so far."""

    def query(self) -> bool:
        """Tell, without waiting, whether the device has passed the mark."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from this mark to a later one. The device must have passed both."""


@dataclass
class _DeviceWait:
    """A stretch of a step in which the device could only wait for other ranks, less earlier waits inside it."""

    part: StepPart
    begun: DeviceEvent
    ended: DeviceEvent
    inside: tuple[_DeviceWait, ...] = ()


@dataclass
class _DeviceStep:
    """The marks of one step, in order of time."""

    parts: list[tuple[StepPart, DeviceEvent]] = field(default_factory=list)
    """Each part that began. The last one ends the step."""
    waits: list[_DeviceWait] = field(default_factory=list)


class DeviceClock:
    """Measures a rank that computes on a GPU, by events in the stream of its computation.

    The host runs ahead of the device, so its own clock says nothing of the parts. An event is passed when all work
    before it is done: the time between two events is what the device computed and waited in between, and also the time
    in which it had no work because the host was late. Where the stream waits for a collective, an event before and one
    after the wait say how long it was held up.

    The events of a step are read after the next one, in which the host has read a loss and so knows that the device is
    past them. No call here waits for the device; a step whose events it has not passed is not measured.
    """

    late = True

    def __init__(self, make_event: Callable[[], DeviceEvent], is_own_work: Callable[[], bool]) -> None:
        """is_own_work: whether the calling thread gives work to the stream of this rank's computation right now."""
        self.observers: list[Callable[[StepPart], None]] = []
        self._make_event, self._is_own_work = make_event, is_own_work
        self._unused: list[DeviceEvent] = []
        """Events that were read and can be recorded again: making one is ten times as dear."""
        self._active = False
        self._step = _DeviceStep()
        self._bucket: tuple[DeviceEvent, int] | None = None
        """Event at which the last bucket was ready, and number of waits that had ended by then."""

    def begin(self) -> None:
        self._step, self._bucket, self._active = _DeviceStep(), None, True
        self._step.parts.append((StepPart.DATA, self._mark()))

    def enter(self, part: StepPart) -> None:
        for observe in self.observers:
            observe(part)
        if self._active and self._is_own_work():
            self._step.parts.append((part, self._mark()))

    def mark_bucket(self) -> None:
        if self._active and self._is_own_work():
            self._bucket = self._mark(), len(self._step.waits)

    def end_backward(self) -> None:
        if self._bucket is None:
            return
        begun, waits = self._bucket
        inside = tuple(self._step.waits[waits:])  # as that for the loss, which counts already
        self._step.waits.append(_DeviceWait(self._part, begun, self._mark(), inside))
        self._bucket = None

    def end(self) -> None:
        for observe in self.observers:
            observe(StepPart.REST)
        if self._active:
            self._step.parts.append((StepPart.REST, self._mark()))
        self._active = False

    def begin_wait(self) -> DeviceEvent | None:
        return self._mark() if self._active and self._is_own_work() else None

    def end_wait(self, begun: DeviceEvent | None) -> None:
        if begun is not None:
            self._step.waits.append(_DeviceWait(self._part, begun, self._mark()))

    def take(self) -> ReadTimes:
        step, self._step = self._step, _DeviceStep()
        return lambda: self._read(step)

    @property
    def _part(self) -> StepPart:
        return self._step.parts[-1][0]

    def _mark(self) -> DeviceEvent:
        event = self._unused.pop() if self._unused else self._make_event()
        event.record()
        return event

    def _read(self, step: _DeviceStep) -> StepTimes | None:
        """Add up the times between the events of a step, which can be used again then."""
        if not step.parts or not step.parts[-1][1].query():
            return None  # events that are still to be passed are left to the garbage collector
        times, blocked = StepTimes(), []
        for (part, begun), (_, ended) in pairwise(step.parts):
            times.seconds[part] += begun.elapsed_time(ended) / 1000
        for wait in step.waits:
            seconds = _read_wait(wait) - sum(map(_read_wait, wait.inside))
            times.blocked[wait.part] += seconds
            blocked.append(seconds)
        times.waits, times.collectives = sum_bins(blocked), len(blocked)
        self._unused += [event for _, event in step.parts]
        self._unused += [event for wait in step.waits for event in (wait.begun, wait.ended)]
        return times


def _read_wait(wait: _DeviceWait) -> float:
    """Return the seconds between the events of a wait."""
    return wait.begun.elapsed_time(wait.ended) / 1000


def sum_bins(values: list[float], bins: int = WAIT_BINS) -> list[float]:
    """Add up neighbours so that `bins` values remain; fewer values stand alone, and zeros follow."""
    if len(values) <= bins:
        return values + [0.0] * (bins - len(values))
    return [sum(values[i * len(values) // bins : (i + 1) * len(values) // bins]) for i in range(bins)]
