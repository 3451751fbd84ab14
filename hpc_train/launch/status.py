"""`hpc-train status RUN`: a table for people, live where they want it; JSON for scripts."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hpc_train.launch.clients import Ask, ask
from hpc_train.launch.state.backoff import Backoff
from hpc_train.launch.state.decide import decide
from hpc_train.launch.state.facts import gather
from hpc_train.launch.state.points import Point, find
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
_WIDE = 4096


def survey(points: Sequence[Point], ask: Ask = ask) -> list[Status]:
    """The state of every point, with one poll of Slurm for all of them."""
    return [decide(facts) for facts in gather(points, ask)]


def status_command(run: str, as_json: bool, watch: bool) -> int:
    """Print the state of a run, a sweep or a job; watch: again and again until all has ended. Returns the exit code."""
    points = find(run, ask)
    if as_json:
        print(json.dumps([status.row() for status in survey(points)]))
    elif watch:
        _watch(lambda: survey(points))
    else:
        from rich.console import Console

        # Where nobody looks at a screen, a line is a line.
        Console(width=None if sys.stdout.isatty() else _WIDE).print(table(survey(points)))
    return 0


def _watch(look: Callable[[], list[Status]]) -> None:
    """Slurm is asked rarer and rarer while nothing changes."""
    from rich.live import Live

    backoff, before = Backoff(), look()
    with Live(table(before), auto_refresh=False) as live:
        changed = True
        while not all(status.state.ended for status in before):
            time.sleep(backoff.seconds(changed))
            now = look()
            changed, before = now != before, now
            live.update(table(now), refresh=True)


def table(rows: Sequence[Status]) -> Group:
    """A line a point, and for more than one the number of each state."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("point", "job", "attempt", "state", "nodes", "exit", "reason"):
        shown.add_column(name, no_wrap=name != "reason", overflow="fold")
    for row in rows:
        shown.add_row(
            Text(escape_controls(row.point)),
            Text(escape_controls(row.job_id or "-")),
            Text("-" if row.attempt is None else str(row.attempt)),
            Text(row.state, style=_COLOURS.get(row.state, "red")),
            Text(escape_controls(_nodes(row.nodes))),
            Text("-" if row.exit_code is None else str(row.exit_code)),
            Text(escape_controls(row.reason)),
        )
    counts = Counter(row.state for row in rows)
    summary = [Text(", ".join(f"{count} {state}" for state, count in counts.most_common()))] if len(rows) > 1 else []
    return Group(shown, *summary)


def _nodes(names: Sequence[str]) -> str:
    from hpc_train.cluster.slurm.hostlist import compress

    return compress(names) if len(names) < _SHOWN_NODES else f"{compress(names)} ({len(names)})"
