"""Rules of pipeline parallelism; those of each schedule are in hpc_train/schedules."""

from __future__ import annotations

import math

from hpc_train.config.keys.overrides import format_changed_setting
from hpc_train.config.model import TransformerConfig, VisionTransformerConfig
from hpc_train.config.parallel import Degrees, PipelineConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.near_names import suggest_names
from hpc_train.schedules import generate
from hpc_train.schedules.generate import REQUIREMENTS
from hpc_train.schedules.validate import find_problem, find_runtime_problem
from hpc_train.traffic.stages import (
    count_micro_batches,
    is_schedule_file,
    place_stages,
    read_schedule_file,
    splits_backward,
)

TIMELINE_STEPS = 8
"""Steps that parallel.pipeline.timeline records, before it writes: the first of them with what is made once."""
TIMED_STEPS = 4
"""Steps until parallel.pipeline.resplit has measured the blocks, and writes."""


def check_pipeline_rules(config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError for what pipeline parallelism cannot do."""
    pipeline = config.parallel.pipeline
    if degrees.pp == 1:
        if pipeline != PipelineConfig():
            changed = format_changed_setting(pipeline)
            raise UserError(
                f"parallel.pipeline.{changed}: has no effect with parallel.pp=1; set parallel.pp, or leave it out"
            )
        return
    if is_schedule_file(pipeline):
        _check_file(config, degrees)
    else:
        _check_named(config, degrees)
    if isinstance(config.model, (TransformerConfig, VisionTransformerConfig)):
        check_blocks(pipeline, config.model.layers, degrees)  # of any other, only the model itself knows; see build
    _check_options(config)


def _check_named(config: RunConfig, degrees: Degrees) -> None:
    pipeline = config.parallel.pipeline
    name = pipeline.schedule
    if name not in REQUIREMENTS:
        near = suggest_names(name, REQUIREMENTS)
        raise UserError(f"parallel.pipeline.schedule={name}: no such schedule, and no .csv file; {near}")
    virtual = pipeline.virtual_stages or REQUIREMENTS[name].virtual_stages
    generate.check_schedule(name, degrees.pp, count_micro_batches(config, degrees), virtual)


def _check_file(config: RunConfig, degrees: Degrees) -> None:
    pipeline, train = config.parallel.pipeline, config.train
    if pipeline.virtual_stages is not None:
        raise UserError(
            f"parallel.pipeline.virtual_stages={pipeline.virtual_stages}: {pipeline.schedule} says which stages a "
            "rank has; leave it out"
        )
    order, count = read_schedule_file(pipeline), count_micro_batches(config, degrees)
    option = f"parallel.pipeline.schedule={pipeline.schedule}"
    if (order.ranks, len(set(order.placement))) != (degrees.pp, degrees.pp):
        raise UserError(
            f"{option}: is for {order.ranks} ranks, {len(set(order.placement))} of them with a stage, but "
            f"parallel.pp={degrees.pp}; give a line with actions for each"
        )
    if order.micro_batches != count:
        raise UserError(
            f"{option}: is for {order.micro_batches} micro-batches, but train.global_batch={train.global_batch} over "
            f"{degrees.data_parallel} data-parallel ranks makes {count} of train.micro_batch={train.micro_batch}"
        )
    if wrong := find_problem(order, count) or find_runtime_problem(order):
        raise UserError(f"{option}: {wrong}")


def check_blocks(pipeline: PipelineConfig, blocks: int, degrees: Degrees) -> None:
    """Raise UserError if the model has too few blocks for the stages, or `costs` does not match the blocks."""
    stages, costs = len(place_stages(pipeline, degrees.pp)), pipeline.costs
    if blocks < stages:
        raise UserError(
            f"parallel.pp={degrees.pp}: {stages} stages for a model of {blocks} blocks, of which each stage needs one; "
            "lower parallel.pp or parallel.pipeline.virtual_stages"
        )
    if pipeline.blocks is not None:
        _check_stage_blocks(pipeline.blocks, blocks, stages)
    if costs is None:
        return
    if len(costs) != blocks + 2:
        raise UserError(
            f"parallel.pipeline.costs: {len(costs)} values; give {blocks + 2}, one for the embedding, one for each of "
            f"the {blocks} blocks, and one for the head"
        )
    if not all(0 <= cost < math.inf for cost in costs) or max(costs) == 0:
        raise UserError("parallel.pipeline.costs: each must be 0 or more and finite, and not all of them 0")


def _check_stage_blocks(sizes: list[int], blocks: int, stages: int) -> None:
    if len(sizes) != stages or min(sizes) < 1 or sum(sizes) != blocks:
        raise UserError(
            f"parallel.pipeline.blocks={sizes}: give {stages} numbers, one for each stage, each at least 1, with the "
            f"sum {blocks}, the blocks of the model"
        )


def _check_options(config: RunConfig) -> None:
    pipeline, steps = config.parallel.pipeline, config.train.wanted_steps
    for name, first_step in (("timeline", TIMELINE_STEPS), ("resplit", TIMED_STEPS)):
        if getattr(pipeline, name) and steps is not None and steps < first_step:
            raise UserError(
                f"parallel.pipeline.{name}=true: has no effect before step {first_step}, and train.steps={steps}; use "
                f"at least {first_step}, or leave it out"
            )
    if pipeline.blocks is not None and (pipeline.resplit or pipeline.costs is not None):
        other = "resplit" if pipeline.resplit else "costs"
        raise UserError(
            f"parallel.pipeline.{other}: has no effect with parallel.pipeline.blocks; leave one of them out"
        )
    if pipeline.resplit and not config.checkpoint.every:
        raise UserError(
            "parallel.pipeline.resplit=true: only has an effect on a resume, and checkpoint.every=0 saves nothing to "
            "resume from; leave it out, or save"
        )
    if config.parallel.compile and splits_backward(pipeline):
        raise UserError(
            f"parallel.compile=true: {pipeline.schedule} computes the gradients of weights apart, which torch cannot "
            "compile; use parallel.pipeline.schedule=interleaved_1f1b"
        )
