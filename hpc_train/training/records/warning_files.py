"""Write and read the ranks' warnings: one small file each in `logs/<attempt>/warnings/`.

Every rank writes files of its own, because appends from two nodes to one file may overwrite each other. A file's name
is a digest of its text, so that a warning of many ranks is one file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_train.regular_files import read_regular

FOLDER = "warnings"
_LOGGER = "hpc_train"
_MAX_ALIKE = 10
"""Warnings from one line of code that a rank records; further ones are only in its log."""
_MAX_FILES = 200
"""Warnings of an attempt; with more of them the folder is left as it is."""
_MAX_CHARACTERS = 2000
_MAX_BYTES = 1 << 16


@dataclass(frozen=True)
class RankWarning:
    """One warning or error that a rank has logged."""

    time: float
    """Seconds since the epoch, by the clock of the rank's node."""
    process: int
    """The task that logged it; its log is task-<process>.log."""
    level: str
    """`warning` or `error`."""
    text: str

    def __str__(self) -> str:
        return f"{self.level}: {self.text}"


class WarningRecorder(logging.Handler):
    """Writes warnings and errors of one rank to the folder of its attempt.

    A record whose text is there already is marked `repeated`, so that a handler after this one can leave it out.
    """

    def __init__(self, logs: Path, process: int) -> None:
        super().__init__(logging.WARNING)
        self._folder, self._process = logs / FOLDER, process
        self._repetitions: Counter[tuple[str, int]] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        """Write one warning; a disk that is full does not end the training."""
        location = (record.pathname, record.lineno)
        self._repetitions[location] += 1
        if self._repetitions[location] > _MAX_ALIKE:
            record.repeated = True
            return
        text = describe_record(record)
        if self._repetitions[location] == _MAX_ALIKE:
            text += " (further ones like this are only in the log)"
        level = "error" if record.levelno >= logging.ERROR else "warning"
        with suppress(OSError):
            record.repeated = not self._write(RankWarning(record.created, self._process, level, text))

    def _write(self, warning: RankWarning) -> bool:
        """Write the file with its content at once; returns False if one of this text is there already."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        path = self._folder / f"{hashlib.sha256(warning.text.encode(errors='replace')).hexdigest()[:24]}.json"
        # Task 0 always writes: its warnings speak for the whole run.
        if path.exists() or (self._process and len(list(self._folder.iterdir())) >= _MAX_FILES):
            return False
        temporary = self._folder / f".{path.stem}.{self._process}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(asdict(warning), file)
            _claim(temporary, path)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        return True


def _claim(temporary: Path, path: Path) -> None:
    """Give a file its name. Raises FileExistsError if another rank was first, where the file system has hard links."""
    try:
        # A link fails if the name exists, where a rename would replace the file of another rank.
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:
        temporary.rename(path)


@contextmanager
def record_warnings(logs: Path, process: int) -> Iterator[None]:
    """Inside this context, what hpc_train logs as a warning or worse is also written for those outside of the rank."""
    recorder, logger = WarningRecorder(logs, process), logging.getLogger(_LOGGER)
    logger.addHandler(recorder)
    try:
        yield
    finally:
        logger.removeHandler(recorder)


def describe_record(record: logging.LogRecord) -> str:
    """Return a log record as one line: its message, and the exception that goes with it."""
    text = record.getMessage()
    error = record.exc_info[1] if record.exc_info else None
    if error is not None:
        text = f"{text}: {type(error).__name__}: {error}"
    return " ".join(text.split())[:_MAX_CHARACTERS]


class NewWarnings:
    """Reads the warnings of one attempt, each once, while they are written."""

    def __init__(self, logs: Path) -> None:
        self._folder = logs / FOLDER
        self._seen: set[str] = set()

    def read(self) -> list[RankWarning]:
        """Return the warnings since the last call, oldest first."""
        try:
            entries = [path.name for path in self._folder.iterdir()]
        except OSError:
            return []
        names = [name for name in entries if name not in self._seen and not name.startswith(".")]
        self._seen.update(names)
        warnings = [_read_warning(self._folder / name) for name in names[:_MAX_FILES]]
        return sorted((warning for warning in warnings if warning is not None), key=lambda warning: warning.time)


def read_warnings(logs: Path) -> list[RankWarning]:
    """Return all warnings of the attempt with these logs, oldest first."""
    return NewWarnings(logs).read()


def _read_warning(path: Path) -> RankWarning | None:
    """Read one warning; None for a file that no rank has written."""
    try:
        fields = json.loads(read_regular(path, _MAX_BYTES))
        return RankWarning(float(fields["time"]), int(fields["process"]), str(fields["level"]), str(fields["text"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
