"""Stop requests and garbage collection of this process, and whether another process is alive.

SIGTERM, SIGUSR2 and Ctrl-C set a flag that the training loop polls at every step. Only the standard library is
imported, and the package above imports nothing, so that a rank can install the handlers before it spends seconds on
importing torch: a signal during that time is remembered instead of killing the process.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
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


_SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


def signal_at_parent_end(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends, however that ends."""
    import ctypes  # only where it is needed: it loads libffi

    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, int(number), 0, 0, 0)


@contextmanager
def pause_gc(freeze: bool = False) -> Iterator[None]:
    """Pause garbage collection while many objects are made; reference counts still free most of them.

    A collection would look at every object of torch and free none: tens of thousands of small objects are made ten
    times as fast without. freeze: later collections leave out everything that exists at the end.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if freeze:
            gc.freeze()
        if was_enabled:
            gc.enable()


def identify_machine() -> str:
    """Return a text that tells this boot of this machine, and this container on it, from all others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def read_start_time(process: int) -> str | None:
    """Return when a process started, in clock ticks since boot; None if there is none, or only a zombie."""
    try:
        after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2]  # a name may hold ")" and spaces
        fields = after_name.split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]  # fields 3 and 22 of proc_pid_stat(5)


def is_process_alive(process: int, started: str, machine: str) -> bool | None:
    """Return whether a process is alive; None if it is not on this machine.

    process: its id. started: as from read_start_time: the id alone may be another process's by now.
    machine: as from identify_machine.
    """
    if not process or machine != identify_machine():
        return None
    return read_start_time(process) == started


def is_process_id_used(process: int) -> bool:
    """Return whether some process of this machine has this id, whoever owns it."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass  # another user's, or a number that is no process id, of which nothing is known
    return True
