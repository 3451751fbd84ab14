"""The markers of an attempt: attempt.json when it begins, result.json when it ends. Both appear whole or not at all.

The batch script writes them in shell, so that they are there also where Python is not; of runs without Slurm the
process that starts the ranks does.
"""

from __future__ import annotations

import json
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from hpc_train.errors import EXIT_DONE
from hpc_train.regular_files import read_json
from hpc_train.runtime.alive import machine, start_of

BEGUN, RESULT = "attempt.json", "result.json"
T = TypeVar("T")


@dataclass(frozen=True)
class Begun:
    """Who runs an attempt."""

    host: str
    time: float
    job_id: str | None = None
    """Of Slurm; None elsewhere."""
    launcher: str = "slurm"
    """slurm: the batch script; local: the local pool; srun, torchrun, mpirun, ...: what started the ranks."""
    nodes: str = ""
    """Slurm's host list."""
    process: int = 0
    started: str = ""
    machine: str = ""
    """With `process`: tells a process from all others at any time. Not of batch scripts, whose job says more."""


@dataclass(frozen=True)
class Result:
    """How an attempt ended."""

    exit_code: int
    then: str = ""
    """requeue: the job runs again; chain: the next job of the chain goes on; cancel: stopped by `hpc-train cancel`."""
    why: str = ""
    slurm: str = ""
    """State and reason of the job at that moment, in Slurm's words."""
    time: float = 0.0

    @property
    def goes_on(self) -> bool:
        return self.then in ("requeue", "chain")

    @property
    def done(self) -> bool:
        return self.exit_code == EXIT_DONE and not self.goes_on


@dataclass(frozen=True)
class Attempt:
    """One run of a job, as its markers tell."""

    number: int
    begun: Begun | None = None
    result: Result | None = None


def read_attempts(run: Path) -> tuple[Attempt, ...]:
    """All attempts in a run directory, oldest first."""
    logs = run / "logs"
    names = [entry.name for entry in logs.iterdir()] if logs.is_dir() else []
    numbers = sorted(int(name) for name in names if name.isdecimal())
    return tuple(read_attempt(logs / str(number)) for number in numbers)


def read_attempt(logs: Path) -> Attempt:
    """The attempt whose log directory this is."""
    return Attempt(int(logs.name), _marker(logs / BEGUN, Begun), _marker(logs / RESULT, Result))


def _marker(path: Path, kind: type[T]) -> T | None:
    try:
        values: dict[str, Any] = read_json(path)
        known = kind.__dataclass_fields__  # type: ignore[attr-defined]
        return kind(**{name: value for name, value in values.items() if name in known})
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def mark_begun(logs: Path, launcher: str, process: int, job_id: str | None = None) -> None:
    """The attempt whose log directory this is runs in `process` of this machine."""
    from hpc_train.training.folder import write_private  # which brings half a second of imports

    begun = Begun(socket.gethostname(), time.time(), job_id, launcher, "", process, start_of(process) or "", machine())
    write_private(logs / BEGUN, json.dumps(asdict(begun)) + "\n")


def mark_result(logs: Path, exit_code: int, why: str = "") -> None:
    """The attempt ended; the first word counts."""
    from hpc_train.training.folder import write_private

    if not (logs / RESULT).exists():
        write_private(logs / RESULT, json.dumps(asdict(Result(exit_code, "", why, "", time.time()))) + "\n")


def cancel_marker(run: Path, job_id: str) -> Path:
    """There: the job is to end, not to be requeued, and its ranks need not begin."""
    return run / "logs" / f"cancel-{job_id}"
