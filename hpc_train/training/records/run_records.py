"""Write and read metrics.jsonl, events.jsonl, and a small file for each rank that failed.

Imports neither torch nor omegaconf, because commands that look at runs import it.
"""

from __future__ import annotations

import json
import logging
import os
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpc_train.errors import IncompleteRun, MissingRanksError, UserError
from hpc_train.regular_files import (
    find_line_start,
    parse_json_object,
    read_json,
    read_text,
    write_private_file,
)
from hpc_train.user_frames import (
    LOST_PEER,
    describe_error,
    find_root_cause,
    format_frame,
    list_every_frame,
    list_user_frames,
)

log = logging.getLogger(__name__)
REQUEUE_MARKER = "requeue"
"""File in an attempt's log directory, of ranks that have stopped on purpose."""
LOSS_ALLOWED = "loss-allowed"
"""File in an attempt's log directory, of ranks that go on when some of them are lost."""


class LineFile:
    """Appends lines to a file of a run. A full disk does not end the run: lines wait in memory until there is room."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file cannot be opened."""
        self._path = path
        # Without O_NONBLOCK a named pipe in its place would wait for a reader.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY
        self._descriptor = os.open(path, flags, 0o600)
        self._waiting = bytearray(find_line_start(path).encode())
        self._warned = False

    def append(self, line: str) -> None:
        """Append a line, which ends with a line feed, after those that wait; one write, if none does."""
        self._waiting += line.encode()
        try:
            while self._waiting:
                # If the disk gets full in the middle of a line, the rest of it is written later.
                del self._waiting[: os.write(self._descriptor, self._waiting)]
            if self._warned:
                self._warned = False
                log.warning("%s: what waited is written now", self._path)
        except OSError as error:
            if not self._warned:
                self._warned = True
                log.warning("%s: %s; its lines wait in memory until they can be written", self._path, error.strerror)

    def close(self) -> None:
        """Try once more to write what waits; lines that are lost for good are counted in a warning."""
        self.append("")
        os.close(self._descriptor)
        if self._waiting:
            log.warning("%s: its last %d lines could not be written", self._path, self._waiting.count(b"\n"))


class MetricsFile:
    """Writes metrics.jsonl: each step once, also after a resume."""

    def __init__(self, path: Path, resumed_at: int) -> None:
        """Drop the lines of steps after `resumed_at`, which are about to be done again, and a torn last line.

        Raises UserError if the file cannot be read or written.
        """
        self._path = path
        try:
            if path.exists():
                # Rewritten whole and renamed: a reader sees either the old or the new lines.
                _write_metrics(path, [record for record in read_metrics(path) if record["step"] <= resumed_at])
            self._file = LineFile(path)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; make room, or give another run_dir") from error

    def write(self, record: dict[str, Any]) -> None:
        """Append one line. Values are JSON scalars; NaN and infinity are written as null."""
        self._file.append(_format_line(record))

    def amend(self, step: int, **fields: Any) -> None:
        """Add fields to the last line if it is the one of this step."""
        records = read_metrics(self._path)
        if not records or records[-1]["step"] != step:
            return
        records[-1].update(fields)
        try:
            _write_metrics(self._path, records)
        except OSError as error:
            log.warning("%s: %s; it lacks %s of step %d", self._path, error.strerror, ", ".join(fields), step)
            return
        self._file.close()
        self._file = LineFile(self._path)

    def close(self) -> None:
        self._file.close()


