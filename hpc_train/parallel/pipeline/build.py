"""Pipeline parallelism: the model in stages, each prepared like a model of its own, and the engine over them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from hpc_train.api import Model, World
from hpc_train.config.degrees import Degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.parallel.axes import index
from hpc_train.parallel.dropout import StepMasks
from hpc_train.parallel.engines.pipeline import Hidden, PipelineEngine
from hpc_train.parallel.pipeline import tied
from hpc_train.parallel.pipeline.block_times import BlockTimes, read_times, times_file
from hpc_train.parallel.pipeline.schedule import Pipeline
from hpc_train.parallel.pipeline.stages import Costs, costs, given, split
from hpc_train.parallel.pipeline.timeline import Timeline
from hpc_train.parallel.precision import sharded_policy
from hpc_train.parallel.scaling import loss_scale
from hpc_train.parallel.support import pipeline as rules
from hpc_train.parallel.updates import Updates

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
Say = Callable[[str], None]
Prepare = Callable[[nn.Module, nn.Module, RunConfig, World, Say], None]
"""(part on the meta device, whole model, config, world, what takes a line a pass): every pass, then the values."""


def build(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    prepare: Prepare,
    config: RunConfig,
    world: World,
    degrees: Degrees,
    say: Say,
) -> PipelineEngine:
    """The engine of `model` in stages over the axis pp; the model itself is left as it is. See apply.build.

    Raises UserError for a model that cannot be split so.
    """
    options = config.parallel.pipeline
    names, ranks = stage_names(model, config, degrees), rules.placement(options, degrees.pp)
    on_meta = [_stage(model, blocks) for blocks in names]
    trained = [{name for name, p in part.named_parameters() if p.requires_grad} for part in on_meta]
    _check_trained(trained)
    parts = {stage: on_meta[stage] for stage, rank in enumerate(ranks) if rank == index(world, "pp")}
    say(_said(names, ranks, config))
    for stage, part in parts.items():
        prepare(part, model, config, world, _of_stage(stage, say))
    ties = tied.ties(trained, ranks, parts)
    optimizer = make_optimizer(nn.ModuleList(parts.values()))
    updates = Updates(list(parts.values()), optimizer, world, tied.borrowed(ties), loss_scale(config.precision))
    pipeline = _pipeline(parts, ranks, config, world)
    at_end = [pipeline.timeline.end_step]
    if options.resplit and config.run_dir is not None:
        at_end.append(BlockTimes(parts, len(ranks) - 1, world, times_file(config.run_dir)).end_step)
    hidden = between_stages(model, names[0], config, degrees)
    return PipelineEngine(pipeline, hidden, updates, ties, config, world, at_end)


def _pipeline(parts: dict[int, nn.Module], ranks: tuple[int, ...], config: RunConfig, world: World) -> Pipeline:
    options, group = config.parallel.pipeline, world.mesh["pp"].get_group()
    file = None if config.run_dir is None else Path(config.run_dir) / "timeline" / f"rank-{world.rank}.json"
    timeline = Timeline(world.device, options.timeline, file, world.rank)
    order = rules.read(options) if rules.from_file(options) else None
    masks = StepMasks(parts.values(), config, world)
    return Pipeline(options.schedule, order, ranks, parts, group, world.device, timeline, masks, config.parallel)


def stage_names(model: nn.Module, config: RunConfig, degrees: Degrees) -> list[list[str]]:
    """The blocks of each stage, by name. Raises UserError if the model has too few."""
    assert isinstance(model, Model)
    blocks, pipeline = list(model.blocks()), config.parallel.pipeline
    rules.check_blocks(pipeline, len(blocks), degrees)
    count = len(rules.placement(pipeline, degrees.pp))
    return [[blocks[index] for index in held] for held in split(_costs(blocks, config), count)]


def _costs(blocks: list[str], config: RunConfig) -> Costs:
    """What the run has measured, what the user says, or FLOPs."""
    options = config.parallel.pipeline
    measured = read_times(times_file(config.run_dir), blocks) if options.resplit and config.run_dir else None
    if measured is not None:
        return measured
    return given(options.costs) if options.costs else costs(config.model, config.train.sequence_length, len(blocks))


def between_stages(model: nn.Module, first: list[str], config: RunConfig, degrees: Degrees) -> Hidden:
    """What the stages exchange, found out by a stage that is never given values."""
    compute = sharded_policy(config.precision).param_dtype
    probe = _stage(model, first[:1]).to(compute).eval()
    tensor = config.parallel.tensor
    assert isinstance(model, Model)
    pieces = degrees.tp if tensor.sequence and "seq" in model.plan.values() else 1

    def hidden(inputs: Tensor) -> Tensor:
        like = inputs.to(next(probe.parameters()).dtype) if inputs.is_floating_point() else inputs
        with torch.no_grad():
            out: Tensor = probe(like)
        batch, positions, *rest = out.shape
        return torch.empty(batch, positions // pieces, *rest, dtype=out.dtype, device="meta", requires_grad=True)

    return hidden


def _stage(model: nn.Module, names: list[str]) -> nn.Module:
    """A part of the model on the meta device, training what the model trains."""
    assert isinstance(model, Model)
    part = model.stage(names)
    for name, parameter in part.named_parameters():
        parameter.requires_grad_(model.get_parameter(name).requires_grad)
    return part


def _check_trained(trained: list[set[str]]) -> None:
    """torch's backward begins at the last stage and must have something to do in each."""
    idle = [stage for stage, names in enumerate(trained) if not names]
    if idle:
        raise UserError(
            f"parallel.pp: no parameter of stage {idle[0]} requires a gradient; lower parallel.pp or "
            "parallel.pipeline.virtual_stages, or move the stages with parallel.pipeline.costs"
        )


def _of_stage(stage: int, say: Say) -> Say:
    return lambda line: say(f"stage {stage}: {line}")


def _said(names: list[list[str]], ranks: tuple[int, ...], config: RunConfig) -> str:
    sizes = ", ".join(f"{len(blocks)} on {rank}" for blocks, rank in zip(names, ranks, strict=True))
    schedule = config.parallel.pipeline.schedule
    return f"pipeline: {schedule} over pp={max(ranks) + 1}, {len(ranks)} stages of blocks: {sizes}"
