"""Tables, facts, JSON and progress bars on the terminal, for all commands.

On a terminal a table is as wide as the screen; in a file or a pipe every row stays one line.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

OnBytes = Callable[[int], object]
"""Takes the bytes that were done since the last call; from any thread."""


def print_json(value: Any) -> None:
    """On one line."""
    print(json.dumps(value))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], numbers: Sequence[str] = ()) -> None:
    """On a terminal as wide as it is, elsewhere as wide as the rows are. numbers: columns that end at the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    make_console().print(table)


def print_fields(facts: Sequence[tuple[str, object]]) -> None:
    """A line each."""
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        make_console().print(Text(f"{name:<{width}}  "), _cell(value), sep="", soft_wrap=True)


def make_console() -> Console:
    """Of stdout as it is now."""
    wide = None if sys.stdout.isatty() else 10_000
    return Console(file=sys.stdout, width=wide, highlight=False, markup=False)


@contextmanager
def progress_bar(what: str, total: int, quiet: bool = False, of_bytes: bool = True) -> Iterator[OnBytes]:
    """A bar of `total` bytes, or things, on stderr while the block runs, if that is a terminal.

    quiet: none, as with --json.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda done: None
        return
    done = (DownloadColumn(True), TransferSpeedColumn()) if of_bytes else (MofNCompleteColumn(),)
    columns = (TextColumn("{task.description}"), BarColumn(30), *done, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


def escape_unprintable(text: str) -> str:
    """What cannot steer a terminal, whatever names are in it."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _cell(value: object) -> Text:
    return Text(escape_unprintable(str(value)))


PIPE_WIDTH = 160
"""Columns where the output is no terminal."""


def print_rich(*parts: RenderableType) -> None:
    """On a terminal as wide as that is, else wide enough that lines do not break."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE_WIDTH
    console = Console(width=width, highlight=False)
    for part in parts:
        console.print(part)
