"""Build the pipeline stages of a model, each prepared like a model of its own, and the engine that runs them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hpc_train.config.parallel import Degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import Model, Report, World
from hpc_train.models.adapters.adapted_linear import copy_adapters
from hpc_train.parallel.dropout import StepMasks
from hpc_train.parallel.engines import pipeline_engine
from hpc_train.parallel.engines.pipeline_engine import BetweenStages, PipelineEngine
from hpc_train.parallel.engines.updating_engine import has_routers
from hpc_train.parallel.mesh_axes import get_axis_index
from hpc_train.parallel.optimizer_step import OptimizerFactory, OptimizerUpdates, Stages
from hpc_train.parallel.pipeline.measurement import BlockTimes, Timeline, get_times_path, read_block_times
from hpc_train.parallel.pipeline.schedule import Pipeline
from hpc_train.parallel.precision.number_formats import make_loss_scale, make_mixed_precision_policy
from hpc_train.parallel.rules.pipeline import check_blocks
from hpc_train.traffic.stages import (
    BlockCosts,
    compute_block_costs,
    is_schedule_file,
    list_stage_blocks,
    place_stages,
    read_block_costs,
    read_schedule_file,
)

if TYPE_CHECKING:
    from hpc_train.parallel.expert.balance import ExpertBalance

PreparePart = Callable[[nn.Module, nn.Module, RunConfig, World, Report], None]
"""Applies every pass to a part and gives it values: (part on the meta device, whole model, config, world, report)."""


def build_pipeline_engine(
    model: nn.Module,
    make_optimizer: OptimizerFactory,
    prepare: PreparePart,
    config: RunConfig,
    world: World,
    degrees: Degrees,
    say: Report,
) -> PipelineEngine:
    """Build the engine of `model` in stages over the axis pp; the model itself is not changed. See apply.build.

    Raises UserError for a model that cannot be split so.
    """
    options = config.parallel.pipeline
    names, ranks = name_stage_blocks(model, config, degrees), place_stages(options, degrees.pp)
    # Every rank makes all stages. On the meta device they cost nothing, and which parameters are tied or trained in the
    # stages of other ranks decides what this one exchanges.
    on_meta = [_make_stage(model, blocks) for blocks in names]
    trained = [{name for name, p in part.named_parameters() if p.requires_grad} for part in on_meta]
    frozen = [{name for name, p in part.named_parameters() if not p.requires_grad} for part in on_meta]
    _check_trained(trained)
    parts = {stage: on_meta[stage] for stage, rank in enumerate(ranks) if rank == get_axis_index(world, "pp")}
    say(_describe_stages(names, ranks, config))
    for stage, part in parts.items():
        prepare(part, model, config, world, _report_for_stage(stage, say))
    ties = pipeline_engine.find_tied_parameters(trained, ranks, parts)
    # Frozen parameters have no gradients to exchange, but only one copy of a tied one is to be saved.
    frozen_ties = pipeline_engine.find_tied_parameters(frozen, ranks, parts)
    updates = OptimizerUpdates(
        list(parts.values()),
        make_optimizer(Stages(parts.values())),
        world,
        pipeline_engine.select_borrowed([*ties, *frozen_ties]),
        make_loss_scale(config.precision),
        config.optim.ema,
    )
    pipeline = _make_pipeline(parts, ranks, config, world)
    at_end = [pipeline.timeline.end_step]
    if options.resplit and config.run_dir is not None:
        at_end.append(BlockTimes(parts, len(ranks) - 1, world, get_times_path(config.run_dir)).end_step)
    return PipelineEngine(
        pipeline=pipeline,
        infer_output=infer_stage_output(model, names[0], config, degrees),
        updates=updates,
        ties=ties,
        config=config,
        world=world,
        at_end=at_end,
        balance=_make_expert_balance(parts, on_meta, world),
    )


def _make_expert_balance(parts: dict[int, nn.Module], stages: list[nn.Module], world: World) -> ExpertBalance | None:
    """Make what balances the experts of all stages; None for a dense model.

    Its numbers are of the whole model, so it needs the routers of the stages on other ranks, too.
    """
    if not has_routers(stages):
        return None
    from hpc_train.parallel.expert.balance import ExpertBalance, list_routers

    return ExpertBalance(list(parts.values()), list_routers(stages), world)


def _make_pipeline(parts: dict[int, nn.Module], ranks: tuple[int, ...], config: RunConfig, world: World) -> Pipeline:
    options, group = config.parallel.pipeline, world.mesh["pp"].get_group()
    file = None if config.run_dir is None else Path(config.run_dir) / "timeline" / f"rank-{world.rank}.json"
    timeline = Timeline(world.device, options.timeline, file, world.rank)
    order = read_schedule_file(options) if is_schedule_file(options) else None
    masks = StepMasks(parts.values(), config, world)
    return Pipeline(
        name=options.schedule,
        order=order,
        ranks=ranks,
        parts=parts,
        group=group,
        device=world.device,
        timeline=timeline,
        masks=masks,
        parallel=config.parallel,
    )


def name_stage_blocks(model: nn.Module, config: RunConfig, degrees: Degrees) -> list[list[str]]:
    """Return the names of the blocks of each stage. Raises UserError if the model has too few."""
    assert isinstance(model, Model)
    blocks, pipeline = list(model.blocks()), config.parallel.pipeline
    check_blocks(pipeline, len(blocks), degrees)
    count = len(place_stages(pipeline, degrees.pp))
    stages = list_stage_blocks(pipeline, _choose_block_costs(blocks, config), count)
    return [[blocks[index] for index in stage] for stage in stages]


def _choose_block_costs(blocks: list[str], config: RunConfig) -> BlockCosts:
    """Choose block costs: measured by this run, else the user's, else FLOPs."""
    options = config.parallel.pipeline
    measured = read_block_times(get_times_path(config.run_dir), blocks) if options.resplit and config.run_dir else None
    if measured is not None:
        return measured
    return (
        read_block_costs(options.costs)
        if options.costs
        else compute_block_costs(config.model, config.train.sequence_length, len(blocks))
    )


