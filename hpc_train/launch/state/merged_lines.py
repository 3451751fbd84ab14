"""Merge the log lines of all ranks of an attempt in the order of their times, and fold equal lines of several ranks.

A rank's text log has all of its output; the JSON Lines beside it (training.rank_log) have times, levels and steps of
what Python wrote. Lines that only the text log has, such as those of C libraries, take the time of the line before
them. Logs of runs without JSON Lines are merged by line numbers.

Files are read in blocks and closed after each, so that memory does not grow with their sizes and thousands of logs do
not exceed the limit on open files.
"""

from __future__ import annotations

import heapq
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from hpc_train.launch.state.attempts import open_if_regular, read_attempt, read_rank_entries
from hpc_train.regular_files import parse_json_object
from hpc_train.training.records.rank_log import LEVELS, MAX_LINE_BYTES, LevelGuess

FOLD_SECONDS = 2.0
"""Equal lines of several ranks within this time are one."""
_FOLD_LINES = 20.0
"""The same, where lines have numbers and no times."""
_MAX_GROUPS = 10_000
"""Lines that wait for their equals, at most; with more, the oldest is printed early."""
_BUFFER_BYTES = 64 << 20
"""For the blocks of all files together."""
_LOOK_AHEAD = 32
"""Number of next records among which the record of a line of the text log is searched."""
_YEAR_10000 = 253402300800.0
"""Seconds since the epoch; a larger time is damage."""
_LOG_NAME = re.compile(r"task-([0-9]+)\.(?:log|jsonl)")


class RankLine(NamedTuple):
    """One line of one rank. Sorts by time; (rank, number) is unique."""

    time: float
    """Seconds since the epoch by the clock of the job's store; a line number where no line has a time."""
    rank: int
    number: int
    level: str
    step: int | None
    message: str
    measured: bool
    """Whether the line has its own time instead of that of the previous line."""


@dataclass
class FoldedLine:
    """A line, and the ranks that printed it."""

    line: RankLine
    ranks: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class LineFilter:
    """Which lines to show."""

    ranks: Sequence[range] | None = None
    level: str = LEVELS[0]
    """This level and worse."""
    steps: tuple[int, int] | None = None
    """First and last step; lines outside of steps are then left out."""

    def takes_rank(self, rank: int) -> bool:
        """Return whether to show lines of this rank."""
        return self.ranks is None or any(rank in ranks for ranks in self.ranks)

    def select(self, lines: Iterable[RankLine]) -> Iterable[RankLine]:
        """Leave out lines of other levels and steps."""
        if self.level != LEVELS[0]:
            levels = LEVELS[LEVELS.index(self.level) :]
            lines = (line for line in lines if line.level in levels)
        if self.steps is not None:
            first, last = self.steps
            lines = (line for line in lines if line.step is not None and first <= line.step <= last)
        return lines


@dataclass(frozen=True)
class RankLogs:
    """The logs of one rank."""

    rank: int
    text: Path
    records: Path | None
    """None: the rank wrote no JSON Lines."""
    clock_offset: float | None = None
    """Seconds to add to its times; None: not measured."""


@dataclass(frozen=True)
class AttemptLogs:
    """The logs of all ranks of one attempt."""

    ranks: tuple[RankLogs, ...]
    missing: tuple[int, ...]
    """Ranks of the rank map that have no log."""
    begun: float
    """When the attempt began, for lines before the first that has a time; 0: unknown."""

    @property
    def has_times(self) -> bool:
        """Whether any rank has written times."""
        return any(rank.records is not None for rank in self.ranks)

    @property
    def without_times(self) -> tuple[int, ...]:
        """Return the ranks that have a text log only."""
        return tuple(rank.rank for rank in self.ranks if rank.records is None)

    @property
    def largest_offset(self) -> float | None:
        """Return the largest correction of a clock, in seconds; None if no clock was compared."""
        return max((abs(rank.clock_offset) for rank in self.ranks if rank.clock_offset is not None), default=None)


