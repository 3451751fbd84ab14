"""16,384 ranks: an 8B Llama at pp 8 x dp 256 x tp 8, built one rank at a time on a process group that only pretends."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise, product

import pytest
import torch
from torch.distributed.tensor import DTensor

from hpc_train._torch.dtensor import shard_rectangle
from hpc_train.config.compose import compose
from hpc_train.config.run import RunConfig
from hpc_train.interfaces import Engine, World
from hpc_train.models.initial_values import draw_values
from hpc_train.models.registry import build_model as build_model
from hpc_train.parallel.apply import build
from hpc_train.testing import pretend_ranks
from hpc_train.training.optimizer import make_optimizer

PP, DP, TP = 8, 256, 8
RANKS = PP * DP * TP
OVERRIDES = (
    "model=llama_8b",
    "parallel=fsdp",
    f"parallel.pp={PP}",
    f"parallel.tp={TP}",
    "train.global_batch=2048",
    "train.micro_batch=1",
    "train.sequence_length=8192",
)


Kind = tuple[tuple[int, ...], str]
"""Shape, placements and sizes of the mesh of a parameter: what the ranks of dp and tp hold of it depends on no more."""


def rank_of(stage: int, dp: int, tp: int) -> int:
    """Axes outermost first: pp, dp_shard, tp."""
    return (stage * DP + dp) * TP + tp


def engine_of(world: World, config: RunConfig) -> Engine:
    """What this rank of the whole job holds, with its values."""
    with torch.device("meta"):
        model = build_model(config.model)
    return build(model, lambda split: make_optimizer(split, config.optim), config, world)


def parameters(engine: Engine) -> dict[str, DTensor]:
    found: dict[str, DTensor] = {}
    for part in engine.parts:
        for name, parameter in part.named_parameters():
            assert isinstance(parameter, DTensor)
            found[name] = parameter
    return found


def stage_held(world: World, config: RunConfig, known: set[Kind]) -> tuple[dict[str, Kind], dict[Kind, int]]:
    """Return the kind of each parameter, and of kinds that are not known yet how many elements all ranks hold."""
    held: dict[str, Kind] = {}
    counted: dict[Kind, int] = {}
    for name, parameter in parameters(engine_of(world, config)).items():
        kind = tuple(parameter.shape), f"{parameter.placements} over {tuple(parameter.device_mesh.shape)}"
        if kind not in known | counted.keys():
            counted[kind] = covered(parameter)
        held[name] = kind
    return held, counted


def test_the_shards_of_all_ranks_add_up_to_the_model() -> None:
    config = compose(OVERRIDES)
    with torch.device("meta"):
        whole = {name: tuple(p.shape) for name, p in build_model(config.model).named_parameters()}
    first_ranks = [rank_of(stage, 0, 0) for stage in range(PP)]
    stages: list[dict[str, Kind]] = []
    counted: dict[Kind, int] = {}
    for rank in first_ranks:
        ((held, more),) = pretend_ranks(stage_held, [rank], RANKS, config, {*counted}, parallel=config.parallel)
        stages.append(held)
        counted |= more
    assert sum(len(stage) for stage in stages) == len(whole), "a parameter has one stage"
    seen = {name: (kind[0], counted[kind]) for stage in stages for name, kind in stage.items()}
    assert seen == {name: (shape, math.prod(shape)) for name, shape in whole.items()}


def covered(parameter: DTensor) -> int:
    """Elements that the ranks of dp and tp hold together; no two of them hold the same ones unless they are copies."""
    rectangles = {shard_rectangle(parameter, at) for at in product(range(DP), range(TP))}
    corners: dict[int, list[tuple[int, int]]] = defaultdict(list)
    total = 0
    for shape, offset in rectangles:
        size = math.prod(shape)
        total += size
        if size:
            corners[offset[-1]].append((offset[0], shape[0]))
    for rows in corners.values():
        rows.sort()
        assert all(begin + length <= after for (begin, length), (after, _) in pairwise(rows))
    return total


def what_one_rank_holds(world: World, config: RunConfig) -> tuple[int, int]:
    """(elements held, elements of its stage), once its values are found to be what one device would draw."""
    engine = engine_of(world, config)
    at = (world.dp_index, world.rank % TP)
    for ending in ("attention.q.weight", "feed_forward.down.weight"):
        name, parameter = next((key, p) for key, p in parameters(engine).items() if key.endswith(ending))
        shape, offset = shard_rectangle(parameter, at)
        rule = engine.parts[0].init_rule(name)
        assert torch.equal(
            parameter.to_local(), draw_values(rule, config.train.seed, name, tuple(parameter.shape), offset, shape)
        )
    held = parameters(engine).values()
    return sum(p.to_local().numel() for p in held), sum(p.numel() for p in held)


def test_a_rank_holds_its_share_and_draws_what_one_device_would() -> None:
    config = compose(OVERRIDES)
    which = [rank_of(3, 100, 5), rank_of(3, 255, 5)]
    for held, of in pretend_ranks(what_one_rank_holds, which, RANKS, config, parallel=config.parallel):
        assert held == pytest.approx(of / DP / TP, rel=0.05)
