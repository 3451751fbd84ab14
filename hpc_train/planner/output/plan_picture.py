"""Draw a plan: memory against the device's, the parts of a step's time, and the pipeline's schedule."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.config.parallel import resolve_degrees
from hpc_train.errors import UserError
from hpc_train.planner.candidate import STAGES, Candidate
from hpc_train.planner.candidate_text import describe_candidate
from hpc_train.planner.plan import Plan
from hpc_train.schedules.generate import REQUIREMENTS, Requirements, generate_order
from hpc_train.schedules.order import Kind
from hpc_train.schedules.simulate import ActionTimes, Simulation, simulate_order
from hpc_train.traffic.stages import count_micro_batches, is_schedule_file, read_schedule_file
from hpc_train.units import GIB, format_seconds

MAX_ROUNDS_SHOWN = 2
"""Micro-batches per rank that are drawn. The middle of a longer step repeats the same pattern."""
_WORK_PARTS = ("compute", "launch", "tensor", "context", "experts")


@dataclass(frozen=True)
class PipelineTimeline:
    """The simulated part of the pipeline's schedule that is drawn."""

    simulation: Simulation
    drawn: int
    """Micro-batches that are drawn."""
    total: int
    """Micro-batches of a step."""


def simulate_timeline(candidate: Candidate) -> PipelineTimeline | None:
    """Simulate the schedule of a candidate; None without a pipeline, or if step times are unknown.

    Forward, backward for inputs and backward for weights are drawn as a third each of a rank's time for a micro-batch,
    divided evenly over its stages.
    """
    degrees = resolve_degrees(candidate.config.parallel, candidate.ranks)
    if degrees.pp == 1 or candidate.parts is None:
        return None
    pipeline, count = candidate.config.parallel.pipeline, count_micro_batches(candidate.config, degrees)
    seconds = sum(candidate.parts[name] for name in _WORK_PARTS) / count
    if is_schedule_file(pipeline):
        order = read_schedule_file(pipeline)
        return PipelineTimeline(simulate_order(order, _divide_times(order.stages, degrees.pp, seconds)), count, count)
    needs = REQUIREMENTS[pipeline.schedule]
    drawn = _choose_drawn(needs, degrees.pp, count)
    order = generate_order(pipeline.schedule, degrees.pp, drawn, pipeline.virtual_stages or needs.virtual_stages)
    return PipelineTimeline(simulate_order(order, _divide_times(order.stages, degrees.pp, seconds)), drawn, count)


def _choose_drawn(needs: Requirements, pp: int, count: int) -> int:
    """Choose how many micro-batches to draw: few enough to see, enough for the schedule to be valid."""
    most = max(MAX_ROUNDS_SHOWN, needs.micro_batches_per_rank) * pp
    return count if count <= most else most


def _divide_times(stages: int, pp: int, seconds: float) -> ActionTimes:
    each = seconds / 3 * pp / stages
    return ActionTimes.even(stages, each, each, each)


_COLOURS = {Kind.F: "tab:blue", Kind.I: "tab:orange", Kind.W: "tab:green", Kind.B: "tab:orange"}
_WORDS = {Kind.F: "forward", Kind.I: "backward, inputs", Kind.W: "backward, weights", Kind.B: "backward"}


def draw_plan(plan: Plan, path: Path) -> None:
    """Draw the best candidate to a file. Raises UserError if there is none, or if the file cannot be written."""
    if plan.best is None:
        raise UserError(f"--plot {path}: nothing fits, so there is nothing to draw")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(f"--plot {path}: needs matplotlib; pip install 'hpc_train[plot]'") from None
    best, pipeline = plan.best, simulate_timeline(plan.best)
    panels = 1 + (best.step is not None) + (pipeline is not None)
    heights = [3.2] * (panels - (pipeline is not None)) + [_choose_height(pipeline)] * (pipeline is not None)
    figure = Figure(figsize=(9.0, sum(heights)), layout="constrained")
    axes = list(figure.subplots(panels, 1, squeeze=False, height_ratios=heights)[:, 0])
    figure.suptitle(_write_title(best), fontsize=10)
    _draw_memory(axes[0], best)
    if best.step is not None:
        _draw_step(axes[1], best)
    if pipeline is not None:
        _draw_pipeline(axes[-1], pipeline)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {path}: {error}") from error


def _choose_height(pipeline: PipelineTimeline | None) -> float:
    return 0.0 if pipeline is None else min(7.0, 1.4 + 0.3 * len(pipeline.simulation.spans))


def _write_title(best: Candidate) -> str:
    where = f"{best.config.model.name} on {best.config.cluster.name}, {best.ranks} ranks, batch {best.global_batch}"
    return f"{where}\n{describe_candidate(best)}"


def _draw_memory(axes: Any, best: Candidate) -> None:
    """Draw one stacked bar per stage."""
    left = [0.0] * len(STAGES)
    for number, (name, part) in enumerate(best.memory.items()):
        sizes = [value / GIB for value in part]
        axes.barh(STAGES, sizes, left=left, label=name, color=f"C{number}")
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    if best.capacity is not None:
        axes.axvline(best.capacity / GIB, color="black", linestyle="--", label="device")
    axes.invert_yaxis()
    axes.set_xlabel("GiB per rank")
    axes.set_ylabel("stage")
    axes.set_title(f"memory: fits: {best.fits}", fontsize=9)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_step(axes: Any, best: Candidate) -> None:
    """Draw the parts of a step as a waterfall: each starts where the one before ended."""
    assert best.parts is not None
    assert best.step is not None
    shown = {name: value for name, value in best.parts.items() if value > 0}
    start = 0.0
    for name, value in shown.items():
        axes.barh(name, value, left=start, color="tab:blue" if name == "compute" else "tab:red")
        axes.text(start + value, name, f" {format_seconds(value)}", va="center", fontsize=7)
        start += value
    spread = [[best.step.p50 - best.step.p10], [best.step.p90 - best.step.p50]]
    axes.barh("step", best.step.p50, xerr=spread, color="tab:gray")
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("seconds")
    axes.set_title(f"step: {format_seconds(best.step.p50)} (whisker: p10 - p90)", fontsize=9)


def _draw_pipeline(axes: Any, pipeline: PipelineTimeline) -> None:
    """Draw one row per pipeline rank."""
    seen: set[Kind] = set()
    for rank, spans in enumerate(pipeline.simulation.spans):
        for span in spans:
            kind = span.action.kind
            word = None if kind in seen else _WORDS[kind]
            seen.add(kind)
            axes.barh(
                rank,
                span.end - span.start,
                left=span.start,
                height=0.9,
                color=_COLOURS[kind],
                edgecolor="white",
                linewidth=0.3,
                label=word,
            )
    axes.invert_yaxis()
    axes.set_ylabel("pp rank")
    axes.set_xlabel("seconds")
    part = "" if pipeline.drawn == pipeline.total else f"; {pipeline.drawn} of {pipeline.total} micro-batches"
    axes.set_title(f"pipeline: {pipeline.simulation.mean_bubble:.1%} idle{part}", fontsize=9)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
