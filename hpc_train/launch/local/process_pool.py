"""A pool of processes on this machine: a queue, and a slot for each process that runs.

The pool starts queued processes and collects those that have ended. What a slot stands for (GPUs, CPUs), and what the
end of a process means, is up to the owner, which calls the two methods alternately.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class RunningProcesses(Protocol):
    """The processes of one slot."""

    def has_ended(self) -> bool:
        """Whether all of them have ended."""


WaitingT = TypeVar("WaitingT")
RunningT = TypeVar("RunningT", bound=RunningProcesses)


@dataclass
class ProcessPool(Generic[WaitingT, RunningT]):
    """Runs processes, at most `slots` at a time; the others wait in order."""

    slots: int
    start: Callable[[WaitingT, int], RunningT | None]
    """Starts one in a slot; None: there was nothing to run."""
    waiting: deque[WaitingT] = field(default_factory=deque)
    running: dict[int, RunningT] = field(default_factory=dict)
    """Slot -> what runs there."""

    def start_waiting(self) -> None:
        """Start what waits, in order, each in the lowest free slot, until no slot is free."""
        while self.waiting and len(self.running) < self.slots:
            slot = min(set(range(self.slots)) - self.running.keys())
            started = self.start(self.waiting.popleft(), slot)
            if started is not None:
                self.running[slot] = started

    def remove_ended(self) -> list[RunningT]:
        """Free the slots of those that have ended, and return them."""
        ended = {slot: running for slot, running in self.running.items() if running.has_ended()}
        for slot in ended:
            del self.running[slot]
        return list(ended.values())
