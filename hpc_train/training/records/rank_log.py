"""Write a rank's log lines as JSON Lines beside its text log: `logs/<attempt>/task-<t>.jsonl`.

A line is `{"time", "rank", "level", "step", "message"}`: seconds since the epoch, the rank (null before it is
assigned), debug, info, warning or error, the training step that the rank was in (null before the first), and the text.
One line of the file is `{"time", "clock_offset", "clock_error"}`: seconds to add to this rank's times to get the clock
of the job's store, and how wrong that may be. Times follow the monotonic clock from the start of the process, so that a
clock that is set while the job runs does not change the order of lines.

Standard library only: a rank writes its log before torch is imported.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from hpc_train.resilience.heartbeat import Heartbeat

LEVELS = ("debug", "info", "warning", "error")
MAX_LINE_BYTES = 1 << 16
"""Longer lines are cut here; the text log has all of them."""
_CLOCK_ROUNDS = 3
"""Questions to the other clock, of which the quickest counts."""
_TRACEBACK = re.compile(r"\s*(\S+ )?Traceback \(most recent call last\):")
_ERROR = re.compile(
    r"Fatal Python error|\b(ERROR|FATAL|CRITICAL)\b|^[\w.]*(Error|Exception|Interrupt)\b(: |$)|^hpc-train: |"
    r"^terminate called|^Segmentation fault"
)
_WARNING = re.compile(r"\bWARN(ING)?\b|\b\w*Warning: |^warning: ")


class LevelGuess:
    """Guess the levels of lines that were printed and not logged; a traceback is an error from its first line on."""

    def __init__(self) -> None:
        self._in_traceback = False

    def level(self, line: str) -> str:
        """Return the level of the next line of one stream."""
        if _TRACEBACK.match(line):
            self._in_traceback = True
            return "error"
        if self._in_traceback:
            self._in_traceback = line[:1] in (" ", "\t", "")
            return "error"
        if _ERROR.search(line):
            return "error"
        return "warning" if _WARNING.search(line) else "info"


class RankLog:
    """The structured log of one rank. A line that cannot be written is left out, and never ends the training."""

    def __init__(self, path: Path) -> None:
        self.rank: int | None = None
        self.heartbeat: Heartbeat | None = None
        """Tells the step; None before there is one."""
        self.logged = threading.local()
        """`logged.level` is the level of what this thread logs at the moment."""
        self._started, self._since = time.time(), time.monotonic()
        self._clock_offset = 0.0
        self._torn = False
        self._descriptor: int | None = None
        # O_NONBLOCK: a named pipe in its place would wait for a reader.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        with suppress(OSError):
            self._descriptor = os.open(path, flags, 0o600)

    def now(self) -> float:
        """Return the time of a line that is written now."""
        return self._started + time.monotonic() - self._since

    def read_job_clock(self) -> float:
        """Return the time by the clock of the job's store, or of this node where that was not measured."""
        return self.now() + self._clock_offset

    def write(self, level: str, message: str) -> None:
        """Write one line of the rank's output."""
        step = self.heartbeat.training_step if self.heartbeat is not None else None
        self._append(time=round(self.now(), 6), rank=self.rank, level=level, step=step, message=message)

    def record_clock(self, read_clock: Callable[[], float]) -> None:
        """Measure the offset to the clock of the job's store, and write it down."""
        self._clock_offset, error = measure_clock_offset(read_clock, self.now)
        offset = round(self._clock_offset, 6)
        self._append(time=round(self.now(), 6), clock_offset=offset, clock_error=round(error, 6))

    def _append(self, **fields: Any) -> None:
        if self._descriptor is None:
            return
        line = json.dumps(fields).encode() + b"\n"
        line = b"\n" + line if self._torn else line
        with suppress(OSError):
            self._torn = True
            self._torn = os.write(self._descriptor, line) < len(line)


def measure_clock_offset(read_clock: Callable[[], float], now: Callable[[], float]) -> tuple[float, float]:
    """Return the seconds to add to `now` to get another clock, and by how much that may be wrong.

    Takes the quickest of a few questions: the other clock was read at some time between question and answer.
    """
    offset, error = 0.0, float("inf")
    for _ in range(_CLOCK_ROUNDS):
        sent = now()
        server_time = read_clock()
        received = now()
        if (received - sent) / 2 < error:
            offset, error = server_time - (sent + received) / 2, (received - sent) / 2
    return offset, error


class StreamLines:
    """Splits what is written to one stream of a rank into lines for its structured log."""

    def __init__(self, log: RankLog) -> None:
        self._log, self._guess = log, LevelGuess()
        self._unfinished = bytearray()

    def add(self, data: bytes | memoryview) -> None:
        """Take bytes that were written to the stream; whole lines are recorded."""
        *lines, unfinished = bytes(data).split(b"\n")
        for line in lines:
            self._record(bytes(self._unfinished) + line)
            self._unfinished.clear()
        self._unfinished += unfinished[: MAX_LINE_BYTES - len(self._unfinished)]

    def _record(self, line: bytes) -> None:
        text = line[:MAX_LINE_BYTES].decode(errors="replace")
        guessed = self._guess.level(text)
        self._log.write(getattr(self._log.logged, "level", None) or guessed, text)


class LevelHandler(logging.StreamHandler[TextIO]):
    """Prints log records to a stream, and says their level to the structured log that takes the stream's lines."""

    def __init__(self, stream: TextIO, log: RankLog) -> None:
        super().__init__(stream)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        self._log.logged.level = name_level(record.levelno)
        try:
            super().emit(record)
        finally:
            self._log.logged.level = None


def name_level(number: int) -> str:
    """Return the name of a level of Python's logging."""
    if number >= logging.ERROR:
        return "error"
    if number >= logging.WARNING:
        return "warning"
    return "info" if number >= logging.INFO else "debug"
