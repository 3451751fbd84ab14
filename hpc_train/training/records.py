"""metrics.jsonl (a line a step) and events.jsonl (append-only), as scripts read them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from hpc_train.regular_files import read_text


class Metrics:
    """metrics.jsonl: each step once, also after a resume."""

    def __init__(self, path: Path, resumed_at: int) -> None:
        """Drop the lines of steps after `resumed_at`, which are about to be done again, and a torn last line."""
        kept = []
        if path.exists():
            kept = [line for line in read_text(path).splitlines() if _step_of(line) <= resumed_at]
            beside = path.with_name(f".{path.name}.{os.getpid()}")
            beside.write_text("".join(f"{line}\n" for line in kept))
            beside.replace(path)
        self._path = path
        self._file = path.open("a", buffering=1)

    def write(self, record: dict[str, Any]) -> None:
        """One line; values are JSON scalars, NaN written as null."""
        self._file.write(_line(record))

    def amend(self, step: int, **fields: Any) -> None:
        """Add to the last line, if it is of this step."""
        records = read_metrics(self._path)
        if not records or records[-1]["step"] != step:
            return
        records[-1].update(fields)
        self._file.close()
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        beside.write_text("".join(_line(record) for record in records))
        beside.replace(self._path)
        self._file = self._path.open("a", buffering=1)

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in read_text(path).splitlines() if _step_of(line) < _TORN]


def add_event(path: Path, kind: str, attempt: int, **fields: Any) -> None:
    """Append one event: start, resume, checkpoint, signal, requeue, failure, done. One write, so lines never mix."""
    line = json.dumps({"event": kind, "time": time.time(), "attempt": attempt, **fields}) + "\n"
    # Without O_NONBLOCK a named pipe in its place would wait for a reader.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


_TORN = 1 << 62


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return _TORN


def _line(record: dict[str, Any]) -> str:
    return json.dumps({key: _finite(value) for key, value in record.items()}) + "\n"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and (value != value or abs(value) == float("inf")) else value
