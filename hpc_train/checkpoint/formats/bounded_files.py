"""Open files from elsewhere: only regular ones, without waiting, and never more bytes than a bound."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from hpc_train.errors import UserError


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file to read. A pipe, a device or a folder raises UserError at once, where open() would wait.

    Links are followed: model hubs keep their files behind them. Raises OSError where the file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(f"{path}: is not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        yield file


def read_bounded(path: Path, most: int) -> bytes:
    """Return the content of a regular file of at most `most` bytes. Raises UserError for a larger one."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise UserError(f"{path}: is larger than {most:,} bytes, which no such file is")
    return data


def read_json(path: Path, most: int = 64 << 20) -> Any:
    """Return the value of a JSON file of at most `most` bytes. ValueError for other text, or if nested too deeply."""
    try:
        return json.loads(read_bounded(path, most))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
