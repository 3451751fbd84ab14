"""The processes of one local job, seen as one: what submitit's LocalJob asks of a process."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from submitit.core.utils import JobPaths

from hpc_train.launch.functions.stopping import requeue_marker
from hpc_train.runtime.stop import held_back

_NEVER = float("inf")
_GRACE = 2.0
"""Seconds that the other ranks have when one has failed, and all of them when they are to end."""


@dataclass(frozen=True)
class Program:
    """What a job runs, `ranks` times."""

    command: str
    folder: Path
    environment: Mapping[str, str]
    ranks: int = 1
    setup: Sequence[str] = ()
    seconds: float = 0.0
    """Time limit; 0: none."""
    notice: float = 0.0
    """Seconds before it at which the ranks are told to stop; never, if that is before they start."""
    max_attempts: int = 1
    one_log: bool = False
    devices: Sequence[str] = ()
    """Of CUDA, shared out over the slots."""
    devices_a_job: int | None = None
    """None: every job sees what this process sees."""

    def words(self) -> list[str]:
        if not self.setup:
            return shlex.split(self.command)
        return ["bash", "-c", "\n".join(["set -e", *self.setup, "set +e", f"exec {self.command}"])]

    def visible(self, slot: int) -> dict[str, str]:
        """The devices of the job in this slot."""
        if self.devices_a_job is None:
            return {}
        first = slot * self.devices_a_job
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.devices[first : first + self.devices_a_job])}


class Ranks:
    """A job that waits, runs, or has ended; looking at it is what drives it."""

    def __init__(self, program: Program, job_id: str, turn: Callable[[], None]) -> None:
        """turn: of the pool that the job belongs to."""
        self._program, self._job_id, self._turn = program, job_id, turn
        self.slot = -1
        self._attempt = 0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._code: int | None = None
        self._failed: int | None = None
        self._cancelled = self._told = False
        self._over_at = self._kill_at = _NEVER

    @property
    def pid(self) -> int:
        """Of the first rank; 0 before it started."""
        return self._processes[0].pid if self._processes else 0

    def poll(self) -> int | None:
        """The exit code: that of the first rank that failed, -n where signal n ended it; None: not ended."""
        self._turn()
        return self.look()

    def start(self, slot: int) -> None:
        """Start the ranks. slot: which share of the machine's devices is theirs."""
        self.slot, self._told, self._failed = slot, False, None
        self._over_at = time.monotonic() + self._program.seconds if self._program.seconds else _NEVER
        with held_back():
            self._processes = [self._start(rank) for rank in range(self._program.ranks)]

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        it, paths = self._program, JobPaths(self._program.folder, self._job_id, rank)
        paths.folder.mkdir(parents=True, exist_ok=True)
        mine = {"LOCALID": str(rank), "GLOBALID": str(rank), "JOB_ID": self._job_id}
        with _log(paths.stdout) as out, contextlib.nullcontext(out) if it.one_log else _log(paths.stderr) as err:
            return subprocess.Popen(
                it.words(),
                env={**it.environment, **it.visible(self.slot), **{f"SUBMITIT_LOCAL_{k}": v for k, v in mine.items()}},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,  # Ctrl-C is for whoever waits for the job
            )

    def look(self) -> int | None:
        """The exit code, without giving other jobs their turn."""
        if self._code is None and self._processes:
            codes = [process.poll() for process in self._processes]
            if self._failed is None:
                self._failed = next((code for code in codes if code), None)
                if self._failed is not None:
                    self._kill_at = min(self._kill_at, time.monotonic() + _GRACE)
            if None in codes:
                self._watch_clock()
            else:
                self._ended()
        return self._code

    def _ended(self) -> None:
        marker = JobPaths(self._program.folder, self._job_id).folder / requeue_marker(self._job_id)
        again = marker.exists() and not self._cancelled
        marker.unlink(missing_ok=True)
        self._attempt += 1
        if again and self._attempt < self._program.max_attempts:
            self._kill_at = _NEVER
            self.start(self.slot)
        else:
            self._code = self._failed or 0

    def _watch_clock(self) -> None:
        now = time.monotonic()
        due = self._over_at - self._program.notice
        if now > due and not self._told and self._program.notice < self._program.seconds:
            self._told = True
            self._pass_on(signal.SIGUSR2)
        if now > self._over_at:
            self._over_at, self._kill_at, self._cancelled = _NEVER, now + _GRACE, True
            self._pass_on(signal.SIGTERM)
        if now > self._kill_at:
            self._kill_at = _NEVER
            self._pass_on(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """SIGUSR2 lets the job be run again; any other signal is meant to end it, and soon does."""
        self._cancelled = self._cancelled or number != signal.SIGUSR2
        if not self._processes and self._code is None and self._cancelled:
            self._code = -number
        if self._cancelled:
            self._kill_at = min(self._kill_at, time.monotonic() + _GRACE)
        self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    def kill(self) -> None:
        """End all ranks at once, and whatever they started in their sessions."""
        self._cancelled = True
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        self._code = self._code if self._code is not None else -signal.SIGKILL

    def wait(self) -> int:
        """The exit code, when the job has ended."""
        while (code := self.poll()) is None:
            time.sleep(0.05)
        return code


def _log(path: Path) -> IO[bytes]:
    """Opened to append, readable by its owner alone."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")
