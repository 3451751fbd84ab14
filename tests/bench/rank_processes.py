"""Tell whether processes that were ranks of a run are still running."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path


def is_running(process: int | str) -> bool:
    """Return whether a process runs. A zombie counts as ended: the first process of many containers never reaps the
    children that it inherits.
    """
    try:
        after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return after_name.split()[0] not in "ZX"


def assert_they_end(processes: Iterable[int | str], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left := [process for process in processes if is_running(process)]:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.05)
