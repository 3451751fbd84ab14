"""Compare two runs, or the points of a sweep: which part of a step changed, and what each loss cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpc_train.launch.state.run_lookup import RunPoint
from hpc_train.report import charts
from hpc_train.report.efficiency import LOSSES, StepLosses
from hpc_train.report.run_summary import RunSummary, read_config
from hpc_train.report.step_table import StepTable
from hpc_train.units import format_seconds


@dataclass(frozen=True)
class Difference:
    """How one part of a step moved from the first run to the second."""

    name: str
    """useful, or a name of LOSSES."""
    before: float
    """Seconds a step."""
    after: float

    @property
    def moved(self) -> float:
        """Seconds a step that it takes longer in the second run."""
        return self.after - self.before


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side."""

    before: RunSummary
    after: RunSummary
    parts: tuple[Difference, ...]
    """Parts of a step, the one that moved most first; they add up to the step. Empty if either was not measured."""
    noise: float
    """Seconds: half the width of the 95 % interval of the difference of the mean steps."""

    @property
    def moved(self) -> float:
        """Seconds a step that the second run takes longer."""
        return sum(part.moved for part in self.parts)

    @property
    def line(self) -> str:
        """Return what moved in one line."""
        if not self.parts:
            return "the parts of a step were not measured in both runs"
        before = sum(part.before for part in self.parts)
        if abs(self.moved) <= self.noise:
            return f"no difference beyond the noise of {format_seconds(self.noise)} per step"
        first = self.parts[0]
        word = "longer" if self.moved > 0 else "less"
        change = f"a step takes {abs(self.moved) / before:.0%} {word} ({format_seconds(abs(self.moved))})"
        return f"{change}; most of it is {first.name.replace('_', ' ')}, {_signed(first.moved)}"

    def as_json(self) -> dict[str, Any]:
        """Return what `report A B --json` prints."""
        return {
            "runs": [str(self.before.path), str(self.after.path)],
            "verdicts": [run.verdict.as_json(str(run.status.state)) for run in (self.before, self.after)],
            "line": self.line,
            "moved_seconds": round(self.moved, 6),
            "noise_seconds": round(self.noise, 6),
            "parts": [
                {"name": part.name, "before": round(part.before, 6), "after": round(part.after, 6)}
                for part in self.parts
            ],
            "settings": [{"key": key, "before": one, "after": other} for key, one, other in self.settings],
        }

    @property
    def settings(self) -> list[tuple[str, Any, Any]]:
        """Return the settings in which the runs differ."""
        from hpc_train.config.plain_config import config_to_dict
        from hpc_train.report.page import flatten

        if self.before.config is None or self.after.config is None:
            return []
        one, other = (
            flatten(config_to_dict(run.config)) for run in (self.before, self.after) if run.config is not None
        )
        return [
            (key, one.get(key), other.get(key))
            for key in dict.fromkeys([*one, *other])
            if one.get(key) != other.get(key) and key != "run_dir"
        ]


def compare_runs(before: RunSummary, after: RunSummary) -> Comparison:
    """Compare two runs by the parts of their mean steps."""
    if before.losses is None or after.losses is None:
        return Comparison(before, after, (), 0.0)
    one, other = _list_parts(before.losses), _list_parts(after.losses)
    parts = [Difference(name, one[name], other[name]) for name in one]
    total = sum(part.moved for part in parts)
    # First what moved in the direction in which the whole moved.
    parts.sort(key=lambda part: -part.moved if total > 0 else part.moved)
    noise = 1.96 * float(np.hypot(_standard_error(before.table), _standard_error(after.table)))
    return Comparison(before, after, tuple(parts), noise)


def _list_parts(losses: StepLosses) -> dict[str, float]:
    return {"useful": losses.useful, **{name: losses.losses[name] for name in LOSSES}}


def _standard_error(table: StepTable | None) -> float:
    """Return the standard error of the mean step, in seconds, from means of ten neighbouring groups of steps."""
    if table is None:
        return 0.0
    steps = np.nanmean(table["total"] - np.nan_to_num(table["evaluate"]), axis=0)
    # Neighbouring steps are alike, so single steps would make the error look too small; means of groups are nearly
    # independent.
    groups = [float(np.nanmean(group)) for group in np.array_split(steps, min(10, len(steps))) if len(group)]
    return float(np.std(groups, ddof=1) / np.sqrt(len(groups))) if len(groups) > 1 else 0.0


def _signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{format_seconds(abs(seconds))}"


