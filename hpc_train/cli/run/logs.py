"""`hpc-train logs RUN`: print or follow the log of a rank, or show the first error."""

from __future__ import annotations

import codecs
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from hpc_train.cli.run.status import read_statuses
from hpc_train.errors import UserError
from hpc_train.launch.recovery.failures import FirstError, find_first_error
from hpc_train.launch.slurm.polling import Backoff
from hpc_train.launch.slurm.slurm_cli import run_client
from hpc_train.launch.state.attempts import (
    RESULT_MARKER,
    find_task_of_rank,
    rank_of_task,
    read_attempts,
    read_tail_text,
)
from hpc_train.launch.state.run_lookup import RunPoint, find_points, require_single
from hpc_train.launch.state.state_names import State
from hpc_train.regular_files import open_to_read
from hpc_train.terminal import one_line

_POLL_SECONDS = 0.2
_ERROR_LINES = 20
_BLOCK_BYTES = 1 << 16


@dataclass(frozen=True)
class LogSelection:
    """Which log to print, and how much of it."""

    ranks: Sequence[range] | None = None
    """None: rank 0; of merged logs all."""
    attempt: int | None = None
    tail: int | None = None
    """Lines; None: all."""

    @property
    def rank(self) -> int:
        """The one rank whose log is printed."""
        return self.ranks[0][0] if self.ranks else 0


def logs_command(run: str, choice: LogSelection, follow: bool, error_only: bool) -> int:
    """Print a log, and return the exit code. Raises UserError if there is no such log (yet)."""
    points = find_points(run, run_client)
    if error_only and len(points) > 1:
        return _print_failed_points(points)
    point = require_single(points, run)
    if error_only:
        return _print_first_error(point, choice)
    if follow:
        return _follow_run(point, choice, lambda: read_statuses([point])[0].state)
    attempt = choose_attempt(point.run, choice)
    with _open_log(_find_rank_log(point, attempt, choice)) as file:
        _print_end(file, choice.tail)
    return 0


def _print_failed_points(points: Sequence[RunPoint]) -> int:
    """Print a line for each point of a sweep that failed."""
    failed = [
        row for row in read_statuses(points) if row.state.ended and row.state not in (State.DONE, State.CANCELLED)
    ]
    for row in failed:
        print(f"{row.point}: {row.state}{f': {row.reason}' if row.reason else ''}")
    if not failed:
        print(f"no point of {len(points)} has failed")
    return 0


def _list_attempts(run: Path) -> list[int]:
    return [attempt.number for attempt in read_attempts(run)]


def choose_attempt(run: Path, choice: LogSelection) -> int:
    """Return the chosen attempt, or the newest. Raises UserError if there is none."""
    attempts = _list_attempts(run)
    if not attempts:
        raise UserError(f"{run}: no attempt has begun; see `hpc-train status {run}`, or wait for it with -f")
    if choice.attempt is None:
        return attempts[-1]
    if choice.attempt not in attempts:
        raise UserError(f"--attempt {choice.attempt}: there is {', '.join(map(str, attempts))}")
    return choice.attempt


def _find_rank_log(point: RunPoint, attempt: int, choice: LogSelection) -> Path:
    """Return the log of the chosen rank, or that of the batch script if no rank has printed anything.

    Raises UserError if the attempt has no such rank.
    """
    folder = point.run / "logs" / str(attempt)
    path = folder / f"task-{find_task_of_rank(folder, choice.rank)}.log"
    if path.exists():
        return path
    tasks = sorted(int(log.stem.removeprefix("task-")) for log in folder.glob("task-*.log"))
    if tasks:
        raise UserError(f"--rank {choice.rank}: attempt {attempt} has ranks 0 to {tasks[-1]}")
    for other in (_find_batch_log(point, attempt), folder / "srun.log"):
        if other is not None and other.exists():
            return other
    raise UserError(f"{folder}: no rank has printed anything (yet)")


def _find_batch_log(point: RunPoint, attempt: int) -> Path | None:
    begun = next(
        (attempt_record.begun for attempt_record in read_attempts(point.run) if attempt_record.number == attempt), None
    )
    return point.job_logs / f"job-{begun.job_id}.log" if begun and begun.job_id else None


