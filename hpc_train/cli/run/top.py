"""`hpc-train top RUN`: show live in a terminal how a run is doing: verdict, efficiency, and a heat map of its ranks."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpc_train.cli.arguments import add_examples, add_json, whole_number

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

    from hpc_train.launch.state.run_lookup import RunPoint
    from hpc_train.report.step_table import Array, StepTable

_LEAST_SECONDS = 2
_MAP_ROWS, _MAP_COLUMNS = 16, 60
_BUSY_SHARE = 0.1
"""Share of the time that reading may take: a run of many nodes, whose files take long to read, is read less often."""
_SHADES = ((0.9, "▁", "blue"), (1.1, "▃", "white"), (1.25, "▅", "yellow"), (float("inf"), "█", "red"))
"""Sign and colour of a rank whose work is at most this many times the median; the sign tells without colours, too."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `top`."""
    command.add_argument("target", metavar="RUN", help="run directory or job id")
    command.add_argument(
        "--seconds",
        type=whole_number(_LEAST_SECONDS),
        default=_LEAST_SECONDS,
        metavar="N",
        help="seconds between updates (default 2)",
    )
    command.add_argument("--once", action="store_true", help="print once and exit (always if stdout is not a terminal)")
    add_json(command, "print once, as JSON")
    add_examples(
        command, "hpc-train top runs/first", "hpc-train top 1234 --seconds 10", "hpc-train top runs/first --json"
    )
    command.set_defaults(run=_top)


def _top(args: argparse.Namespace) -> int:
    return top_command(args.target, args.seconds, args.once, args.json)


def top_command(target: str, seconds: int, once: bool, as_json: bool) -> int:
    """Show a run until it ends, or once; returns the exit code. Raises UserError for anything but a single run."""
    import sys

    from rich.console import Console
    from rich.live import Live

    from hpc_train.launch.slurm.slurm_cli import run_client
    from hpc_train.launch.state.run_lookup import find_points, require_single

    point = require_single(find_points(target, run_client), target)
    if as_json:
        print(json.dumps(RunView(point).as_json()))
        return 0
    if once or not sys.stdout.isatty():
        Console(width=None if sys.stdout.isatty() else 120, highlight=False).print(draw_run_state(RunView(point)))
        return 0
    view = RunView(point)
    with Live(draw_run_state(view), auto_refresh=False) as live:
        while not view.ended:
            time.sleep(max(seconds, view.seconds / _BUSY_SHARE))
            view = RunView(point)
            live.update(draw_run_state(view), refresh=True)
    return 0


class RunView:
    """State, verdict and newest steps of a run at one moment."""

    def __init__(self, point: RunPoint) -> None:
        from hpc_train.launch.slurm.slurm_cli import run_client
        from hpc_train.launch.state.job_state import decide_state
        from hpc_train.launch.state.progress import add_progress
        from hpc_train.launch.state.run_facts import gather_facts
        from hpc_train.report.run_summary import judge_newest_steps

        began = time.perf_counter()
        (facts,) = gather_facts([point], run_client)
        self.status = add_progress(decide_state(facts), facts)
        steps_left = (self.status.steps or 0) - (self.status.step or 0)
        self.verdict, self.losses, self.table = judge_newest_steps(point.run, steps_left)
        self.name, self.ended = point.name, self.status.state.ended
        self.seconds = time.perf_counter() - began
        """Seconds that reading it took."""

    def as_json(self) -> dict[str, Any]:
        """Return the state, the verdict on the newest steps, and their efficiency."""
        efficiency = self.losses.efficiencies if self.losses is not None else {}
        return {
            "step": self.status.step,
            "steps": self.status.steps,
            "loss": self.status.loss,
            "verdict": self.verdict.as_json(str(self.status.state)),
            "efficiency": {name: round(value, 4) for name, value in efficiency.items()},
            "step_seconds": round(self.losses.total, 6) if self.losses is not None else None,
        }


def draw_run_state(view: RunView) -> Group:
    """Draw the state of a run for the terminal."""
    from rich.console import Group
    from rich.text import Text

    from hpc_train.terminal import escape_controls
    from hpc_train.units import format_seconds

    status, verdict = view.status, view.verdict
    progress = f"  step {status.step}" + (f"/{status.steps}" if status.steps else "") if status.step is not None else ""
    loss = f"  loss {status.loss:.4f}" if status.loss is not None else ""
    step = f"  {format_seconds(view.losses.total)} per step" if view.losses is not None else ""
    colour = {"ok": "green", "warning": "yellow", "critical": "red"}[verdict.severity]
    lines = [
        Text(escape_controls(f"{view.name}  {status.state}{progress}{loss}{step}"), style="bold"),
        Text(escape_controls(verdict.line), style=f"bold {colour}"),
        *(Text(escape_controls(line)) for line in verdict.evidence),
    ]
    if view.losses is not None:
        lines += [_draw_factor(name.replace("_", " "), value) for name, value in view.losses.efficiencies.items()]
    if view.table is not None:
        lines += draw_map(view.table)
    return Group(*lines)


def _draw_factor(name: str, value: float) -> Text:
    from rich.text import Text

    filled = round(max(0.0, min(value, 1.0)) * 30)
    line = Text(f"{name:<14}")
    line.append("█" * filled, style="red" if value < 0.8 else "green")
    line.append("░" * (30 - filled), style="dim")
    line.append(f" {value:.2f}")
    return line


def draw_map(table: StepTable) -> list[Text]:
    """Draw each rank's work relative to its step's median, one row per rank; above 16 ranks, the slowest per group."""
    import numpy as np
    from rich.text import Text

    from hpc_train.report.efficiency import measure_work

    work = measure_work(table)[:, -_MAP_COLUMNS:]
    if len(table.ranks) < 2 or not np.isfinite(work).any():
        return []
    with np.errstate(invalid="ignore"):
        ratio = work / np.nanmedian(work, axis=0)
    groups = np.array_split(np.arange(len(table.ranks)), min(len(table.ranks), _MAP_ROWS))
    lines = []
    for group in groups:
        first, last = table.ranks[group[0]], table.ranks[group[-1]]
        line = Text(f"{f'rank {first}' if first == last else f'ranks {first}-{last}':<14}")
        for value in _find_largest(ratio[group]):
            known = np.isfinite(value)
            sign, colour = next(shade[1:] for shade in _SHADES if value <= shade[0]) if known else ("·", "dim")
            line.append(sign, style=colour)
        lines.append(line)
    return lines


def _find_largest(rows: Array) -> Sequence[float]:
    """Return the largest value of each column; NaN for a column without any."""
    import numpy as np

    largest = np.where(np.isfinite(rows), rows, -np.inf).max(axis=0)
    return [float(value) if value > -np.inf else float("nan") for value in largest]
