"""Read the files a run left behind; a file that cannot be read counts as missing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from hpc_train import regular_files

MOST_BYTES = 64 << 20
"""Size limit in bytes of a file that is read whole; events.jsonl has one line per save."""


def open_regular(path: Path) -> BinaryIO | None:
    """Open a file for reading; None if it cannot be read, or is a pipe, a device or a directory."""
    try:
        return os.fdopen(regular_files.open_regular(path, follow=True), "rb")
    except (OSError, ValueError):
        return None


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """Return the last `most` bytes of a file as text; "" if it cannot be read."""
    file = open_regular(path)
    if file is None:
        return ""
    with file:
        try:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most))
            return file.read(most).decode(errors="replace")
        except OSError:
            return ""
