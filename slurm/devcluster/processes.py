"""Running commands, starting daemons, and stopping exactly the processes that were started here."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

POLITE_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
DAEMON_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "HOME": "/root"}


class ClusterError(Exception):
    """An error that the user can correct; the command line prints it without a traceback."""


@dataclass(frozen=True)
class Process:
    """A pid and the clock tick at which it started, so that a reused pid is never mistaken for it."""

    pid: int
    start: int

    def alive(self) -> bool:
        return start_tick(self.pid) == self.start

    def stop(self, first: signal.Signals = signal.SIGTERM) -> None:
        """Send `first`, then SIGKILL if it is still there after five seconds."""
        for number in (first, signal.SIGKILL):
            if not self.alive():
                return
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
            end = time.monotonic() + 5
            while self.alive() and time.monotonic() < end:
                time.sleep(0.02)
        if self.alive():
            raise ClusterError(f"process {self.pid} survived SIGKILL")


def start_tick(pid: int) -> int | None:
    """Return the clock ticks since boot at which `pid` started; None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def run(*command: object, check: bool = True, text: str = "", env: Mapping[str, str] | None = None) -> str:
    """Run a command to its end with `text` on stdin and return stdout. Raises ClusterError with the command and its
    output if it fails.
    """
    argv = [str(word) for word in command]
    done = subprocess.run(argv, text=True, capture_output=True, input=text, env=env, check=False)
    if check and done.returncode:
        said = (done.stderr or done.stdout).strip()[-600:]
        raise ClusterError(f"`{' '.join(argv)}` exited {done.returncode}: {said}")
    return done.stdout


def succeeds(*command: object, env: Mapping[str, str] | None = None) -> bool:
    argv = [str(word) for word in command]
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, env=env, check=False).returncode == 0


def spawn(command: Sequence[object], log: Path, env: Mapping[str, str] | None = None) -> int:
    """Start a daemon in a session of its own, output appended to `log`; returns its pid."""

    def accept_signals() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, POLITE_ENDS)

    with log.open("ab") as out:
        return subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            cwd="/",
            preexec_fn=accept_signals,  # the caller may hold them back, see signals_held
            env={**DAEMON_ENVIRONMENT, **(env or {})},
        ).pid


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Put off Ctrl-C and the like, so that a process cannot be started without being recorded."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, POLITE_ENDS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def wait_for(
    what: str,
    ready: Callable[[], bool],
    seconds: float,
    log: Path | None = None,
    process: Process | None = None,
) -> None:
    """Poll `ready`. Raises ClusterError with the end of `log` after `seconds`, or once `process` is dead."""
    end = time.monotonic() + seconds
    while not ready():
        if process is not None and not process.alive():
            raise ClusterError(f"{what}: process exited{tail(log)}")
        if time.monotonic() > end:
            raise ClusterError(f"{what}: not ready after {seconds:g} s{tail(log)}")
        time.sleep(0.05)


def tail(log: Path | None) -> str:
    """Return the last lines of a log, for an error message."""
    if log is None or not log.exists():
        return ""
    return "".join(f"\n  {line}" for line in log.read_text(errors="replace").splitlines()[-8:])


def only_child(parent: int, what: str) -> int:
    """Return the pid of the child of a forking wrapper such as unshare or nsenter."""
    children = Path(f"/proc/{parent}/task/{parent}/children")
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            pids = children.read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            raise ClusterError(f"{what}: wrapper exited at once") from None
        if pids:
            return int(pids[0])
        time.sleep(0.02)
    raise ClusterError(f"{what}: wrapper started nothing in 10 s")


def enter(process: Process, namespaces: str = "muinp") -> list[str]:
    """Return the command prefix that runs the rest inside `namespaces` (nsenter's option letters) of `process`."""
    return ["nsenter", "-t", str(process.pid), *(f"-{letter}" for letter in namespaces)]
