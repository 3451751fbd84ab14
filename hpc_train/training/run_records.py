"""Write and read what ranks record: metrics.jsonl, events.jsonl, and a small file for each rank that failed.

Imports neither torch nor omegaconf, because commands that look at runs import it.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpc_train.errors import IncompleteRun, UserError
from hpc_train.regular_files import read_json, read_text
from hpc_train.user_frames import LOST_PEER, describe_error, every_frame, format_frame, root_cause, user_frames


class MetricsFile:
    """Writes metrics.jsonl: each step once, also after a resume."""

    def __init__(self, path: Path, resumed_at: int) -> None:
        """Drop the lines of steps after `resumed_at`, which are about to be done again, and a torn last line."""
        kept = []
        if path.exists():
            kept = [line for line in read_text(path).splitlines() if _parse_step(line) <= resumed_at]
            beside = path.with_name(f".{path.name}.{os.getpid()}")
            beside.write_text("".join(f"{line}\n" for line in kept))
            beside.replace(path)
        self._path = path
        self._file = path.open("a", buffering=1)

    def write(self, record: dict[str, Any]) -> None:
        """Append one line. Values are JSON scalars; NaN and infinity are written as null."""
        self._file.write(_format_line(record))

    def amend(self, step: int, **fields: Any) -> None:
        """Add fields to the last line if it is the one of this step."""
        records = read_metrics(self._path)
        if not records or records[-1]["step"] != step:
            return
        records[-1].update(fields)
        self._file.close()
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        beside.write_text("".join(_format_line(record) for record in records))
        beside.replace(self._path)
        self._file = self._path.open("a", buffering=1)

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics file; lines that were not written to their end are left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in read_text(path).splitlines() if _parse_step(line) < _AFTER_ALL_STEPS]


def append_event(path: Path, kind: str, attempt: int, **fields: Any) -> None:
    """Append one event, such as start, resume, checkpoint or signal, in one write: lines of two writers never mix."""
    line = json.dumps({"event": kind, "time": time.time(), "attempt": attempt, **fields}) + "\n"
    # Without O_NONBLOCK a named pipe in its place would wait for a reader.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


_AFTER_ALL_STEPS = 1 << 62


def _parse_step(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return _AFTER_ALL_STEPS


def _format_line(record: dict[str, Any]) -> str:
    return json.dumps({key: _null_if_not_finite(value) for key, value in record.items()}) + "\n"


def _null_if_not_finite(value: Any) -> Any:
    return None if isinstance(value, float) and (value != value or abs(value) == float("inf")) else value


@dataclass(frozen=True)
class RankFailure:
    """The error that ended one rank."""

    task: int
    host: str
    at: float
    """time.time()."""
    user_error: bool
    message: str
    traceback: str
    summary: list[str] = field(default_factory=list)
    """One line with the exception, then the lines of the user's own files that led to it, innermost first."""

    @property
    def lost_peer(self) -> bool:
        """Return whether this rank failed only because another one was gone."""
        return LOST_PEER.search(self.message) is not None

    def text(self) -> str:
        """Format for a person: one line for a mistake of the user, else the rank and its traceback."""
        return self.message if self.user_error else f"task {self.task} on {self.host} failed first:\n{self.traceback}"


_LAST_FRAMES = 6
"""Maximum number of frames shown."""


def summarise_exception(error: BaseException) -> list[str]:
    """Summarise an exception as RankFailure.summary; if no frame is the user's, with the last frames."""
    frames = user_frames(error) or every_frame(error)
    lines = [
        f"{format_frame(frame)}: {frame.line}" if frame.line else format_frame(frame) for frame in frames[:_LAST_FRAMES]
    ]
    return [describe_error(root_cause(error)), *lines]


def record_failure(folder: Path, task: int, host: str, error: BaseException) -> RankFailure:
    """Write the error that ended this rank to the attempt's log directory; returns it."""
    failure = RankFailure(
        task=task,
        host=host,
        at=time.time(),
        user_error=isinstance(error, (UserError, IncompleteRun)),
        message=str(error) or type(error).__name__,
        traceback="".join(traceback.format_exception(error)),
        summary=summarise_exception(error),
    )
    (folder / f"task-{task}.failure.json").write_text(json.dumps(asdict(failure)))
    return failure


def read_first_failure(folder: Path) -> RankFailure | None:
    """Return the earliest failure recorded in an attempt's log directory; None if there is none.

    The earliest is the cause: when a rank is lost, the others fail a moment later.
    """
    failures = []
    for path in folder.glob("task-*.failure.json"):
        try:
            failures.append(RankFailure(**read_json(path)))
        except ValueError:  # a rank that was killed while it wrote
            continue
    return min(failures, key=lambda failure: failure.at, default=None)
