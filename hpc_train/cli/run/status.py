"""`hpc-train status RUN`: the state of a run or of every point of a sweep, as a table, live, or as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpc_train.launch.slurm.polling import Backoff
from hpc_train.launch.slurm.slurm_cli import run_client
from hpc_train.launch.state.job_state import decide_state
from hpc_train.launch.state.progress import add_progress
from hpc_train.launch.state.run_facts import gather_facts, read_files
from hpc_train.launch.state.run_lookup import RunPoint, find_points
from hpc_train.launch.state.state_names import RunStatus, State
from hpc_train.terminal import escape_controls
from hpc_train.units import format_age

if TYPE_CHECKING:
    from rich.console import Group

_COLOURS = {
    State.RUNNING: "green",
    State.DONE: "bold green",
    State.PENDING: "yellow",
    State.REQUEUED: "yellow",
    State.UNKNOWN: "magenta",
}
_MAX_NODES_SHOWN = 4
_SHOWN_WARNINGS = 10
_PIPE_WIDTH = 4096
"""Columns of the table where stdout is no terminal."""
_REDRAW_SECONDS = 2.0
_REASON_COLUMN_WIDTH = 120
"""Screen width, in columns, from which reasons are shown beside the other columns."""
_COLUMNS = ("point", "job", "attempt", "state", "step", "loss", "last step", "nodes", "exit")
_OPTIONAL = frozenset({"step", "loss", "last step", "exit"})


def read_statuses(points: Sequence[RunPoint]) -> list[RunStatus]:
    """Read the state of every point, with one poll of Slurm for all of them."""
    return [add_progress(decide_state(facts), facts) for facts in gather_facts(points, run_client)]


def status_command(run: str, as_json: bool, watch: bool, goodput: bool) -> int:
    """Print the state of a run, sweep or job; returns the exit code.

    watch: redraw until everything has ended. goodput: print what the nodes' time went into instead.
    """
    points = find_points(run, run_client)
    if goodput:
        print_goodput(points, as_json)
    elif as_json:
        print(json.dumps([status.row() for status in read_statuses(points)]))
    elif watch:
        _watch_status(points)
    else:
        from rich.console import Console

        # Off a terminal, a row must stay on one line for grep and awk.
        console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
        console.print(make_status_table(read_statuses(points), console.width))
        if len(points) == 1 and (line := describe_speed(points[0])):
            print(escape_controls(line))
    return 0


def describe_speed(point: RunPoint) -> str:
    """Return verdict and goodput of a run in one line; "" before it has recorded enough."""
    from hpc_train.launch.state.run_ledger import account_run_directory
    from hpc_train.report.step_table import list_record_files

    if not list_record_files(point.run):
        return ""
    from hpc_train.report.run_summary import judge_newest_steps

    verdict, _, _ = judge_newest_steps(point.run)
    if verdict.name == "not enough data":
        return ""
    goodput = account_run_directory(point.run).goodput
    return f"{point.name}: {verdict.line}; goodput {goodput:.1%}; see `hpc-train report {point.run}`"


def print_goodput(points: Sequence[RunPoint], as_json: bool) -> None:
    """Print what the node-seconds of each point went into."""
    from hpc_train.launch.state.run_ledger import account_run_directory
    from hpc_train.resilience.ledger import format_ledger

    ledgers = [(point.name, account_run_directory(point.run)) for point in points]
    if as_json:
        print(json.dumps([{"point": name, **ledger.as_json()} for name, ledger in ledgers]))
        return
    for name, ledger in ledgers:
        print("\n".join([escape_controls(name), *(f"  {line}" for line in format_ledger(ledger))]))


def _watch_status(points: Sequence[RunPoint]) -> None:
    """Redraw the status as it changes.

    Slurm is asked less and less often while nothing changes; progress is read more often.
    """
    from rich.console import Console
    from rich.live import Live

    console = Console()

    def draw_status() -> Group:
        rows = [add_progress(row, read_files(point)) for point, row in zip(points, before, strict=True)]
        return make_status_table(rows, console.width)

    def ask_slurm() -> list[RunStatus]:
        return [decide_state(facts) for facts in gather_facts(points, run_client)]

    backoff, before = Backoff(), ask_slurm()
    with Live(draw_status(), console=console, auto_refresh=False) as live:
        changed = True
        while not all(status.state.ended for status in before):
            # Progress is in files and cheap to read; every look of every user at squeue is work for the one controller.
            next_update = time.monotonic() + backoff.seconds(changed)
            while (seconds_left := next_update - time.monotonic()) > 0:
                time.sleep(min(_REDRAW_SECONDS, seconds_left))
                live.update(draw_status(), refresh=True)
            now = ask_slurm()
            changed, before = now != before, now
            live.update(draw_status(), refresh=True)


def make_status_table(rows: Sequence[RunStatus], width: int = _PIPE_WIDTH) -> Group:
    """Build a table with one line per point and, for several points, the number in each state.

    Columns that are empty in every row are left out. On screens under 120 columns, reasons are lines below.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    cells = [_format_status_cells(row) for row in rows]
    has_reason_column = width >= _REASON_COLUMN_WIDTH
    names = [name for name in _COLUMNS if name not in _OPTIONAL or any(row[name] != "-" for row in cells)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, no_wrap=True, overflow="fold")
    if has_reason_column:
        table.add_column("reason", overflow="fold")
    for row, texts in zip(rows, cells, strict=True):
        styles = {"state": _COLOURS.get(row.state, "red")}
        line = [Text(escape_controls(texts[name]), style=styles.get(name, "")) for name in names]
        table.add_row(*line, *([Text(escape_controls(row.reason))] if has_reason_column else []))
    reasons = [
        Text(escape_controls(f"{row.point}: {row.reason}")) for row in rows if row.reason and not has_reason_column
    ]
    warnings = [Text(escape_controls(line)) for line in _format_warnings(rows)]
    counts = Counter(row.state for row in rows)
    summary = [Text(", ".join(f"{count} {state}" for state, count in counts.most_common()))] if len(rows) > 1 else []
    survived = [(row.point, _format_fault(row)) for row in rows]
    faults = [Text(escape_controls(f"{point}: {text}")) for point, text in survived if text]
    return Group(table, *reasons, *faults, *warnings, *summary)


