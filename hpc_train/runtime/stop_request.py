"""Record that a signal has asked this process to stop, for the training loop to poll.

SIGTERM, SIGUSR2 and Ctrl-C set a flag that the training loop polls at every step. Only the standard library is
imported, and the package above imports nothing, so that a rank can install the handlers before it spends seconds on
importing torch: a signal during that time is remembered instead of killing the process.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
"""SIGTERM is what Slurm sends at preemption, SIGUSR2 what the batch script asks for before the time limit."""


@dataclass
class StopRequest:
    """Records whether this process was asked to stop, and by which signal."""

    signal_name: str | None = None

    @property
    def requested(self) -> bool:
        """Whether this rank was asked to stop."""
        return self.signal_name is not None

    def ask(self, name: str) -> None:
        """Record the first request; later ones change nothing."""
        self.signal_name = self.signal_name or name


def install_stop_handlers() -> StopRequest:
    """Record stop signals of this process from now on; returns the record. Main thread only.

    Signals that the process was started with as ignored or blocked are delivered again. Ctrl-C is a stop signal once;
    the second one raises KeyboardInterrupt, for a person who does not want to wait for the end of a step.
    """
    request = StopRequest()

    def handler(number: int, _frame: FrameType | None) -> None:
        # Only a second Ctrl-C; one after another stop signal is the first.
        if number == signal.SIGINT and request.signal_name == "SIGINT":
            raise KeyboardInterrupt
        request.ask(signal.Signals(number).name)

    for number in (*STOP_SIGNALS, signal.SIGINT):
        signal.signal(number, handler)
    unblock_stop_signals()
    return request


@contextmanager
def block_stop_signals() -> Iterator[None]:
    """Inside this context, start child processes with the stop signals blocked.

    A signal that comes before a child has installed its handlers then waits for them, instead of ending the child.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_stop_signals() -> None:
    """Deliver stop signals to this process again, first those that have been waiting."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
