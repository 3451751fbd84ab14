"""Write the report of a run: report.html, one file that needs no network and no script, and report.json.

What is on the page is in page.html and style.css beside this file; base.html is the frame that all pages
share. A chart is added in run_charts.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from hpc_train.cluster.hostlist import compress_hostlist
from hpc_train.config.keys.overrides import format_override_value
from hpc_train.config.plain_config import config_to_dict, flatten_settings
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.regular_files import write_private_file
from hpc_train.report.advice import has_other_nodes
from hpc_train.report.efficiency import measure_blocked
from hpc_train.report.pages.run_charts import Chart, draw_charts, plan_memory
from hpc_train.report.run_summary import RunSummary
from hpc_train.report.step_table import compute_row_means, describe_memory, round_finite
from hpc_train.report.usage import compute_cost, describe_usage, list_ledger
from hpc_train.report.verdict import CLASSES
from hpc_train.units import format_seconds

_EVENTS_SHOWN, _PHASES_SHOWN = 200, 16
"""Rows of the page's tables; report.json has all of them."""
_PLAIN_EVENTS = frozenset({"checkpoint", "weights", "note", "submit"})
"""Events that are no incidents."""


def write_report(summary: RunSummary, folder: Path) -> Path:
    """Write report.html and report.json; returns the page's path. Raises UserError if the folder cannot be written."""
    drawn = draw_charts(summary)
    data = make_report(summary, drawn)
    return write_pages(folder, "report", render_page(summary, drawn, data), data)


def make_report(summary: RunSummary, drawn: Sequence[Chart] = ()) -> dict[str, Any]:
    """Return what report.json holds: verdict, efficiency, goodput and phases, as `report --json` prints it."""
    losses = summary.losses
    efficiency: dict[str, Any] = {}
    if losses is not None:
        efficiency = {name: round(value, 4) for name, value in losses.efficiencies.items()}
        efficiency["product"] = round(losses.useful / losses.total, 4) if losses.total else None
        efficiency["step_seconds"] = round(losses.total, 6)
        efficiency["mfu"] = find_mfu(summary.steps)
    return {
        "run": str(summary.path),
        "made": summary.made,
        "verdict": summary.verdict.as_json(str(summary.status.state)),
        "efficiency": efficiency,
        "goodput": summary.ledger.as_json(),
        "phases": list_phases(summary),
        "memory": {**describe_memory(summary.table), "planned_mib": plan_memory(summary)},
        "cost": compute_cost(summary),
        "steps": {
            "made": summary.status.step,
            "planned": summary.status.steps,
            "recorded": summary.table.bins if summary.table else 0,
        },
        "charts": {
            chart.name: chart.svg.count("<path") + chart.svg.count("<rect") + chart.svg.count("<image")
            for chart in drawn
        },
        "notes": list(summary.notes),
    }