def find_attempt_logs(folder: Path) -> AttemptLogs:
    """Find the logs of all ranks in the log directory of an attempt, and the offsets of their clocks."""
    names = {entry.name for entry in os.scandir(folder)}
    tasks = {int(match[1]) for name in names if (match := _LOG_NAME.fullmatch(name))}
    numbers = {entry.get("process"): entry.get("rank") for entry in read_rank_entries(folder)}
    ranks = {task: rank for task, rank in numbers.items() if type(task) is int and type(rank) is int}
    logs = []
    for task in sorted(tasks):
        records = folder / f"task-{task}.jsonl" if f"task-{task}.jsonl" in names else None
        offset = _read_clock_offset(records) if records is not None else None
        logs.append(RankLogs(ranks.get(task, task), folder / f"task-{task}.log", records, offset))
    ranks_with_log = {rank.rank for rank in logs}
    begun = read_attempt(folder).begun
    return AttemptLogs(
        tuple(logs),
        tuple(sorted(set(ranks.values()) - ranks_with_log)),
        _parse_time(begun.time if begun else None) or 0.0,
    )


def _read_clock_offset(records: Path) -> float | None:
    """Return the clock offset, in seconds, that a rank has written near the beginning of its JSON Lines."""
    for line in next(_read_blocks(records, MAX_LINE_BYTES), []):
        if b'"clock_offset"' in line:
            offset = _parse_finite(parse_json_object(line).get("clock_offset"))
            if offset is not None:
                return offset
    return None


