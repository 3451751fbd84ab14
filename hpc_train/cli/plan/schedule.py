"""`hpc-train plan schedule`: search for the pipeline schedule of a model whose stages take unequal times."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from hpc_train.config.compose import compose
from hpc_train.config.parallel import Degrees, resolve_degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import EXIT_DONE, UserError
from hpc_train.models.shape import check_shape
from hpc_train.placement.described_cluster import count_nodes, count_ranks_per_node
from hpc_train.schedules.generate import generate_order
from hpc_train.schedules.order import format_rows
from hpc_train.schedules.search import FoundSchedule, PartTimes, count_live_blocks, search_schedule
from hpc_train.schedules.simulate import simulate_order
from hpc_train.traffic.stages import compute_block_costs, count_micro_batches, read_block_costs, split_blocks

_COMPARED = ("1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv")


def schedule_command(
    overrides: Sequence[str], config_dir: str | None, as_json: bool, out: str | None, communication: float
) -> int:
    """Search, compare with the shipped schedules, print the result and perhaps write the order; returns the exit code.

    Raises UserError for a run without a pipeline, and for a model whose blocks are unknown.
    """
    config = compose(overrides, config_dir)
    check_shape(config.model)
    degrees = resolve_degrees(config.parallel, count_nodes(config) * count_ranks_per_node(config))
    if out is not None and not out.endswith(".csv"):
        raise UserError(f"--out {out}: give a file that ends with .csv, as parallel.pipeline.schedule needs")
    if not 0 <= communication < float("inf"):
        raise UserError(f"--communication {communication:g}: must be 0 or more")
    parts, count = read_part_times(config, degrees, communication), count_micro_batches(config, degrees)
    splits = not config.parallel.compile and config.parallel.recompute.mode == "none"
    best = search_schedule(parts, degrees.pp, count, split_backward=splits)
    rows = [*compare_schedules(parts, degrees.pp, count), describe_best(best)]
    if out is not None:
        text = "".join(",".join(row) + "\n" for row in format_rows(best.order))
        try:
            Path(out).write_text(text)
        except OSError as error:
            raise UserError(f"--out {out}: {error.strerror}; give a file that can be written") from error
    if as_json:
        result = {"schedules": rows, "blocks": best.sizes, "placement": best.order.placement, "micro_batches": count}
        print(json.dumps(result, indent=1))
        return EXIT_DONE
    print_rows(rows, parts, degrees.pp, count, splits)
    blocks = "[" + ",".join(map(str, best.sizes)) + "]"
    print(f"use it with: parallel.pipeline.schedule={out or 'FILE.csv'} 'parallel.pipeline.blocks={blocks}'")
    if out is None:
        print("(--out FILE.csv writes the order)")
    return EXIT_DONE


def read_part_times(config: RunConfig, degrees: Degrees, communication: float) -> PartTimes:
    """Return the times of the model's parts, a mean block being 1: parallel.pipeline.costs, else FLOPs."""
    if degrees.pp == 1:
        raise UserError("plan schedule: parallel.pp=1 has no pipeline; set parallel.pp")
    layers, pipeline = getattr(config.model, "layers", None), config.parallel.pipeline
    if pipeline.costs:
        costs = read_block_costs(pipeline.costs)
    elif layers:
        costs = compute_block_costs(config.model, config.train.sequence_length, layers)
    else:
        raise UserError(
            f"plan schedule: the blocks of model.name={config.model.name} are not known here; give their times by "
            "parallel.pipeline.costs"
        )
    mean = sum(costs.blocks) / len(costs.blocks)
    blocks = tuple(value / mean for value in costs.blocks)
    return PartTimes(costs.before / mean, blocks, costs.after / mean, communication=communication)


Row = dict[str, str | float | int | None]


def compare_schedules(parts: PartTimes, ranks: int, micro_batches: int) -> list[Row]:
    """Simulate the shipped schedules with stages split as the trainer splits them."""
    rows: list[Row] = []
    costs = read_block_costs((parts.before, *parts.blocks, parts.after))
    for name in _COMPARED:
        try:
            order = generate_order(name, ranks, micro_batches)
        except UserError:
            continue
        if order.stages > len(parts.blocks):
            continue
        sizes = tuple(len(stage) for stage in split_blocks(costs, order.stages))
        simulation = simulate_order(order, parts.of_stages(sizes))
        rows.append(_make_row(name, simulation.makespan, simulation.mean_bubble, max(count_live_blocks(order, sizes))))
    return rows


def describe_best(best: FoundSchedule) -> Row:
    """Return the row of the schedule that was found."""
    simulation = best.simulation
    return _make_row("found", simulation.makespan, simulation.mean_bubble, max(best.live_blocks))


def _make_row(name: str, step: float, bubble: float, live: int) -> Row:
    return {"name": name, "step": step, "bubble": bubble, "live_blocks": live}


def print_rows(rows: Sequence[Row], parts: PartTimes, ranks: int, micro_batches: int, splits: bool) -> None:
    """Print the comparison. Times are those of a mean block's forward."""
    print(
        f"{ranks} ranks, {micro_batches} micro-batches, {len(parts.blocks)} blocks; the embedding costs "
        f"{parts.before:.2f} and the head {parts.after:.2f} blocks"
    )
    print(f"{'schedule':24} {'step (blocks)':>14} {'bubble':>8} {'activations (blocks)':>21}")
    for row in rows:
        print(f"{row['name']:24} {row['step']:14.1f} {row['bubble']:8.1%} {row['live_blocks']:21}")
    if not splits:
        print("backwards stay whole: recomputation and compilation do not allow to split them")
