"""Turn the order of a pipeline into bars of a Gantt chart: simulated from measured stages, or as it was recorded."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from hpc_train.regular_files import read_json
from hpc_train.report.efficiency import Pipeline, time_stages
from hpc_train.report.findings import Facts
from hpc_train.report.pages.charts import Span
from hpc_train.report.step_table import Array
from hpc_train.schedules.simulate import simulate_order


class _TimelineEvent(NamedTuple):
    """One computation of a recorded timeline."""

    begin: float
    """Seconds."""
    length: float
    """Seconds."""
    kind: str
    name: str
    step: int


def simulate_spans(work: Array, pipeline: Pipeline) -> tuple[list[Span], float]:
    """Return the bars of a simulated step, and its length in seconds. work: C of each rank."""
    simulated = simulate_order(pipeline.order, time_stages(work, pipeline))
    spans = [
        Span(rank, span.start, span.end, str(span.action.kind)[0], str(span.action))
        for rank, row in enumerate(simulated.spans)
        for span in row
    ]
    return spans, simulated.makespan


def read_timeline(run: Path, facts: Facts) -> tuple[list[Span], float, float]:
    """Read the last whole step of the recorded timeline of the first pipeline: bars, length, and the idle share.

    Empty where parallel.pipeline.timeline was off. Ranks of one node share a clock; across nodes only one rank's bars
    can be compared with each other.
    """
    pipeline = facts.pipeline
    if pipeline is None:
        return [], 0.0, 0.0
    try:
        by_row = [_read_events(run / "timeline" / f"rank-{rank}.json") for rank in _list_first_ranks(pipeline)]
    except (OSError, ValueError, KeyError, TypeError):
        return [], 0.0, 0.0
    steps = set.intersection(*({event.step for event in events} for events in by_row))
    if not steps:
        return [], 0.0, 0.0
    last = [[event for event in events if event.step == max(steps)] for events in by_row]
    begin = min(event.begin for events in last for event in events)
    end = max(event.begin + event.length for events in last for event in events)
    spans = [
        Span(row, event.begin - begin, event.begin - begin + event.length, event.kind[:1], event.name)
        for row, events in enumerate(last)
        for event in events
    ]
    idle = 1 - float(np.mean([sum(event.length for event in events) for events in last])) / (end - begin)
    return spans, end - begin, idle


def _read_events(path: Path) -> list[_TimelineEvent]:
    return [
        _TimelineEvent(
            event["ts"] / 1e6, event["dur"] / 1e6, str(event["cat"]), str(event["name"]), int(event["args"]["step"])
        )
        for event in read_json(path)["traceEvents"]
    ]


def _list_first_ranks(pipeline: Pipeline) -> list[int]:
    """Return the first rank of each stage."""
    return [pipeline.stage_of_rank.index(stage) for stage in sorted(set(pipeline.stage_of_rank))]
