"""The clock of a rank on a GPU, over a simulated device: a queue of work that the host fills and runs ahead of.

A GPU has the same three properties: an event is passed when the work before it is done, the host does not wait, and a
device without work stands still until the host brings some.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from hpc_train.step_clock import DeviceClock, StepPart


@dataclass
class Device:
    """Seconds since its start at which the host is, and at which the device will have done all it was given."""

    host: float = 0.0
    done: float = 0.0
    marks: int = 0

    def work(self, seconds: float, launch: float = 0.001) -> None:
        """The host takes `launch` to give the device work of so many seconds."""
        self.host += launch
        self.done = max(self.done, self.host) + seconds

    def wait(self, clock: DeviceClock, seconds: float) -> None:
        """The stream waits for a collective that ends so many seconds from now on the device."""
        begun = clock.begin_wait()
        self.done += seconds
        clock.end_wait(begun)

    def synchronize(self) -> None:
        """The host reads a loss."""
        self.host = max(self.host, self.done)

    def make_event(self) -> Mark:
        self.marks += 1
        return Mark(self)


@dataclass
class Mark:
    device: Device
    at: float = -1.0

    def record(self) -> None:
        self.at = max(self.device.done, self.device.host)

    def query(self) -> bool:
        return self.at <= self.device.host

    def elapsed_time(self, end_event: Mark) -> float:
        assert self.query(), "torch raises here"
        assert end_event.query(), "torch raises here"
        assert end_event.at >= self.at
        return (end_event.at - self.at) * 1000


def make_step(device: Device, clock: DeviceClock) -> None:
    """Half a second of work in all; the host needs 4 ms for it."""
    clock.begin()
    device.host += 0.05  # the batch is late
    clock.enter(StepPart.FORWARD)
    device.work(0.1)
    device.wait(clock, 0.03)
    device.work(0.1)
    clock.enter(StepPart.BACKWARD)
    device.work(0.3)
    clock.mark_bucket()
    device.done += 0.02
    device.wait(clock, 0.01)
    clock.end_backward()
    clock.enter(StepPart.UPDATE)
    device.work(0.02)
    clock.end()


def test_parts_are_the_times_of_the_device_and_not_of_the_host() -> None:
    device = Device()
    clock = DeviceClock(device.make_event, lambda: True)
    make_step(device, clock)
    assert device.host < 0.06
    first = clock.take()
    device.synchronize()
    make_step(device, clock)
    second = clock.take()
    times = first()
    assert times is not None
    expected = {StepPart.DATA: 0.05, StepPart.FORWARD: 0.231, StepPart.BACKWARD: 0.33, StepPart.UPDATE: 0.02}
    for part in StepPart:
        assert times.seconds[part] == pytest.approx(expected.get(part, 0.0), abs=1e-9), part
    assert times.blocked[StepPart.FORWARD] == pytest.approx(0.03)
    assert times.blocked[StepPart.BACKWARD] == pytest.approx(0.03)  # the wait inside counts once
    assert times.waits[:3] == pytest.approx([0.03, 0.01, 0.02])
    assert times.collectives == 3
    assert second() is None, "the device has not passed it, and nobody waits"


def test_events_are_used_again() -> None:
    device = Device()
    clock = DeviceClock(device.make_event, lambda: True)
    waiting = []
    for _ in range(10):
        make_step(device, clock)
        waiting.append(clock.take())
        device.synchronize()
        if len(waiting) > 1:
            assert waiting[-2]() is not None
    assert device.marks <= 24  # those of two steps


def test_work_of_others_is_not_counted() -> None:
    device = Device()
    own = [False]
    clock = DeviceClock(device.make_event, lambda: own[0])
    clock.begin()
    clock.enter(StepPart.FORWARD)
    device.wait(clock, 1.0)
    clock.mark_bucket()
    clock.end_backward()
    own[0] = True
    clock.enter(StepPart.UPDATE)
    clock.end()
    clock.end_wait(clock.begin_wait())
    device.synchronize()
    times = clock.take()()
    assert times is not None
    assert times.seconds[StepPart.DATA] == pytest.approx(1.0)
    assert (times.collectives, sum(times.blocked)) == (0, 0)
