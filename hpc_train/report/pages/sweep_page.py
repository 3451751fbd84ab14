"""Write the report of a sweep: its points as a table, the best first, and how settings and cost go with the result.

A page and a JSON file beside each other, as page.py writes for one run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.launch.state.run_lookup import RunPoint
from hpc_train.report.pages import charts
from hpc_train.report.run_summary import read_config
from hpc_train.report.sweep_results import SweepResults


@dataclass(frozen=True)
class SweepRow:
    """One point of a sweep."""

    point: str
    state: str
    swept: dict[str, Any]
    """Values of the swept settings."""
    metric: float | None
    """Result by which points are compared; None: it has none."""
    tokens_per_second: float | None
    node_hours: float
    verdict: str
    best: bool
    command: str
    """Command that runs the best point again; "" for the others, and if its configuration cannot be read."""


def list_sweep_rows(
    points: Sequence[RunPoint], results: SweepResults, hours: Sequence[float], verdicts: Sequence[str]
) -> list[SweepRow]:
    """Make a row of each point, the best first.

    hours: node-hours of each point. verdicts: one line for each point on why it was slow.
    """
    winner = results.winner
    rerun = next(
        (_format_command(point.run) for point, row in zip(points, results.rows, strict=True) if row is winner), ""
    )
    rows = [
        SweepRow(
            point=row.point,
            state=row.state,
            swept=row.swept,
            metric=results.get_value(row),
            tokens_per_second=row.final.get("tokens_per_second"),
            node_hours=cost,
            verdict=verdict,
            best=row is winner,
            command=rerun if row is winner else "",
        )
        for row, cost, verdict in zip(results.rows, hours, verdicts, strict=True)
    ]
    # The best point first, points without a result last.
    return sorted(rows, key=lambda row: (not row.best, row.metric is None, row.metric or 0.0))


def _format_command(run: Path) -> str:
    """Return the command that runs a point again; "" if its configuration cannot be read."""
    from hpc_train.config.keys.run_overrides import list_overrides
    from hpc_train.report.tuning.search import format_command

    config, _ = read_config(run)
    if config is None:
        return ""
    return format_command(list_overrides(config), {}, config.launch.kind == "slurm")


def write_sweep(path: Path, rows: Sequence[SweepRow], keys: Sequence[str], metric: str, folder: Path) -> Path:
    """Write report.html and report.json of a sweep; returns the page's path. keys: the swept settings."""
    from dataclasses import asdict

    from hpc_train.report.pages.page import mark_safe, render_template, write_pages

    best = rows[0] if rows and rows[0].best else None
    measured = [row for row in rows if row.metric is not None]
    line = f"{len(rows)} points, {sum(row.state == 'DONE' for row in rows)} done"
    if best is not None:
        values = ", ".join(f"{key}={value}" for key, value in best.swept.items())
        line += f"; best {metric.replace('_', ' ')} {best.metric:.5g}" + (f" with {values}" if values else "")
    axes = [(key, [row.swept.get(key) for row in measured]) for key in keys]
    parallel = charts.draw_parallel(
        "settings and result", [*axes, (metric, [row.metric for row in measured])], 0 if best else None
    )
    points = [
        (row.node_hours, row.metric, f"{row.point}: {row.metric:.5g}", row.best)
        for row in measured
        if row.metric is not None
    ]
    drawn = [
        ("Settings and result", parallel, "A line for each point; the best one is green."),
        ("Cost and result", charts.draw_points("cost and result", points, "node-hours", metric), ""),
    ]
    chart_list = [{"title": title, "svg": mark_safe(svg), "note": note} for title, svg, note in drawn if svg]
    page = render_template(
        "sweep.html", sweep=path.name, path=path, line=line, rows=rows, keys=keys, metric=metric, charts=chart_list
    )
    data = {"sweep": str(path), "line": line, "metric": metric, "points": [asdict(row) for row in rows]}
    return write_pages(folder, "report", page, data)