@dataclass(frozen=True)
class SweepRow:
    """One point of a sweep."""

    point: str
    state: str
    swept: dict[str, Any]
    metric: float | None
    tokens_per_second: float | None
    node_hours: float
    verdict: str
    best: bool
    command: str
    """Runs the best point again; "" for the others."""


def write_comparison(comparison: Comparison, folder: Path) -> Path:
    """Write comparison.html and comparison.json; returns the page's path. Raises UserError if that fails."""
    from hpc_train.report.page import mark_safe, render_template, write_pages
    from hpc_train.report.run_charts import pick

    runs = (comparison.before, comparison.after)
    longest = max((run.losses.total for run in runs if run.losses is not None), default=0.0)
    bars = []
    for run in runs:
        if run.losses is not None:
            kinds = [
                (f"p-{name}", name.replace("_", " "), seconds) for name, seconds in _list_parts(run.losses).items()
            ]
            # An empty part fills the shorter bar, so that both have one scale.
            bars.append((run.name, [*kinds, ("p-none", "", longest - run.losses.total)]))
    curves = charts.draw_lines(
        "loss", [charts.Series(run.name, *pick(run.steps, "loss")) for run in runs], width=charts.WIDTH
    )
    page = render_template(
        "comparison.html",
        comparison=comparison,
        chart=mark_safe(charts.draw_stacks("steps", bars)),
        curves=mark_safe(curves),
    )
    return write_pages(folder, "comparison", page, comparison.as_json())


def list_sweep_rows(
    points: Sequence[RunPoint], results: Any, hours: Sequence[float], verdicts: Sequence[str]
) -> list[SweepRow]:
    """Put what is known of each point into one row, the best first. results: report.sweep_results.SweepResults."""
    winner = results.winner
    again = next(
        (_format_command(point.run, row) for point, row in zip(points, results.rows, strict=True) if row is winner), ""
    )
    rows = [
        SweepRow(
            row.point,
            row.state,
            row.swept,
            results.value(row),
            row.final.get("tokens_per_second"),
            cost,
            verdict,
            row is winner,
            again if row is winner else "",
        )
        for row, cost, verdict in zip(results.rows, hours, verdicts, strict=True)
    ]
    # The best point first, points without a result last.
    return sorted(rows, key=lambda row: (not row.best, row.metric is None, row.metric or 0.0))


def _format_command(run: Path, row: Any) -> str:
    """Return the command that runs a point again, with all its settings, or if they cannot be read, those swept."""
    from hpc_train.report.page import list_overrides
    from hpc_train.report.tuning import format_command

    config, _ = read_config(run)
    swept = {key: str(value) for key, value in row.swept.items()}
    return format_command([], swept) if config is None else format_command(list_overrides(config), {})


def write_sweep(path: Path, rows: Sequence[SweepRow], keys: Sequence[str], metric: str, folder: Path) -> Path:
    """Write report.html and report.json of a sweep; returns the page's path. keys: the swept settings."""
    from dataclasses import asdict

    from hpc_train.report.page import mark_safe, render_template, write_pages

    best = rows[0] if rows and rows[0].best else None
    done = [row for row in rows if row.metric is not None]
    line = f"{len(rows)} points, {sum(row.state == 'DONE' for row in rows)} done"
    if best is not None:
        values = ", ".join(f"{key}={value}" for key, value in best.swept.items())
        line += f"; best {metric.replace('_', ' ')} {best.metric:.5g}" + (f" with {values}" if values else "")
    axes = [(key, [row.swept.get(key) for row in done]) for key in keys]
    parallel = charts.draw_parallel(
        "settings and result", [*axes, (metric, [row.metric for row in done])], 0 if best else None
    )
    points = [
        (row.node_hours, row.metric, f"{row.point}: {row.metric:.5g}", row.best)
        for row in done
        if row.metric is not None
    ]
    drawn = [
        ("Settings and result", parallel, "A line for each point; the best one is green."),
        ("Cost and result", charts.draw_points("cost and result", points, "node-hours", metric), ""),
    ]
    shown = [{"title": title, "svg": mark_safe(svg), "note": note} for title, svg, note in drawn if svg]
    page = render_template(
        "sweep.html", sweep=path.name, path=path, line=line, rows=rows, keys=keys, metric=metric, charts=shown
    )
    data = {"sweep": str(path), "line": line, "metric": metric, "points": [asdict(row) for row in rows]}
    return write_pages(folder, "report", page, data)
