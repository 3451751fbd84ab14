"""Tables, JSON and progress bars of the commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
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

Tell = Callable[[int], object]
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
    console().print(table)


def print_facts(facts: Sequence[tuple[str, object]]) -> None:
    """A line each."""
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        console().print(Text(f"{name:<{width}}  "), _cell(value), sep="", soft_wrap=True)


def console() -> Console:
    """Of stdout as it is now."""
    wide = None if sys.stdout.isatty() else 10_000
    return Console(file=sys.stdout, width=wide, highlight=False, markup=False)


def size(value: int | None) -> str:
    """`1.50 GiB`; `-` where it is not known."""
    if value is None:
        return "-"
    amount, unit = float(value), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{value} B" if unit == "B" else f"{amount:.2f} {unit}"


@contextmanager
def progress(what: str, total: int, quiet: bool = False, of_bytes: bool = True) -> Iterator[Tell]:
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


def plain(text: str) -> str:
    """What cannot steer a terminal, whatever names are in it."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _cell(value: object) -> Text:
    return Text(plain(str(value)))
