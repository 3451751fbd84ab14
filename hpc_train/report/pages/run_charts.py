"""Draw the charts of a run's report from its summary; charts.py draws a single chart of given numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hpc_train.report.efficiency import measure_work
from hpc_train.report.pages import charts
from hpc_train.report.pages.charts import Mark, Series
from hpc_train.report.prediction import predict_memory
from hpc_train.report.run_summary import RunSummary
from hpc_train.report.step_table import Array, StepTable, compute_row_means, describe_memory
from hpc_train.resilience.ledger import CLASSES as LEDGER_CLASSES
from hpc_train.units import MIB

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
_MAX_ROWS, _MAX_COLUMNS = 128, 180
"""Cells of the heat map, which would be smaller than a pixel beyond that."""


@dataclass(frozen=True)
class Chart:
    """A chart of the page."""

    name: str
    title: str
    svg: str
    note: str = ""


def draw_charts(summary: RunSummary) -> list[Chart]:
    """Draw all charts for which there is data."""
    drawn = [*_draw_curves(summary)]
    if summary.losses is not None:
        factors = [(name.replace("_", " "), value) for name, value in summary.losses.efficiencies.items()]
        drawn.append(Chart("efficiency", "Efficiency", charts.draw_bars("efficiency factors", factors)))
    drawn.append(Chart("goodput", "Goodput", _draw_goodput(summary)))
    if summary.table is not None:
        drawn += [*_draw_heat_map(summary, summary.table), *_draw_memory(summary.table)]
        drawn += [*_draw_planned_memory(summary), *_draw_pipeline(summary)]
    return [chart for chart in drawn if chart.svg]


def _draw_curves(summary: RunSummary) -> list[Chart]:
    marks = list_marks(summary.events)
    steps = [step for step in summary.steps if isinstance(step.get("step"), int)]
    curves = []
    for title, names, unit in _CURVES:
        series = [Series(name, *pick(steps, name)) for name in names]
        curves.append(Chart(f"curve_{names[0]}", title, charts.draw_lines(title, series, marks, unit)))
    return curves


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
    by_kind: dict[str, list[Mark]] = {}
    for event in events:
        kind, step = _MARKS.get(str(event["event"])), event.get("step")
        if kind is not None and isinstance(step, int):
            text = f"{event['event']} at step {step}"
            by_kind.setdefault(kind, []).append(Mark(step, kind, text))
    return [mark for marks in by_kind.values() for mark in marks[:: max(1, len(marks) // 400)]]


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
    row_name = "rank"
    if len(labels) > _MAX_ROWS:
        names = [nodes.get(table.ranks[row]) or f"ranks {table.ranks[row] // 8 * 8}+" for row in order]
        ratio, labels, row_name = _reduce_rows(ratio, names), list(dict.fromkeys(names)), "node"
    columns = np.array_split(np.arange(ratio.shape[1]), min(ratio.shape[1], _MAX_COLUMNS))
    ratio = np.stack([compute_row_means(ratio[:, column]) for column in columns], axis=1)
    svg = charts.draw_heat_map(
        f"work of each {row_name}", ratio, labels, [float(table.steps[column[-1]]) for column in columns]
    )
    note = (
        f"Time that each {row_name} computes, beside the median of its step: white is the median, red is 1.5 times as "
        "long."
    )
    return [Chart("heat_map", "Ranks over time", svg, note)]


def _reduce_rows(values: Array, names: Sequence[str]) -> Array:
    """Return a row for each name: the largest values of its rows, since the slowest rank is what one looks for."""
    groups: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        groups.setdefault(name, []).append(row)
    return np.stack([np.nanmax(values[rows], axis=0) for rows in groups.values()])


def _draw_memory(table: StepTable) -> list[Chart]:
    memory_charts = []
    for name, title in (("resident", "Memory of the processes"), ("allocated", "Memory of the GPUs")):
        values = table[name]
        if np.isfinite(values).any():
            highest = np.nanmax(values, axis=0)
            lines = [Series("largest of all ranks", table.steps.tolist(), highest.tolist())]
            if len(table.ranks) > 1:
                lines.append(Series("smallest", table.steps.tolist(), np.nanmin(values, axis=0).tolist()))
            svg = charts.draw_lines(title, lines, unit="MiB", width=charts.WIDTH, height=160)
            memory_charts.append(Chart(f"memory_{name}", title, svg))
    return memory_charts


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
    from hpc_train.report.pages.pipeline_spans import read_timeline, simulate_spans

    spans, seconds = simulate_spans(losses.work, pipeline)
    rows = len(set(pipeline.stage_of_rank))
    note = f"Simulated with the measured times of the stages: {losses.bubble_share:.1%} idle."
    note += " Blue is forward, green backward."
    gantt_charts = [
        Chart(
            "gantt_simulated",
            "Pipeline, simulated",
            charts.draw_gantt("simulated pipeline", spans, rows, seconds),
            note,
        )
    ]
    measured, length, idle = read_timeline(summary.path, summary.facts)
    if not measured:
        gantt_charts[0] = replace(gantt_charts[0], note=f"{note} parallel.pipeline.timeline=true records the real one.")
    else:
        note = f"One measured step (parallel.pipeline.timeline): {idle:.1%} idle."
        gantt_charts.append(
            Chart(
                "gantt_measured",
                "Pipeline, measured",
                charts.draw_gantt("measured pipeline", measured, rows, length),
                note,
            )
        )
    return gantt_charts