def find_mfu(steps: Sequence[dict[str, Any]]) -> float | None:
    """Return the mean MFU of the second half of the steps; None if it is not known."""
    # The first half may have warmed up, compiled, or loaded its data from a cold cache.
    values = [value for step in steps[len(steps) // 2 :] if isinstance(value := step.get("mfu"), (int, float))]
    return round(sum(values) / len(values), 4) if values else None


def choose_phases(phases: Sequence[dict[str, Any]], named: Sequence[int]) -> list[dict[str, Any]]:
    """Return the rows of the page's table: all, or of many those of the ranks named and of those that compute most."""
    if len(phases) <= _PHASES_SHOWN:
        return list(phases)

    def busy(row: dict[str, Any]) -> tuple[bool, float]:
        return row["rank"] in named, (row["forward"] or 0.0) + (row["backward"] or 0.0)

    return sorted(phases, key=busy, reverse=True)[:_PHASES_SHOWN]


def list_phases(summary: RunSummary) -> list[dict[str, Any]]:
    """Return the mean seconds of each part of a step, by rank."""
    table = summary.table
    if table is None:
        return []
    columns = {
        "total": table["total"],
        "data": table["data"],
        "forward": table["forward"] - table["blocked_forward"],
        "backward": table["backward"] - table["blocked_backward"],
        "blocked": measure_blocked(table),
        "clip": table["clip"] - table["blocked_clip"],
        "update": table["update"],
        "save": table["save"],
        "evaluate": table["evaluate"],
    }
    means = {name: compute_row_means(values) for name, values in columns.items()}
    nodes = summary.facts.node_of_rank
    return [
        {
            "rank": rank,
            "node": nodes.get(rank, ""),
            **{name: round_finite(values[row], 6) for name, values in means.items()},
        }
        for row, rank in enumerate(table.ranks)
    ]


def render_page(summary: RunSummary, drawn: Sequence[Chart], data: dict[str, Any]) -> str:
    """Render the page. Every text is escaped by the template; the charts escape theirs."""
    return render_template(
        "page.html",
        summary=summary,
        verdict=summary.verdict,
        classes=CLASSES,
        data=data,
        phases=choose_phases(data["phases"], summary.verdict.ranks),
        charts={chart.name: {"title": chart.title, "svg": mark_safe(chart.svg), "note": chart.note} for chart in drawn},
        curves=[chart.name for chart in drawn if chart.name.startswith("curve_")],
        wide=[chart.name for chart in drawn if chart.name.startswith(("heat_map", "gantt", "memory"))],
        ledger=list_ledger(summary.ledger),
        nodes=_list_nodes(summary),
        leave_out=_list_nodes_to_leave_out(summary),
        settings=list_changed_settings(summary.config),
        everything=flatten_settings(config_to_dict(summary.config)) if summary.config is not None else {},
        incidents=[event for event in summary.events if event["event"] not in _PLAIN_EVENTS][-_EVENTS_SHOWN:],
        usage=describe_usage(summary, data["cost"]),
    )


def render_template(name: str, **values: Any) -> str:
    """Render a template of this folder: every value is escaped, and a name that is missing is an error."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    files = resources.files("hpc_train.report.pages")

    # Names, reasons and log lines come from anywhere: the page is opened in a browser that may be logged in elsewhere.
    environment = Environment(
        loader=FunctionLoader(lambda file: files.joinpath(file).read_text()),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["seconds"] = lambda value: "-" if value is None else format_seconds(value)
    environment.filters["setting"] = format_override_value
    environment.filters["percent"] = lambda value: "-" if value is None else f"{value:.1%}"
    environment.filters["when"] = lambda value: datetime.fromtimestamp(value).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    style = mark_safe(files.joinpath("style.css").read_text())
    return environment.get_template(name).render(style=style, **values)


def mark_safe(text: str) -> Any:
    """Mark markup of our own that the template must not escape."""
    from markupsafe import Markup

    return Markup(text)


def write_pages(folder: Path, name: str, page: str, data: Any) -> Path:
    """Write a page and its data beside each other; returns the page's path. Raises UserError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_private_file(folder / f"{name}.json", json.dumps(data, indent=1) + "\n")
        write_private_file(folder / f"{name}.html", page)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; give another folder with --out") from error
    return folder / f"{name}.html"


def _list_nodes_to_leave_out(summary: RunSummary) -> tuple[str, ...]:
    """Return the nodes that are slow or late to get their data, if the job ran on others as well."""
    verdict = summary.verdict
    leave = verdict.name in ("straggler", "input") and has_other_nodes(verdict.nodes, summary.facts)
    return verdict.nodes if leave else ()


def _list_nodes(summary: RunSummary) -> list[dict[str, Any]]:
    """Return the nodes with their ranks, what they are bound to, and how their work compares."""
    losses, table = summary.losses, summary.table
    work = dict(zip(table.ranks, losses.work.tolist(), strict=True)) if losses is not None and table is not None else {}
    median_work = float(np.median(list(work.values()))) if work else 0.0
    nodes: dict[str, list[dict[str, Any]]] = {}
    for entry in summary.ranks:
        nodes.setdefault(str(entry.get("host", "?")), []).append(entry)
    rows = []
    for name, entries in nodes.items():
        ranks = [int(entry["rank"]) for entry in entries if "rank" in entry]
        slowest = max((work[rank] for rank in ranks if rank in work), default=None)
        bound = {str(entry.get("gpu") or f"cpus {entry.get('cpus')}") for entry in entries}
        rows.append(
            {
                "name": name,
                "ranks": compress_hostlist([str(rank) for rank in ranks])
                if len(ranks) > 8
                else ", ".join(map(str, ranks)),
                "bound": ", ".join(sorted(bound)[:8]),
                "work": slowest,
                "ratio": slowest / median_work if slowest is not None and median_work > 0 else None,
                "suspect": name in summary.verdict.nodes,
            }
        )
    return rows


def list_changed_settings(config: RunConfig | None) -> list[tuple[str, Any, Any]]:
    """Return (key, value, default) of each setting that is not at its default."""
    if config is None:
        return []
    from hpc_train.config.compose import compose

    settings, default = flatten_settings(config_to_dict(config)), flatten_settings(config_to_dict(compose()))
    return [
        (key, value, default.get(key)) for key, value in settings.items() if key not in default or default[key] != value
    ]
