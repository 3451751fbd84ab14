"""Requests to stop: SIGTERM, SIGUSR2 and Ctrl-C set a flag that the training loop polls at every step.

Only the standard library is imported, and the package above imports nothing, so that a rank can install the
handlers before it spends seconds on importing torch: a signal in that time is kept, not deadly.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
"""SIGTERM is what Slurm sends at preemption, SIGUSR2 what the batch script asks for before the time limit."""


@dataclass
class StopRequest:
    """Whether this process was asked to stop, by which signal, and when (time.time())."""

    signal_name: str | None = None
    at: float | None = None

    @property
    def requested(self) -> bool:
        return self.signal_name is not None

    def ask(self, name: str) -> None:
        """Record the first request; later ones change nothing."""
        if self.signal_name is None:
            self.at = time.time()
            self.signal_name = name


def install() -> StopRequest:
    """Handle the stop signals of this process (main thread only) by recording the request; returns its record.

    A process started with a signal ignored or blocked has it delivered again. Ctrl-C counts as a stop signal once; the
    second one raises KeyboardInterrupt as ever, for a person who does not want to wait for the end of a step.
    """
    request = StopRequest()

    def handler(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and request.signal_name == "SIGINT":
            raise KeyboardInterrupt
        request.ask(signal.Signals(number).name)

    for number in (*STOP_SIGNALS, signal.SIGINT):
        signal.signal(number, handler)
    let_through()
    return request


@contextmanager
def held_back() -> Iterator[None]:
    """Processes that are started inside begin with the stop signals blocked.

    A signal that comes before they have installed their handlers waits for them, in place of ending them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let_through() -> None:
    """Deliver the stop signals to this process, those that have waited first."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