def _write_metrics(path: Path, records: Iterable[dict[str, Any]]) -> None:
    write_private_file(path, "".join(map(_format_line, records)))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics file; lines that were not written to their end are left out."""
    if not path.exists():
        return []
    return [record for line in _read_lines(path) if _is_step(record := parse_json_object(line))]


def format_event(kind: str, attempt: int, **fields: Any) -> str:
    """Return the line of events.jsonl for an event, such as start, resume, checkpoint or signal, as of now."""
    return json.dumps({"event": kind, "time": time.time(), "attempt": attempt, **fields}) + "\n"


def append_event(path: Path, kind: str, attempt: int, **fields: Any) -> None:
    """Append one event in one write, so that lines of two writers never mix; if that fails, it is a warning."""
    try:
        file = LineFile(path)
    except OSError as error:
        log.warning("%s: %s; the event %s is not recorded", path, error.strerror, kind)
        return
    file.append(format_event(kind, attempt, **fields))
    file.close()


def _read_lines(path: Path) -> list[str]:
    try:
        return read_text(path, errors="replace").splitlines()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; move it away, and the run writes a new one") from error


def _is_step(record: dict[str, Any]) -> bool:
    return type(record.get("step")) is int


def _format_line(record: dict[str, Any]) -> str:
    return json.dumps({key: _null_if_not_finite(value) for key, value in record.items()}) + "\n"


def _null_if_not_finite(value: Any) -> Any:
    # JSON has no NaN; value != value is true for NaN only.
    return None if isinstance(value, float) and (value != value or abs(value) == float("inf")) else value


def find_event_time(path: Path, kind: str, attempt: int) -> float | None:
    """Return time.time() of the first event of this kind in an attempt; None without one, or without the file."""
    chosen = [event for event in _read_events(path) if (event.get("event"), event.get("attempt")) == (kind, attempt)]
    times = [event.get("time") for event in chosen]
    return next((float(event_time) for event_time in times if isinstance(event_time, (int, float))), None)


def find_last_saved_step(path: Path) -> int | None:
    """Return the step of the last checkpoint that a run has recorded; None without one, or without the file.

    Steps that a rollback has marked bad since do not count.
    """
    steps: list[int] = []
    for event in _read_events(path):
        if event.get("event") == "checkpoint" and type(event.get("step")) is int:
            steps.append(event["step"])
        elif event.get("event") == "rollback" and isinstance(marked := event.get("marked"), list):
            steps = [step for step in steps if step not in marked]
    return steps[-1] if steps else None


def record_unusable_checkpoint(path: Path, attempt: int, step: int, why: str) -> None:
    """Record that this attempt went on from an older checkpoint, as it could not use that of `step`."""
    append_event(path, "unusable_checkpoint", attempt, step=step, why=why)


def _read_events(path: Path) -> list[dict[str, Any]]:
    try:
        return [parse_json_object(line) for line in read_text(path, errors="replace").splitlines()]
    except OSError:
        return []


@dataclass(frozen=True)
class RankFailure:
    """The error that ended one rank."""

    task: int
    host: str
    at: float
    """Seconds since 1970, by a clock that all ranks agree on where they have met: RankLog.read_job_clock."""
    user_error: bool
    """Whether the user's input is wrong."""
    message: str
    traceback: str
    summary: list[str] = field(default_factory=list)
    """One line with the exception, then the lines of the user's own files that led to it, innermost first."""
    incomplete: bool = False
    """Whether the run made its steps, but its result is bad or not saved (IncompleteRun)."""
    missing_tasks: list[int] = field(default_factory=list)
    """Tasks that it waited for in vain when the ranks were to meet (MissingRanksError)."""
    missing_hosts: list[str] = field(default_factory=list)
    """Their nodes, as far as they are known."""

    @property
    def one_line(self) -> bool:
        """Return whether the message is complete, so that a traceback would not add anything."""
        return self.user_error or self.incomplete

    @property
    def lost_peer(self) -> bool:
        """Return whether this rank failed only because another one was gone."""
        return LOST_PEER.search(self.message) is not None

    def text(self) -> str:
        """Format for a person: one line where that says all, else the rank and its traceback."""
        return self.message if self.one_line else f"task {self.task} on {self.host} failed first:\n{self.traceback}"


_LAST_FRAMES = 6
"""Maximum number of frames shown."""


def summarise_exception(error: BaseException) -> list[str]:
    """Summarise an exception as RankFailure.summary; if no frame is the user's, with the last frames."""
    frames = list_user_frames(error) or list_every_frame(error)
    lines = [
        f"{format_frame(frame)}: {frame.line}" if frame.line else format_frame(frame) for frame in frames[:_LAST_FRAMES]
    ]
    return [describe_error(find_root_cause(error)), *lines]


def record_failure(folder: Path, task: int, host: str, error: BaseException, at: float | None = None) -> RankFailure:
    """Write the error that ended this rank to the attempt's log directory; returns it. at: see RankFailure."""
    failure = RankFailure(
        task=task,
        host=host,
        at=time.time() if at is None else at,
        user_error=isinstance(error, UserError),
        incomplete=isinstance(error, IncompleteRun),
        missing_tasks=list(error.tasks) if isinstance(error, MissingRanksError) else [],
        missing_hosts=list(error.hosts) if isinstance(error, MissingRanksError) else [],
        message=str(error) or type(error).__name__,
        traceback="".join(traceback.format_exception(error)),
        summary=summarise_exception(error),
    )
    with suppress(OSError):  # a full disk: the rank's exit code has to do
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
        except (OSError, ValueError, TypeError):  # a rank that was killed while it wrote, or a full disk
            continue
    return min(failures, key=lambda failure: failure.at, default=None)
