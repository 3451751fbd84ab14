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
_LOOK_SECONDS = 2.0


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
        Console(width=None if sys.stdout.isatty() else _WIDE).print(table(survey(points)))
    return 0


def _watch(points: Sequence[Point]) -> None:
    """Slurm is asked rarer and rarer while nothing changes; how far runs have come is read more often."""
    from rich.live import Live

    def shown() -> Group:
        return table([with_progress(row, read_files(point)) for point, row in zip(points, before, strict=True)])

    def ask_slurm() -> list[Status]:
        return [decide(facts) for facts in gather(points, ask)]

    backoff, before = Backoff(), ask_slurm()
    with Live(shown(), auto_refresh=False) as live:
        changed = True
        while not all(status.state.ended for status in before):
            again = time.monotonic() + backoff.seconds(changed)
            while (left := again - time.monotonic()) > 0:
                time.sleep(min(_LOOK_SECONDS, left))
                live.update(shown(), refresh=True)
            now = ask_slurm()
            changed, before = now != before, now
            live.update(shown(), refresh=True)


def table(rows: Sequence[Status]) -> Group:
    """A line a point, and for more than one the number of each state."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("point", "job", "attempt", "state", "step", "loss", "last step", "nodes", "exit", "reason"):
        shown.add_column(name, no_wrap=name != "reason", overflow="fold")
    for row in rows:
        shown.add_row(
            Text(row.point),
            Text(row.job_id or "-"),
            Text("-" if row.attempt is None else str(row.attempt)),
            Text(row.state, style=_COLOURS.get(row.state, "red")),
            Text(_step(row)),
            Text("-" if row.loss is None else f"{row.loss:.4f}"),
            Text("-" if row.seconds_since_step is None else readable_seconds(row.seconds_since_step)),
            Text(_nodes(row.nodes)),
            Text("-" if row.exit_code is None else str(row.exit_code)),
            Text(row.reason),
        )
    counts = Counter(row.state for row in rows)
    summary = [Text(", ".join(f"{count} {state}" for state, count in counts.most_common()))] if len(rows) > 1 else []
    return Group(shown, *summary)


def _step(row: Status) -> str:
    if row.step is None:
        return "-"
    return f"{row.step}/{row.steps}" if row.steps else str(row.step)


def _nodes(names: Sequence[str]) -> str:
    from hpc_train.cluster.slurm.hostlist import compress

    return compress(names) if len(names) < _SHOWN_NODES else f"{compress(names)} ({len(names)})"
