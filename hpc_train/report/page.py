"""Write the report of a run: report.html, one file that needs no network and no script, and report.json."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from hpc_train.cluster.hostlist import compress_hostlist
from hpc_train.config.compose import config_to_dict
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.regular_files import write_private_file
from hpc_train.report import charts
from hpc_train.report.charts import Mark, Series
from hpc_train.report.efficiency import measure_blocked, measure_work
from hpc_train.report.prediction import predict_memory
from hpc_train.report.run_summary import RunSummary
from hpc_train.report.step_table import Array, StepTable
from hpc_train.report.usage import compute_cost, describe_usage, list_ledger
from hpc_train.report.verdict import CLASSES
from hpc_train.resilience.ledger import CLASSES as LEDGER_CLASSES
from hpc_train.units import MIB, format_seconds

_CURVES = (
    ("loss", ("loss", "validation_loss"), "nats"),
    ("gradient norm", ("grad_norm",), ""),
    ("learning rate", ("lr",), ""),
    ("speed", ("tokens_per_second",), "tokens/s"),
)
_MARKS = {
    "checkpoint": "save",
    "resume": "attempt",
    "start": "attempt",
    "skipped": "skip",
    "rollback": "rollback",
}
_EVENTS_SHOWN, _PHASES_SHOWN = 200, 16
"""Rows of the page's tables; report.json has all of them."""
_MOST_ROWS, _MOST_COLUMNS = 128, 180
"""Cells of the heat map, which would be smaller than a pixel beyond that."""
_PLAIN_EVENTS = frozenset({"checkpoint", "weights", "note", "submit"})
"""Events that are no incidents."""


@dataclass(frozen=True)
class Chart:
    """A chart of the page."""

    name: str
    title: str
    svg: str
    note: str = ""


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
    means = {name: _mean_of_rows(values) for name, values in columns.items()}
    nodes = summary.facts.node_of_rank
    return [
        {"rank": rank, "node": nodes.get(rank, ""), **{name: _number(values[row], 6) for name, values in means.items()}}
        for row, rank in enumerate(table.ranks)
    ]


def _mean_of_rows(values: Array) -> Array:
    """Return the mean of each row without NaN; NaN for a row of nothing else, without numpy's warning."""
    found = np.isfinite(values)
    return np.where(found.any(axis=1), np.nansum(values, axis=1) / np.maximum(found.sum(axis=1), 1), np.nan)


def _number(value: float, digits: int) -> float | None:
    """Round for JSON, which has neither NaN nor infinity."""
    return round(float(value), digits) if math.isfinite(value) else None


def describe_memory(table: StepTable | None) -> dict[str, Any]:
    """Return the peaks of memory over all ranks, in MiB."""
    if table is None:
        return {}
    return {
        f"{name}_mib": _number(np.nanmax(table[name]), 1)
        for name in ("resident", "allocated", "reserved")
        if np.isfinite(table[name]).any()
    }


def draw_charts(summary: RunSummary) -> list[Chart]:
    """Draw all charts for which there is data."""
    found = [*_draw_curves(summary)]
    if summary.losses is not None:
        factors = [(name.replace("_", " "), value) for name, value in summary.losses.efficiencies.items()]
        found.append(Chart("efficiency", "Efficiency", charts.draw_bars("efficiency factors", factors)))
    found.append(Chart("goodput", "Goodput", _draw_goodput(summary)))
    if summary.table is not None:
        found += [*_draw_heat_map(summary, summary.table), *_draw_memory(summary.table)]
        found += [*_draw_planned_memory(summary), *_draw_pipeline(summary)]
    return [chart for chart in found if chart.svg]


def _draw_curves(summary: RunSummary) -> list[Chart]:
    marks = list_marks(summary.events)
    steps = [step for step in summary.steps if isinstance(step.get("step"), int)]
    found = []
    for title, names, unit in _CURVES:
        series = [Series(name, *pick(steps, name)) for name in names]
        found.append(Chart(f"curve_{names[0]}", title, charts.draw_lines(title, series, marks, unit)))
    return found


def pick(steps: Sequence[dict[str, Any]], name: str) -> tuple[list[float], list[float | None]]:
    """Return steps and values of one metric, where it was measured."""
    points = [
        (step["step"], value)
        for step in steps
        if isinstance(value := step.get(name), (int, float)) and isinstance(step["step"], int)
    ]
    return [x for x, _ in points], [y for _, y in points]


