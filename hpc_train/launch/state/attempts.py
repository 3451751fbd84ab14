"""The markers and the rank map that an attempt leaves in its log directory.

attempt.json appears when the attempt starts and result.json when it ends, each by one rename. Under Slurm the batch
script writes them in shell, so that they exist even if Python does not start; without Slurm the process that starts the
ranks writes them. A file that cannot be read counts as missing.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from hpc_train import regular_files
from hpc_train.errors import EXIT_DONE
from hpc_train.processes import identify_machine, read_start_time
from hpc_train.regular_files import write_private_file

ATTEMPT_MARKER, RESULT_MARKER = "attempt.json", "result.json"
_MAX_MARKER_BYTES = 1 << 20
T = TypeVar("T")


@dataclass(frozen=True)
class AttemptStart:
    """The process or job that runs an attempt (attempt.json)."""

    host: str
    time: float
    job_id: str | None = None
    """Slurm's job id; None elsewhere."""
    launcher: str = "slurm"
    """slurm: the batch script; local: the local pool; srun, torchrun, mpirun, ...: what started the ranks."""
    nodes: str = ""
    """Slurm's host list of the nodes that the ranks started on."""
    spares: int = 0
    """Number of spare nodes that the job had in addition."""
    process: int = 0
    started: str = ""
    machine: str = ""
    """With `process` and `started`, identifies a process uniquely over time. Batch scripts leave these three empty."""


@dataclass(frozen=True)
class AttemptResult:
    """The end of an attempt (result.json)."""

    exit_code: int
    then: str = ""
    """requeue: the job runs again; chain: the next job of the chain continues; restart: the ranks are started again in
    the same allocation; cancel: stopped by `hpc-train cancel`."""
    why: str = ""
    slurm: str = ""
    """State and reason of the job at that moment, in Slurm's words."""
    time: float = 0.0

    @property
    def goes_on(self) -> bool:
        return self.then in ("requeue", "chain", "restart")

    @property
    def done(self) -> bool:
        return self.exit_code == EXIT_DONE and not self.goes_on


@dataclass(frozen=True)
class Attempt:
    """One run of a job, as its markers describe it."""

    number: int
    begun: AttemptStart | None = None
    result: AttemptResult | None = None


def read_attempts(run: Path) -> tuple[Attempt, ...]:
    """Read all attempts of a run directory, oldest first."""
    logs = run / "logs"
    names = [entry.name for entry in logs.iterdir()] if logs.is_dir() else []
    numbers = sorted(int(name) for name in names if name.isdecimal())
    return tuple(read_attempt(logs / str(number)) for number in numbers)


def read_attempt(logs: Path) -> Attempt:
    """Read the attempt whose log directory this is."""
    return Attempt(
        int(logs.name),
        _read_marker(logs / ATTEMPT_MARKER, AttemptStart),
        _read_marker(logs / RESULT_MARKER, AttemptResult),
    )


def _read_marker(path: Path, kind: type[T]) -> T | None:
    try:
        values: dict[str, Any] = json.loads(read_tail_text(path, _MAX_MARKER_BYTES))
        fields = kind.__dataclass_fields__  # type: ignore[attr-defined]
        return kind(**{name: value for name, value in values.items() if name in fields})
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


def write_attempt_marker(logs: Path, launcher: str, process: int, job_id: str | None = None) -> None:
    """Record that the attempt with this log directory runs in `process` of this machine."""
    begun = AttemptStart(
        socket.gethostname(),
        time.time(),
        job_id,
        launcher,
        process=process,
        started=read_start_time(process) or "",
        machine=identify_machine(),
    )
    write_private_file(logs / ATTEMPT_MARKER, json.dumps(asdict(begun)) + "\n")


def write_result_marker(logs: Path, exit_code: int, why: str = "") -> None:
    """Record how the attempt ended, unless that has been recorded before."""
    if not (logs / RESULT_MARKER).exists():
        text = json.dumps(asdict(AttemptResult(exit_code, "", why, "", time.time()))) + "\n"
        with suppress(OSError):  # a full disk: the exit code says the same to whoever started the run
            write_private_file(logs / RESULT_MARKER, text)


def cancel_marker_path(run: Path, job_id: str) -> Path:
    """Return the file that tells a job to end without being requeued, and not to start its ranks."""
    return run / "logs" / f"cancel-{job_id}"


RANK_MAP = "rankmap.json"


def read_rank_entries(folder: Path) -> list[dict[str, Any]]:
    """Read the ranks that the rank map in `folder` lists; [] if no rank map has been written."""
    try:
        entries = json.loads(read_tail_text(folder / RANK_MAP))["ranks"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    return [entry for entry in entries if isinstance(entry, dict)]


def find_task_of_rank(folder: Path, rank: int) -> int:
    """Return the task number of a rank; without a rank map, they are equal."""
    return next((int(entry["process"]) for entry in read_rank_entries(folder) if entry["rank"] == rank), rank)


def rank_of_task(folder: Path, task: int) -> int:
    """Return the rank of a task; without a rank map, they are equal."""
    return next((int(entry["rank"]) for entry in read_rank_entries(folder) if entry["process"] == task), task)


MAX_BYTES = 64 << 20
"""Size limit in bytes of a file that is read whole; events.jsonl has one line per save."""


def open_if_regular(path: Path) -> BinaryIO | None:
    """Open a file for reading; None if it cannot be read, or is a pipe, a device or a directory."""
    try:
        return os.fdopen(regular_files.open_regular(path, follow=True), "rb")
    except (OSError, ValueError):
        return None


def read_tail_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """Return the last `max_bytes` bytes of a file as text; "" if it cannot be read."""
    file = open_if_regular(path)
    if file is None:
        return ""
    with file:
        try:
            file.seek(max(0, os.fstat(file.fileno()).st_size - max_bytes))
            return file.read(max_bytes).decode(errors="replace")
        except OSError:
            return ""
