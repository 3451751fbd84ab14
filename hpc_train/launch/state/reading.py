"""Read what a run left, whatever has become of it: what cannot be read is as good as not there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from hpc_train import regular_files

MOST_BYTES = 64 << 20
"""Of a file that is read whole; events.jsonl has a line a save."""


def open_regular(path: Path) -> BinaryIO | None:
    """The file, open for reading; None if it cannot be read, or is a pipe, a device or a directory."""
    try:
        return os.fdopen(regular_files.open_regular(path, follow=True), "rb")
    except (OSError, ValueError):
        return None


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