def _open_log(path: Path) -> BinaryIO:
    """Open a log. Raises UserError for a pipe, a device, or what cannot be read."""
    try:
        return open_to_read(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; it is not the log of a rank") from error


def _print_end(file: BinaryIO, lines: int | None) -> None:
    """Print the last lines of a file, or all of it (None). Reads from the end, as logs may be large."""
    file.seek(0 if lines is None else _begin_of_last(file, lines))
    _print_rest(file)


def _begin_of_last(file: BinaryIO, lines: int) -> int:
    """Return the offset at which the last lines of a file begin."""
    end = position = file.seek(0, 2)
    if not lines:
        return end
    lines_left = lines
    while position > 0:
        step = min(_BLOCK_BYTES, position)
        position -= step
        file.seek(position)
        block = file.read(step)
        if position + step == end and block.endswith(b"\n"):
            lines_left += 1  # that of the last line itself
        if (count := block.count(b"\n")) >= lines_left:
            for _ in range(lines_left):
                block = block[: block.rindex(b"\n")]
            return position + len(block) + 1
        lines_left -= count
    return 0


def _print_rest(file: BinaryIO) -> None:
    """Print a file from its current position, a block at a time."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    while block := file.read(_BLOCK_BYTES):
        sys.stdout.write(decoder.decode(block))
    sys.stdout.write(decoder.decode(b"", final=True))
    sys.stdout.flush()


def _print_first_error(point: RunPoint, choice: LogSelection) -> int:
    """Print the first error of the chosen attempt, or else of the newest one that failed."""
    run = point.run
    attempts = [choose_attempt(run, choice)] if choice.attempt is not None else list(reversed(_list_attempts(run)))
    for attempt in attempts:
        folder = run / "logs" / str(attempt)
        error = find_first_error(folder)
        if error is not None and (choice.attempt is not None or not _is_attempt_done(run, attempt)):
            sys.stdout.write(_format_first_error(error, folder, attempt, choice.tail))
            sys.stdout.flush()
            return 0
    looked = f"attempt {choice.attempt}" if choice.attempt is not None else f"{len(attempts)} attempts"
    print(f"no rank failed in {looked} of {run}{_find_batch_script_reason(point, attempts)}")
    return 0


def _find_batch_script_reason(point: RunPoint, attempts: Sequence[int]) -> str:
    """Return why the newest of these attempts ended, according to the batch script, and where its log is."""
    ended = [attempt for attempt in read_attempts(point.run) if attempt.number in attempts and attempt.result]
    result = ended[-1].result if ended else None
    if result is None or not result.why:
        return ""
    log = _find_batch_log(point, ended[-1].number)
    location = f"; its log: {log}" if log is not None and log.exists() else ""
    return f"; attempt ended with exit code {result.exit_code}: {result.why}{location}"


def _is_attempt_done(run: Path, attempt: int) -> bool:
    return any(
        record.number == attempt and record.result is not None and record.result.done for record in read_attempts(run)
    )


def _format_first_error(error: FirstError, folder: Path, attempt: int, tail: int | None) -> str:
    """Format the failing rank, the last lines that it printed, and its traceback."""
    log = folder / f"task-{error.task}.log"
    rank = rank_of_task(folder, error.task)
    where = f" on {error.host}" if error.host else ""
    lines = read_tail_text(log).splitlines()
    if error.traceback and "Traceback (most recent call last):" in lines:
        lines = lines[: lines.index("Traceback (most recent call last):")]
    lines = lines[-(_ERROR_LINES if tail is None else tail) :] if tail != 0 else []
    parts = [f"attempt {attempt}, rank {rank} (task {error.task}){where}: {log}", *lines, error.text]
    return "\n".join(parts) + "\n"


def _follow_run(point: RunPoint, choice: LogSelection, state: Callable[[], State]) -> int:
    """Print the log as it grows, across requeues, until the run has ended."""
    run, ended = point.run, _RunEnded(state)
    attempts_shown = 0
    for attempt in _list_new_attempts(run, choice, ended):
        path = _wait_for_log(point, attempt, choice, ended)
        if path is not None:
            if attempts_shown:
                print(f"==> attempt {attempt}: {path} <==", flush=True)
            attempts_shown += 1
            _follow_file(path, choice.tail, partial(_has_attempt_ended, run, attempt, ended))
    return 0


class _RunEnded:
    """Tell whether the run has ended; polls Slurm less and less often while nothing changes."""

    def __init__(self, state: Callable[[], State]) -> None:
        self._state, self._backoff = state, Backoff()
        self._last: State | None = None
        self._due = 0.0

    def __call__(self) -> bool:
        if time.monotonic() >= self._due and not self.already:
            now = self._state()
            self._due = time.monotonic() + self._backoff.seconds(now != self._last)
            self._last = now
        return self.already

    @property
    def already(self) -> bool:
        return self._last is not None and self._last.ended


def _list_new_attempts(run: Path, choice: LogSelection, ended: Callable[[], bool]) -> Iterator[int]:
    """Yield the chosen attempt, or the newest and all later ones."""
    if choice.attempt is not None:
        yield choose_attempt(run, choice)
        return
    newest = -1
    while True:
        has_ended = ended()  # before looking, so that what began meanwhile is not missed
        new = [number for number in _list_attempts(run) if number > newest]
        if new:
            newest = new[0] if newest >= 0 else new[-1]
            yield newest
        elif has_ended:
            return
        else:
            time.sleep(_POLL_SECONDS)


def _wait_for_log(point: RunPoint, attempt: int, choice: LogSelection, ended: Callable[[], bool]) -> Path | None:
    """Wait for the log of an attempt; None if the attempt ends without one."""
    run, folder = point.run, point.run / "logs" / str(attempt)
    while not _has_attempt_ended(run, attempt, ended):
        path = folder / f"task-{find_task_of_rank(folder, choice.rank)}.log"
        if path.exists():
            return path
        time.sleep(_POLL_SECONDS)
    try:
        return _find_rank_log(point, attempt, choice)
    except UserError as error:
        print(f"hpc-train: {one_line(str(error))}", file=sys.stderr)
        return None


def _has_attempt_ended(run: Path, attempt: int, ended: Callable[[], bool]) -> bool:
    """Whether an attempt has left its result, or a later one has begun, or the run has ended without."""
    logs = run / "logs"
    return (logs / str(attempt) / RESULT_MARKER).exists() or (logs / str(attempt + 1)).is_dir() or ended()


def _follow_file(path: Path, tail: int | None, has_ended: Callable[[], bool]) -> None:
    with _open_log(path) as file:
        _print_end(file, tail)
        while True:
            last = has_ended()  # before reading, so that its last words are read
            _print_rest(file)
            if last:
                return
            time.sleep(_POLL_SECONDS)