def _format_fault(row: RunStatus) -> str:
    """Return what the run has survived, in one line; "" if that is nothing."""
    parts = []
    if row.faults:
        count = f"{len(row.faults)} faults" if len(row.faults) > 1 else "a fault"
        parts.append(f"went on by itself after {count}, the last: {row.faults[-1]}")
    if row.skipped_steps:
        parts.append(f"updates skipped: {row.skipped_steps}")
    if row.passed_over:
        steps = ", ".join(map(str, row.passed_over))
        parts.append(f"checkpoints passed over, as their load ended the ranks: step {steps}")
    return "; ".join(parts)


def _format_warnings(rows: Sequence[RunStatus]) -> list[str]:
    """Return the warnings of a single run; for several points, how many each has."""
    if len(rows) == 1:
        warnings = rows[0].warnings
        omitted = (
            [f"{len(warnings) - _SHOWN_WARNINGS} more warnings: see --json"] if len(warnings) > _SHOWN_WARNINGS else []
        )
        return [*warnings[:_SHOWN_WARNINGS], *omitted]
    return [f"{row.point}: {len(row.warnings)} warnings, the first: {row.warnings[0]}" for row in rows if row.warnings]


def _format_status_cells(row: RunStatus) -> dict[str, str]:
    return {
        "point": row.point,
        "job": row.job_id or "-",
        "attempt": "-" if row.attempt is None else str(row.attempt),
        "state": row.state,
        "step": _format_step(row),
        "loss": "-" if row.loss is None else f"{row.loss:.4f}",
        "last step": "-" if row.seconds_since_step is None else format_age(row.seconds_since_step),
        "nodes": _format_nodes(row.nodes),
        "exit": "-" if row.exit_code is None else str(row.exit_code),
    }


def _format_step(row: RunStatus) -> str:
    if row.step is None:
        return "-"
    return f"{row.step}/{row.steps}" if row.steps else str(row.step)


def _format_nodes(names: Sequence[str]) -> str:
    from hpc_train.cluster.hostlist import compress_hostlist

    return compress_hostlist(names) if len(names) < _MAX_NODES_SHOWN else f"{compress_hostlist(names)} ({len(names)})"