def list_marks(events: Sequence[dict[str, Any]]) -> list[Mark]:
    """Return the marks of the curves: saves, attempts, skipped steps and rollbacks; at most 400 of each kind."""
    found: dict[str, list[Mark]] = {}
    for event in events:
        kind, step = _MARKS.get(str(event["event"])), event.get("step")
        if kind is not None and isinstance(step, int):
            text = f"{event['event']} at step {step}"
            found.setdefault(kind, []).append(Mark(step, kind, text))
    return [mark for marks in found.values() for mark in marks[:: max(1, len(marks) // 400)]]


def _draw_goodput(summary: RunSummary) -> str:
    parts = [(f"l-{name}", LEDGER_CLASSES[name], seconds) for name, seconds in summary.ledger.seconds.items()]
    return charts.draw_bands("node-seconds by class", parts)


def _draw_heat_map(summary: RunSummary, table: StepTable) -> list[Chart]:
    """Draw each rank's own work relative to the median of all ranks, by step; above 128 ranks, each node's."""
    work = measure_work(table)
    if not np.isfinite(work).any() or len(table.ranks) < 2:
        return []
    with np.errstate(invalid="ignore"):
        ratio = work / np.nanmedian(work, axis=0)
    labels = [f"rank {rank}" for rank in table.ranks]
    nodes = summary.facts.node_of_rank
    # By node, so that a slow node shows as a band of neighbouring rows.
    order = sorted(range(len(table.ranks)), key=lambda row: (nodes.get(table.ranks[row], ""), row))
    ratio, labels = ratio[order], [labels[row] for row in order]
    what = "rank"
    if len(labels) > _MOST_ROWS:
        names = [nodes.get(table.ranks[row]) or f"ranks {table.ranks[row] // 8 * 8}+" for row in order]
        ratio, labels, what = _reduce_rows(ratio, names), list(dict.fromkeys(names)), "node"
    columns = np.array_split(np.arange(ratio.shape[1]), min(ratio.shape[1], _MOST_COLUMNS))
    ratio = np.stack([_mean_of_rows(ratio[:, column]) for column in columns], axis=1)
    svg = charts.draw_heat_map(
        f"work of each {what}", ratio, labels, [float(table.steps[column[-1]]) for column in columns]
    )
    note = (
        f"Time that each {what} computes, beside the median of its step: white is the median, red is 1.5 times as long."
    )
    return [Chart("heat_map", "Ranks over time", svg, note)]


def _reduce_rows(values: Array, names: Sequence[str]) -> Array:
    """Return a row for each name: the largest values of its rows, since the slowest rank is what one looks for."""
    groups: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        groups.setdefault(name, []).append(row)
    return np.stack([np.nanmax(values[rows], axis=0) for rows in groups.values()])


def _draw_memory(table: StepTable) -> list[Chart]:
    found = []
    for name, title in (("resident", "Memory of the processes"), ("allocated", "Memory of the GPUs")):
        values = table[name]
        if np.isfinite(values).any():
            highest = np.nanmax(values, axis=0)
            lines = [Series("largest of all ranks", table.steps.tolist(), highest.tolist())]
            if len(table.ranks) > 1:
                lines.append(Series("smallest", table.steps.tolist(), np.nanmin(values, axis=0).tolist()))
            svg = charts.draw_lines(title, lines, unit="MiB", width=charts.WIDTH, height=160)
            found.append(Chart(f"memory_{name}", title, svg))
    return found


def _draw_planned_memory(summary: RunSummary) -> list[Chart]:
    """Draw the planned parts of a GPU's memory next to the largest peak of any GPU."""
    planned, measured = plan_memory(summary), describe_memory(summary.table).get("allocated_mib")
    if not planned or measured is None:
        return []
    kinds = ("p-useful", "p-bubble", "p-checkpoint", "p-transfer", "p-input", "p-serialisation")
    parts = [(kind, name, amount) for kind, (name, amount) in zip(kinds, planned.items(), strict=True)]
    bars = [("planned", parts), ("measured peak", [("p-none outlined", "measured peak", measured)])]
    note = ", ".join(f"{name} {amount:,.0f}" for name, amount in planned.items())
    return [
        Chart(
            "memory_planned",
            "GPU memory, planned and measured",
            charts.draw_stacks("planned memory", bars, lambda amount: f"{amount:,.0f} MiB"),
            f"Planned, in MiB: {note}; together {sum(planned.values()):,.0f}. Measured: {measured:,.0f}.",
        )
    ]


def plan_memory(summary: RunSummary) -> dict[str, float]:
    """Return what the planner expects in the memory of the fullest GPU, in MiB by part; {} without GPUs."""
    if summary.config is None or not summary.facts.accelerator:
        return {}
    memory = predict_memory(summary.config, len(summary.ranks))
    return {name: round(amount / MIB, 1) for name, amount in memory.items()}


def _draw_pipeline(summary: RunSummary) -> list[Chart]:
    """Draw the schedule with the measured times of the stages, and the recorded timeline where there is one."""
    pipeline, losses, table = summary.facts.pipeline, summary.losses, summary.table
    if pipeline is None or losses is None or table is None:
        return []
    # Imported here: the simulation is not needed for runs without a pipeline.
    from hpc_train.report.pipeline_spans import read_timeline, simulate_spans

    spans, seconds = simulate_spans(losses.work, pipeline)
    rows = len(set(pipeline.stage_of_rank))
    note = f"Simulated with the measured times of the stages: {losses.bubble_share:.1%} idle."
    note += " Blue is forward, green backward."
    found = [
        Chart(
            "gantt_simulated",
            "Pipeline, simulated",
            charts.draw_gantt("simulated pipeline", spans, rows, seconds),
            note,
        )
    ]
    measured, length, idle = read_timeline(summary.path, summary.facts)
    if not measured:
        found[0] = replace(found[0], note=f"{note} parallel.pipeline.timeline=true records the real one.")
    else:
        note = f"One measured step (parallel.pipeline.timeline): {idle:.1%} idle."
        found.append(
            Chart(
                "gantt_measured",
                "Pipeline, measured",
                charts.draw_gantt("measured pipeline", measured, rows, length),
                note,
            )
        )
    return found


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
        settings=list_changed_settings(summary.config),
        everything=flatten(config_to_dict(summary.config)) if summary.config is not None else {},
        incidents=[event for event in summary.events if event["event"] not in _PLAIN_EVENTS][-_EVENTS_SHOWN:],
        usage=describe_usage(summary, data["cost"]),
    )


def render_template(name: str, **values: Any) -> str:
    """Render a template of this package: every value is escaped, and a name that is missing is an error."""
    from jinja2 import Environment, StrictUndefined

    # Names, reasons and log lines come from anywhere: the page is opened in a browser that may be logged in elsewhere.
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["seconds"] = lambda value: "-" if value is None else format_seconds(value)
    environment.filters["setting"] = format_setting
    environment.filters["percent"] = lambda value: "-" if value is None else f"{value:.1%}"
    environment.filters["when"] = lambda value: datetime.fromtimestamp(value).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    files = resources.files("hpc_train.report")
    style = mark_safe(files.joinpath("style.css").read_text())
    return environment.from_string(files.joinpath(name).read_text()).render(style=style, **values)


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


def _list_nodes(summary: RunSummary) -> list[dict[str, Any]]:
    """Return the nodes with their ranks, what they are bound to, and how their work compares."""
    losses, table = summary.losses, summary.table
    work = dict(zip(table.ranks, losses.work.tolist(), strict=True)) if losses is not None and table is not None else {}
    usual = float(np.median(list(work.values()))) if work else 0.0
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
                "ratio": slowest / usual if slowest is not None and usual > 0 else None,
                "suspect": name in summary.verdict.nodes,
            }
        )
    return rows


def list_changed_settings(config: RunConfig | None) -> list[tuple[str, Any, Any]]:
    """Return (key, value, default) of each setting that is not at its default."""
    if config is None:
        return []
    from hpc_train.config.compose import compose

    own, default = flatten(config_to_dict(config)), flatten(config_to_dict(compose()))
    return [(key, value, default.get(key)) for key, value in own.items() if key not in default or default[key] != value]


def list_overrides(config: RunConfig) -> list[str]:
    """List the overrides that make a configuration out of the defaults, without its run directory."""
    changed = list_changed_settings(config)
    return [f"{key}={format_setting(value)}" for key, value, _ in changed if key != "run_dir"]


def format_setting(value: Any) -> str:
    """Format the value of a setting as an override has it."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value)


def flatten(values: Any, path: str = "") -> dict[str, Any]:
    """Return nested settings as dotted keys."""
    if not isinstance(values, dict):
        return {path: values}
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flatten(value, f"{path}.{key}" if path else str(key))
    return found