def infer_stage_output(model: nn.Module, first: list[str], config: RunConfig, degrees: Degrees) -> BetweenStages:
    """Infer the tensor that stages exchange from a stage on the meta device."""
    compute = make_mixed_precision_policy(config.precision).param_dtype
    probe = _make_stage(model, first[:1]).to(compute).eval()
    tensor = config.parallel.tensor
    assert isinstance(model, Model)
    sequence_parts = degrees.tp if tensor.sequence and "seq" in model.plan.values() else 1

    def hidden(inputs: Tensor) -> Tensor:
        typed_inputs = inputs.to(next(probe.parameters()).dtype) if inputs.is_floating_point() else inputs
        with torch.no_grad():
            out: Tensor = probe(typed_inputs)
        batch, positions, *features = out.shape
        return torch.empty(
            batch, positions // sequence_parts, *features, dtype=out.dtype, device="meta", requires_grad=True
        )

    return hidden


def _make_stage(model: nn.Module, names: list[str]) -> nn.Module:
    """Make a stage of the model on the meta device, with the same adapters and frozen parameters as the model."""
    assert isinstance(model, Model)
    part = model.stage(names)
    copy_adapters(part, model)
    for name, parameter in part.named_parameters():
        parameter.requires_grad_(model.get_parameter(name).requires_grad)
    return part


def _check_trained(trained: list[set[str]]) -> None:
    """Raise UserError for a stage without trained parameters: torch's backward must have something to do in each."""
    idle = [stage for stage, names in enumerate(trained) if not names]
    if idle:
        raise UserError(
            f"parallel.pp: no parameter of stage {idle[0]} requires a gradient; lower parallel.pp or "
            "parallel.pipeline.virtual_stages, or move the stages with parallel.pipeline.costs"
        )


def _report_for_stage(stage: int, say: Report) -> Report:
    return lambda line: say(f"stage {stage}: {line}")


def _describe_stages(names: list[list[str]], ranks: tuple[int, ...], config: RunConfig) -> str:
    sizes = ", ".join(f"{len(blocks)} on {rank}" for blocks, rank in zip(names, ranks, strict=True))
    schedule = config.parallel.pipeline.schedule
    return f"pipeline: {schedule} over pp={max(ranks) + 1}, {len(ranks)} stages of blocks: {sizes}"
