"""Show the progress of `hpc-train data build`: apart from data.py, because it imports rich, which takes 60 ms."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar


class BuildBar:
    """Shows how many bytes of the sources are done, how fast, and the time left."""

    def __init__(self, what: str = "tokenizing") -> None:
        columns = (DownloadColumn(), BarColumn(20), TransferSpeedColumn(), TimeRemainingColumn())
        self._bar = Bar(TextColumn(what), *columns, console=Console(file=sys.stderr), transient=True)
        self._task = self._bar.add_task("", total=None)

    def start(self, total: int, done: int) -> None:
        """Begin with `done` of `total` bytes, those of parts that an earlier build left."""
        self._bar.update(self._task, total=total, completed=done)

    def advance(self, size: int) -> None:
        """Add the bytes of a part."""
        self._bar.advance(self._task, size)

    def __enter__(self) -> BuildBar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()
