"""Turn the order of a pipeline into bars of a Gantt chart: simulated from measured stages, or as it was recorded."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hpc_train.regular_files import read_json
from hpc_train.report.charts import Span
from hpc_train.report.efficiency import Pipeline, time_stages
from hpc_train.report.step_table import Array
from hpc_train.report.verdict import Facts
from hpc_train.schedules.simulate import simulate_order


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
    by_row: dict[int, list[tuple[float, float, str, str, int]]] = {}
    for row, rank in enumerate(_first_pipeline(pipeline)):
        try:
            events = read_json(run / "timeline" / f"rank-{rank}.json")["traceEvents"]
            by_row[row] = [
                (
                    event["ts"] / 1e6,
                    event["dur"] / 1e6,
                    str(event["cat"]),
                    str(event["name"]),
                    int(event["args"]["step"]),
                )
                for event in events
            ]
        except (OSError, ValueError, KeyError, TypeError):
            return [], 0.0, 0.0
    steps = set.intersection(*({event[4] for event in events} for events in by_row.values()))
    if not steps:
        return [], 0.0, 0.0
    last = {row: [event for event in events if event[4] == max(steps)] for row, events in by_row.items()}
    begin = min(event[0] for events in last.values() for event in events)
    end = max(event[0] + event[1] for events in last.values() for event in events)
    spans = [
        Span(row, at - begin, at - begin + length, kind[:1], name)
        for row, events in last.items()
        for at, length, kind, name, _ in events
    ]
    idle = 1 - float(np.mean([sum(event[1] for event in events) for events in last.values()])) / (end - begin)
    return spans, end - begin, idle


def _first_pipeline(pipeline: Pipeline) -> list[int]:
    """Return the first rank of each stage."""
    return [pipeline.stage_of_rank.index(stage) for stage in sorted(set(pipeline.stage_of_rank))]