def merge_lines(logs: AttemptLogs, choice: LineFilter) -> Iterator[FoldedLine]:
    """Yield the lines of all ranks that the filter accepts, ordered by time, equal ones folded."""
    chosen = [rank for rank in logs.ranks if choice.takes_rank(rank.rank)]
    block = max(1 << 13, min(1 << 20, _BUFFER_BYTES // (2 * max(1, len(chosen)))))
    if logs.has_times:
        lines = [_read_rank(rank, logs.begun, block) for rank in chosen]
    else:
        lines = [_read_numbered(rank, block) for rank in chosen]
    return fold_lines(choice.select(heapq.merge(*lines)), FOLD_SECONDS if logs.has_times else _FOLD_LINES)


def _read_numbered(rank: RankLogs, block: int) -> Iterator[RankLine]:
    guess = LevelGuess()
    for number, text in enumerate(_read_texts(rank.text, block)):
        yield RankLine(float(number), rank.rank, number, guess.level(text), None, text, False)


def _read_rank(rank: RankLogs, begun: float, block: int) -> Iterator[RankLine]:
    """Yield the lines of one rank in their order, with times that never go back."""
    numbers, guess, records = count(), LevelGuess(), _RecordQueue(rank, block)
    last, step = records.find_first_time(begun), None
    for text in _read_texts(rank.text, block):
        for record in records.take_until(text):
            last, step = max(last, record.time), record.step
            yield RankLine(last, rank.rank, next(numbers), record.level, step, record.message, True)
        if not records.has_record:
            yield RankLine(last, rank.rank, next(numbers), guess.level(text), step, text, False)
    for record in records.take_rest():
        last = max(last, record.time)
        yield RankLine(last, rank.rank, next(numbers), record.level, record.step, record.message, True)


class _Record(NamedTuple):
    time: float
    level: str
    step: int | None
    message: str


class _RecordQueue:
    """The records of one rank, from which the lines of its text log take theirs one after another."""

    def __init__(self, rank: RankLogs, block: int) -> None:
        self._source = _read_records(rank, block)
        self._ahead: deque[_Record] = deque()
        self.has_record = False
        """Whether the last line had a record."""

    def find_first_time(self, otherwise: float) -> float:
        """Return the time of the first record."""
        self._fill(1)
        return self._ahead[0].time if self._ahead else otherwise

    def _fill(self, size: int) -> None:
        while len(self._ahead) < size and (record := next(self._source, None)) is not None:
            self._ahead.append(record)

    def take_until(self, text: str) -> Iterable[_Record]:
        """Remove and return the records up to that of a line of the text log; none if the line has no record."""
        self._fill(1)
        self.has_record = True
        if self._ahead and self._ahead[0].message == text:
            return (self._ahead.popleft(),)
        # The text log may lack lines that the records have, when a handler writes to one of them only.
        self._fill(_LOOK_AHEAD)
        for index, record in enumerate(self._ahead):
            if record.message == text:
                return [self._ahead.popleft() for _ in range(index + 1)]
        self.has_record = False
        return ()

    def take_rest(self) -> Iterator[_Record]:
        """Yield the records that are left."""
        yield from self._ahead
        yield from self._source


def _read_records(rank: RankLogs, block: int) -> Iterator[_Record]:
    """Yield the whole and sensible records of a rank's JSON Lines; others, such as a torn one, are left out."""
    offset = rank.clock_offset or 0.0
    for lines in _read_blocks(rank.records, block) if rank.records is not None else ():
        for line in lines:
            fields = parse_json_object(line)
            local, message = _parse_finite(fields.get("time")), fields.get("message")
            time = _parse_time(local + offset) if local is not None else None
            if time is None or not isinstance(message, str):
                continue
            level, step = fields.get("level"), fields.get("step")
            yield _Record(time, level if level in LEVELS else "info", step if type(step) is int else None, message)


def _parse_finite(value: Any) -> float | None:
    """Return a number of seconds; None for what is not a number, or larger than any time."""
    return float(value) if type(value) in (int, float) and abs(value) < _YEAR_10000 else None


def _parse_time(value: Any) -> float | None:
    """Return a time in seconds since the epoch; None for a value that no clock can show."""
    seconds = _parse_finite(value)
    return seconds if seconds is not None and seconds >= 0 else None


def _read_texts(path: Path, block: int) -> Iterator[str]:
    for lines in _read_blocks(path, block):
        for line in lines:
            yield line.decode(errors="replace")


def _read_blocks(path: Path, block: int) -> Iterator[list[bytes]]:
    """Yield the lines of a file in lists, cut at MAX_LINE_BYTES, without line feeds; nothing if it cannot be read."""
    position, unfinished = 0, b""
    while True:
        data = _read_at(path, position, block)
        position += len(data)
        if not data:
            break
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = unfinished + lines[0]
            unfinished = rest
            yield [line[:MAX_LINE_BYTES] for line in lines]
        else:
            # A line without end must not fill the memory.
            unfinished = (unfinished + rest)[:MAX_LINE_BYTES]
    if unfinished:
        yield [unfinished]


def _read_at(path: Path, position: int, size: int) -> bytes:
    """Return up to `size` bytes from a position of a file on; none if it cannot be read."""
    file = open_if_regular(path)
    if file is None:
        return b""
    with file:
        try:
            return os.pread(file.fileno(), size, position)
        except OSError:
            return b""


def fold_lines(lines: Iterable[RankLine], window: float) -> Iterator[FoldedLine]:
    """Fold equal lines of several ranks within a time window into the first of them. Lines come ordered by time.

    A rank's second equal line is another line, and is folded with the second ones of other ranks.
    """
    waiting: deque[FoldedLine] = deque()
    equal_lines: dict[tuple[str, str, int | None], _OpenGroups] = {}

    def release(ready: Callable[[FoldedLine], bool]) -> Iterator[FoldedLine]:
        while waiting and ready(waiting[0]):
            folded = waiting.popleft()
            key = _fold_key(folded.line)
            if equal_lines[key].drop_oldest():
                del equal_lines[key]
            yield folded

    for line in lines:
        oldest = line.time - window
        # No later line can join a group that is older than the window.
        if waiting and (waiting[0].line.time < oldest or len(waiting) >= _MAX_GROUPS):
            yield from release(lambda first: first.line.time < oldest or len(waiting) >= _MAX_GROUPS)  # noqa: B023
        key = _fold_key(line)
        same = equal_lines.get(key)
        if same is None:
            same = equal_lines[key] = _OpenGroups()
        folded = same.join(line)
        if folded is not None:
            waiting.append(folded)
    yield from release(lambda first: True)


def _fold_key(line: RankLine) -> tuple[str, str, int | None]:
    return line.message, line.level, line.step


class _OpenGroups:
    """The open groups of one text, oldest first."""

    def __init__(self) -> None:
        self._groups: deque[FoldedLine] = deque()
        self._dropped = 0
        self._joined: dict[int, int] = {}
        """For each rank, how many groups it has joined or passed."""

    def join(self, line: RankLine) -> FoldedLine | None:
        """Add a line to the first group without its rank; returns the group if it is new."""
        index = max(self._joined.get(line.rank, 0), self._dropped)
        self._joined[line.rank] = index + 1
        if index - self._dropped < len(self._groups):
            self._groups[index - self._dropped].ranks.append(line.rank)
            return None
        folded = FoldedLine(line, [line.rank])
        self._groups.append(folded)
        return folded

    def drop_oldest(self) -> bool:
        """Drop the oldest group; returns whether none is left."""
        self._groups.popleft()
        self._dropped += 1
        return not self._groups
