"""`hpc-train status RUN`: a table for people, live where they want it; JSON for scripts."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpc_train.launch.clients import Ask, ask
from hpc_train.launch.state.backoff import Backoff
from hpc_train.launch.state.decide import decide
from hpc_train.launch.state.facts import gather, read_files
from hpc_train.launch.state.points import Point, find
from hpc_train.launch.state.progress import readable_seconds, with_progress
from hpc_train.launch.state.states import State, Status
from hpc_train.terminal import escape_controls

if TYPE_CHECKING:
    from rich.console import Group

_COLOURS = {
    State.RUNNING: "green",
    State.DONE: "bold green",
    State.PENDING: "yellow",
    State.REQUEUED: "yellow",
    State.UNKNOWN: "magenta",
}
_SHOWN_NODES = 4
_SHOWN_WARNINGS = 10
_WIDE = 4096
_LOOK_SECONDS = 2.0
_ROOM_FOR_REASONS = 120
"""Screen width, in columns, from which reasons are shown beside the other columns."""
_COLUMNS = ("point", "job", "attempt", "state", "step", "loss", "last step", "nodes", "exit")
_OPTIONAL = frozenset({"step", "loss", "last step", "exit"})


def survey(points: Sequence[Point], ask: Ask = ask) -> list[Status]:
    """The state of every point, with one poll of Slurm for all of them."""
    return [with_progress(decide(facts), facts) for facts in gather(points, ask)]


def status_command(run: str, as_json: bool, watch: bool) -> int:
    """Print the state of a run, a sweep or a job; watch: again and again until all has ended. Returns the exit code."""
    points = find(run, ask)
    if as_json:
        print(json.dumps([status.row() for status in survey(points)]))
    elif watch:
        _watch(points)
    else:
        from rich.console import Console

        # Where nobody looks at a screen, a line is a line.
        console = Console(width=None if sys.stdout.isatty() else _WIDE)
        console.print(table(survey(points), console.width))
    return 0


def _watch(points: Sequence[Point]) -> None:
    """Redraw the status as it changes.

    Slurm is asked less and less often while nothing changes; progress is read more often.
    """
    from rich.console import Console
    from rich.live import Live

    console = Console()

    def shown() -> Group:
        rows = [with_progress(row, read_files(point)) for point, row in zip(points, before, strict=True)]
        return table(rows, console.width)

    def ask_slurm() -> list[Status]:
        return [decide(facts) for facts in gather(points, ask)]

    backoff, before = Backoff(), ask_slurm()
    with Live(shown(), console=console, auto_refresh=False) as live:
        changed = True
        while not all(status.state.ended for status in before):
            again = time.monotonic() + backoff.seconds(changed)
            while (left := again - time.monotonic()) > 0:
                time.sleep(min(_LOOK_SECONDS, left))
                live.update(shown(), refresh=True)
            now = ask_slurm()
            changed, before = now != before, now
            live.update(shown(), refresh=True)


def table(rows: Sequence[Status], width: int = _WIDE) -> Group:
    """Build a table with one line per point and, for several points, the number in each state.

    Columns that are empty in every row are left out. On screens under 120 columns, reasons are lines below.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    cells = [_cells(row) for row in rows]
    beside = width >= _ROOM_FOR_REASONS
    names = [name for name in _COLUMNS if name not in _OPTIONAL or any(row[name] != "-" for row in cells)]
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        shown.add_column(name, no_wrap=True, overflow="fold")
    if beside:
        shown.add_column("reason", overflow="fold")
    for row, texts in zip(rows, cells, strict=True):
        styles = {"state": _COLOURS.get(row.state, "red")}
        line = [Text(escape_controls(texts[name]), style=styles.get(name, "")) for name in names]
        shown.add_row(*line, *([Text(escape_controls(row.reason))] if beside else []))
    reasons = [Text(escape_controls(f"{row.point}: {row.reason}")) for row in rows if row.reason and not beside]
    warnings = [Text(escape_controls(line)) for line in _warning_lines(rows)]
    counts = Counter(row.state for row in rows)
    summary = [Text(", ".join(f"{count} {state}" for state, count in counts.most_common()))] if len(rows) > 1 else []
    return Group(shown, *reasons, *warnings, *summary)


def _warning_lines(rows: Sequence[Status]) -> list[str]:
    """The warnings of a single run; of several points how many each has."""
    if len(rows) == 1:
        found = rows[0].warnings
        more = [f"{len(found) - _SHOWN_WARNINGS} more warnings: see --json"] if len(found) > _SHOWN_WARNINGS else []
        return [*found[:_SHOWN_WARNINGS], *more]
    return [f"{row.point}: {len(row.warnings)} warnings, the first: {row.warnings[0]}" for row in rows if row.warnings]


def _cells(row: Status) -> dict[str, str]:
    return {
        "point": row.point,
        "job": row.job_id or "-",
        "attempt": "-" if row.attempt is None else str(row.attempt),
        "state": row.state,
        "step": _step(row),
        "loss": "-" if row.loss is None else f"{row.loss:.4f}",
        "last step": "-" if row.seconds_since_step is None else readable_seconds(row.seconds_since_step),
        "nodes": _nodes(row.nodes),
        "exit": "-" if row.exit_code is None else str(row.exit_code),
    }


def _step(row: Status) -> str:
    if row.step is None:
        return "-"
    return f"{row.step}/{row.steps}" if row.steps else str(row.step)


def _nodes(names: Sequence[str]) -> str:
    from hpc_train.cluster.slurm.hostlist import compress

    return compress(names) if len(names) < _SHOWN_NODES else f"{compress(names)} ({len(names)})"
