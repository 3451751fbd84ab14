"""Tables, facts, JSON and progress bars on the terminal, for all commands.

On a terminal a table is as wide as the screen; in a file or a pipe every row stays one line.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_train.launch.command_output import CommandOutput
from hpc_train.terminal import for_stream, one_line

if TYPE_CHECKING:  # rich takes 60 ms, and commands that start ranks print no tables
    from rich.console import Console, RenderableType
    from rich.text import Text

OnBytes = Callable[[int], object]
"""Takes the number of bytes (or items) done since the last call; may be called from any thread."""


def print_line(text: str) -> None:
    """Print one line to stdout, at once."""
    print(text, flush=True)


def print_message(text: str) -> None:
    """Print a message to stderr, at once; on a terminal without what would control it."""
    print(for_stream(text, sys.stderr), file=sys.stderr, flush=True)


def describe_pace(run: Path) -> str:
    """Say what holds a run back, and its goodput, in a few words."""
    from hpc_train.report.run_summary import describe_pace as describe

    return describe(run)


TERMINAL = CommandOutput(print_line, print_message, describe_pace)
"""The output of a command that launches something."""


def print_json(value: Any) -> None:
    """Print a value as JSON on one line."""
    print(json.dumps(value))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], numbers: Sequence[str] = ()) -> None:
    """Print a table; off a terminal, rows are never wrapped. numbers: columns that are aligned to the right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_format_cell(value) for value in row))
    make_console().print(table)


def print_fields(facts: Sequence[tuple[str, object]]) -> None:
    """Print one line for each (name, value), with the values aligned."""
    from rich.text import Text

    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        make_console().print(Text(f"{name:<{width}}  "), _format_cell(value), sep="", soft_wrap=True)


def make_console() -> Console:
    """Return a console for the current stdout, which never wraps lines off a terminal."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 10_000
    return Console(file=sys.stdout, width=width, highlight=False, markup=False)


@contextmanager
def progress_bar(title: str, total: int, quiet: bool = False, of_bytes: bool = True) -> Iterator[OnBytes]:
    """Show a progress bar on stderr while the block runs; yields the function that advances it.

    total, of_bytes: amount of work, in bytes or in items. quiet: show nothing, as with --json.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich import progress
    from rich.console import Console

    bytes_done = (progress.DownloadColumn(True), progress.TransferSpeedColumn())
    done = bytes_done if of_bytes else (progress.MofNCompleteColumn(),)
    title_column = progress.TextColumn("{task.description}")
    columns = (title_column, progress.BarColumn(30), *done, progress.TimeRemainingColumn())
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.advance(task, done)


def _format_cell(value: object) -> Text:
    from rich.text import Text

    return Text(one_line(str(value)))


PIPE_WIDTH = 160
"""Columns of what print_rich prints if stdout is not a terminal; the tables of print_table are never wrapped there."""


def print_rich(*parts: RenderableType) -> None:
    """Print rich renderables, as wide as the terminal, or PIPE_WIDTH columns elsewhere."""
    from rich.console import Console

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE_WIDTH
    console = Console(width=width, highlight=False)
    for part in parts:
        console.print(part)
