"""Reading what a run left: only regular files, never blocking, and no more of them than can be meant."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

MOST_BYTES = 64 << 20
"""Of a file that is read whole; events.jsonl has a line a save."""


def open_regular(path: Path) -> BinaryIO | None:
    """The file, open for reading; None if it cannot be read, or is a pipe, a device or a directory."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    return os.fdopen(descriptor, "rb")


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """The last `most` bytes of a file, as text; "" if it cannot be read."""
    file = open_regular(path)
    if file is None:
        return ""
    with file:
        try:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most))
            return file.read(most).decode(errors="replace")
        except OSError:
            return ""
