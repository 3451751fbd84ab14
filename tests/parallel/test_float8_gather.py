"""Weights gathered in 8 bits: the numbers of one process in every layout, the bits of a layout without, and resumes.

The scale of a layer's input spans the tokens of a micro-batch, so layouts with the same micro-batches agree. cp cuts
them, and is compared with itself without the gather.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn import draw
from matrix import STEPS, Case, fresh, global_batch, resume, share, steps, train_and_resume
from outcome import Held, Outcome
from test_matrix import assert_outcome
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic

from hpc_train.checkpoint import save_step
from hpc_train.config.compose import compose
from hpc_train.errors import UserError
from hpc_train.interfaces import MicroBatch, StepBatch, World
from hpc_train.parallel.rules.check import check_support
from hpc_train.testing import run_ranks

TENSORWISE, GATHER = "precision.float8=tensorwise", "precision.float8_gather=true"
FLOAT8 = (TENSORWISE, GATHER)
HSDP = ("parallel=hsdp", "parallel.dp_replicate=2", "parallel.dp_shard=2")
STAGES = ("parallel=pp", "parallel.pp=2", "parallel.dp_shard=2")
CASES = {
    "zero1-2": Case(2, ("parallel.strategy=zero1", *FLOAT8), "sixteens"),
    "zero2-2": Case(2, ("parallel.strategy=zero2", *FLOAT8), "sixteens"),
    "fsdp-4": Case(4, ("parallel=fsdp", *FLOAT8), "sixteens"),
    "fsdp-2-kept": Case(2, ("parallel=fsdp", "parallel.reshard_after_forward=false", *FLOAT8), "sixteens"),
    "hsdp-2x2": Case(4, (*HSDP, *FLOAT8), "sixteens"),
    "pp-2-zero3": Case(4, (*STAGES, "parallel.strategy=zero3", *FLOAT8), "sixteens"),
    "pp-2-zero2-zbv": Case(
        4, (*STAGES, "parallel.strategy=zero2", "parallel.pipeline.schedule=zbv", *FLOAT8), "sixteens"
    ),
    "fsdp-2-recompute": Case(2, ("parallel=fsdp", "parallel.recompute.mode=full", *FLOAT8), "sixteens"),
    "fsdp-2-selective": Case(2, ("parallel=fsdp", "parallel.recompute.mode=selective", *FLOAT8), "sixteens"),
    "fsdp-2-offload": Case(2, ("parallel=fsdp", "parallel.offload.optimizer=cpu", *FLOAT8), "sixteens"),
    "fsdp-2-compile": Case(2, ("parallel=fsdp", "parallel.compile=true", *FLOAT8), "sixteens"),
    "ep-2": Case(2, ("parallel=fsdp", "parallel.ep=2", *FLOAT8), "experts"),
}
DRAWN = ("fsdp-4",)


def _train_alone(world: World, case: Case, folder: Path) -> tuple[Outcome, Outcome]:
    engine = fresh(case, world)
    trained = steps(engine, case, world, STEPS)
    save_step(folder, len(STEPS), engine.shards(), {}, world).wait()
    return trained, steps(engine, case, world, (len(STEPS),))


@cache
def _in_one_process(kind: str, folder: Path) -> tuple[Outcome, Outcome]:
    """Train the two steps and the one after them without any gather; `folder` gets the checkpoint between."""
    alone = Case(1, ("parallel=ddp", TENSORWISE), kind)
    (outcomes,) = run_ranks(_train_alone, 1, alone, folder, parallel=alone.config().parallel)
    return outcomes


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("one_process")


@pytest.mark.parametrize("name", draw(CASES, DRAWN))
def test_every_layout_gives_the_numbers_of_one_process_and_resumes_them(name: str, base: Path, tmp_path: Path) -> None:
    case = CASES[name]
    expected, following = _in_one_process(case.kind, base / case.kind)
    ranks = run_ranks(
        train_and_resume, case.ranks, case, base / case.kind, tmp_path, parallel=case.config().parallel, timeout=300
    )
    assert_outcome([trained for trained, _ in ranks], expected)
    assert_outcome([resumed for _, resumed in ranks], following)
    alone = Case(1, ("parallel=ddp", TENSORWISE), case.kind)
    assert_outcome(run_ranks(resume, 1, alone, tmp_path, parallel=alone.config().parallel), following)


SAME = {
    "fsdp-2": Case(2, ("parallel=fsdp", TENSORWISE), "sixteens"),
    "cp-2": Case(2, ("parallel=fsdp", "parallel.cp=2", "parallel.dp_shard=1", TENSORWISE), "sixteens"),
    "cp-2-shard-2": Case(4, ("parallel=fsdp", "parallel.cp=2", "parallel.dp_shard=2", TENSORWISE), "sixteens"),
    "copies": Case(4, (*HSDP, "parallel.sync.every=1", TENSORWISE), "sixteens"),
    "average": Case(2, ("parallel=fsdp", "optim.ema.decay=0.5", TENSORWISE), "sixteens"),
}


def _train_without_and_with(world: World, case: Case) -> list[tuple[Outcome, float]]:
    outcomes = []
    for overrides in (case.overrides, (*case.overrides, GATHER)):
        one = Case(case.ranks, overrides, case.kind)
        engine = fresh(one, world)
        outcome = steps(engine, one, world, STEPS)
        evaluated = engine.evaluate(share(global_batch(case.kind, 0), world, case.micro))
        outcomes.append((outcome, float(evaluated.loss)))
    return outcomes


@pytest.mark.parametrize("name", draw(SAME, ["cp-2"]))
def test_in_float64_a_layout_gives_the_bits_it_gives_without(name: str) -> None:
    case = SAME[name]
    for (without, lost), (gathered, evaluated) in run_ranks(
        _train_without_and_with, case.ranks, case, parallel=case.config().parallel, timeout=300
    ):
        assert gathered.losses == without.losses
        assert gathered.norms == without.norms
        assert evaluated == lost, "an evaluation sees the weights of the last update"
        for step, expected in zip(gathered.gradients, without.gradients, strict=True):
            _assert_same(step, expected)
        _assert_same(gathered.state, without.state)


def _assert_same(pieces: list[Held], expected: list[Held]) -> None:
    for piece, other in zip(pieces, expected, strict=True):
        assert piece.name == other.name
        np.testing.assert_array_equal(piece.local, other.local)


def _gather_after_an_update(world: World) -> list[tuple[bool, bool, torch.dtype, int]]:
    overrides = ("parallel=fsdp", "precision=bf16", "precision.reduce=fp32", "train.global_batch=5", *FLOAT8)
    case = Case(5, overrides, "sixteens", micro=1)
    engine = fresh(case, world)
    row = slice(world.dp_index, world.dp_index + 1)
    batch = StepBatch([MicroBatch(*(tensor[row] for tensor in global_batch("sixteens", 0)))])
    for _ in range(2):
        engine.forward_backward(batch)
        engine.clip(None)
        engine.update(1e-2)
    engine.evaluate(batch)
    (part,) = engine.parts
    seen = []
    for block in part.modules():
        if not isinstance(block, FSDPModule) or block is part:
            continue
        sharded = {name: layer.weight for name, layer in block.named_modules() if hasattr(layer, "weight_cast")}
        block.unshard()
        for name, weight in sharded.items():
            assert isinstance(weight, DTensor)
            layer: Any = block.get_submodule(name)
            expected = hp_tensor_to_float8_dynamic(weight.full_tensor(), torch.float8_e4m3fn, layer.linear_mm_config)
            gathered = layer.weight
            bits = torch.equal(gathered._data.view(torch.uint8), expected._data.view(torch.uint8))
            seen.append((bits, torch.equal(gathered._scale, expected._scale), gathered.dtype, len(weight.to_local())))
        block.reshard()
    return seen


def test_uneven_and_empty_shards_are_the_whole_weight_rounded_once() -> None:
    """In bfloat16 too: without the gather a weight is rounded to that first."""
    config = Case(5, ("parallel=fsdp", "precision=bf16", "train.global_batch=5", *FLOAT8), "sixteens").config()
    ranks = run_ranks(_gather_after_an_update, 5, parallel=config.parallel, timeout=300)
    for seen in ranks:
        assert len(seen) == 4 * 7
        assert {(bits, scale, dtype) for bits, scale, dtype, _ in seen} == {(True, True, torch.bfloat16)}
    rows = [[count for *_, count in seen] for seen in ranks]
    assert 0 in rows[-1], "16 rows are 4 on each of the other ranks"
    assert any(sum(counts) != 5 * counts[0] for counts in zip(*rows, strict=True))


@pytest.mark.parametrize(
    ("overrides", "ranks", "words"),
    [
        (("precision=fp8", "parallel=fsdp"), 2, "float8=rowwise has one for each row; use precision.float8=tensorwise"),
        (("parallel=fsdp",), 2, "precision.float8=none computes nothing in 8 bits"),
        ((TENSORWISE, "parallel=ddp"), 2, "ddp gathers nothing; use parallel=zero1, zero2 or fsdp"),
        ((TENSORWISE, "parallel=fsdp"), 1, "no effect with dp_shard 1"),
        ((TENSORWISE, "parallel=fsdp", "parallel.offload.parameters=cpu"), 2, "use parallel.offload.optimizer"),
    ],
)
def test_where_nothing_can_be_gathered_in_8_bits_is_one_line(
    overrides: tuple[str, ...], ranks: int, words: str
) -> None:
    with pytest.raises(UserError, match=r"precision\.float8_gather=true: ") as caught:
        check_support(compose([GATHER, *overrides]), ranks)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
