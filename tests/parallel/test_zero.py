"""ZeRO 1, 2 and 3: one process's numbers, the paper's memory a rank and its communication (arXiv:1910.02054)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn import draw
from outcome import Outcome, assert_close, engine_steps, reference, whole
from plain_setup import Layout, engine_of
from recorder import GATHER, REDUCE, SCATTER, Call, Recorder
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc_train.checkpoint import load_step, save_step
from hpc_train.config.compose import compose
from hpc_train.config.model import TransformerConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import Engine, MicroBatch, StepBatch, World
from hpc_train.models.registry import build_model as build_model
from hpc_train.parallel.apply import build
from hpc_train.parallel.rules.check import check_support
from hpc_train.testing import run_ranks
from hpc_train.training.optimizer import make_optimizer

TOLERANCE = 1e-10
OPTIM = ("optim.max_norm=0.05", "optim.eps=1e-6")
STEPS = (0, 1)
HYBRID = ("parallel.dp_replicate=2", "parallel.dp_shard=2")
SMALL_GROUPS = "parallel.bucket_mib=0.01"
LAYOUTS = {
    "zero1-2": Layout(2, ("parallel=zero1",)),
    "zero1-2x2-groups": Layout(4, ("parallel=zero1", *HYBRID, SMALL_GROUPS)),
    "zero2-2x2": Layout(4, ("parallel=zero2", *HYBRID)),
    "zero2-3-groups": Layout(3, ("parallel=zero2", SMALL_GROUPS)),
    "zero3-2-no-prefetch": Layout(2, ("parallel=fsdp", "parallel.prefetch=0")),
    "zero3-2x2-prefetch": Layout(4, ("parallel=hsdp", *HYBRID, "parallel.prefetch=2")),
}
CASES = [("untied", "one"), ("tied", "two"), ("gpt2", "short_last"), ("half_frozen", "two")]

Case = tuple[str, str]


def _choose_cases(layout: str) -> list[Case]:
    """Two of the four, in turns."""
    return CASES[::2] if list(LAYOUTS).index(layout) % 2 else CASES[1::2]


def _train_cases(world: World, config: RunConfig, cases: list[Case]) -> dict[Case, Outcome]:
    return {
        (kind, accumulation): engine_steps(engine_of(kind, config, world), world, config, kind, accumulation, STEPS)
        for kind, accumulation in cases
    }


@cache
def _truth(kind: str) -> Outcome:
    return reference(kind, LAYOUTS["zero1-2"].config(*OPTIM), STEPS)


@pytest.mark.parametrize("name", draw(LAYOUTS, [name for name in LAYOUTS if name != "zero2-2x2"]))
def test_every_stage_gives_the_numbers_of_one_process(name: str) -> None:
    config = LAYOUTS[name].config(*OPTIM)
    cases = _choose_cases(name)
    trained = run_ranks(_train_cases, LAYOUTS[name].ranks, config, cases, parallel=config.parallel)
    for case in cases:
        ranks, truth = [outcomes[case] for outcomes in trained], _truth(case[0])
        for rank in ranks:
            np.testing.assert_allclose(rank.losses, truth.losses, rtol=TOLERANCE)
            np.testing.assert_allclose(rank.norms, truth.norms, rtol=TOLERANCE)
        for step in STEPS:
            assert_close(whole([rank.gradients[step] for rank in ranks]), whole([truth.gradients[step]]), TOLERANCE)
        assert_close(whole([rank.state for rank in ranks]), whole([truth.state]), TOLERANCE)


ROAD = (LAYOUTS["zero1-2"], LAYOUTS["zero2-3-groups"], LAYOUTS["zero3-2x2-prefetch"], Layout(2, ("parallel=ddp",)))


def _go_on(world: World, config: RunConfig, folder: Path, step: int) -> Outcome:
    engine = engine_of("tied", config, world)
    if step:
        load_step(folder, step, engine.shards(), world)
    outcome = engine_steps(engine, world, config, "tied", "two", (step,))
    save_step(folder, step + 1, engine.shards(), {}, world).wait()
    return outcome


def test_state_moves_from_stage_to_stage(tmp_path: Path) -> None:
    for step, layout in enumerate(ROAD):
        config = layout.config(*OPTIM)
        ranks = run_ranks(_go_on, layout.ranks, config, tmp_path, step, parallel=config.parallel)
    truth = reference("tied", LAYOUTS["zero1-2"].config(*OPTIM), range(len(ROAD)))
    np.testing.assert_allclose(ranks[0].losses[-1], truth.losses[-1], rtol=TOLERANCE)
    assert_close(whole([rank.state for rank in ranks]), whole([truth.state]), TOLERANCE)


# From here on sizes divide by the ranks, so that the formulas hold to the byte.

EVEN = partial(TransformerConfig, name="even", vocab_size=32, layers=3, hidden=16, heads=2, kv_heads=1, feed_forward=24)
FLOAT = 4
"""Bytes of a parameter, of its gradient, and of each of AdamW's two moments."""


def _engine(config: RunConfig, world: World) -> Engine:
    with torch.device("meta"):
        module = build_model(EVEN())
    return build(module, lambda split: make_optimizer(split, config.optim), config, world)


def _config(*overrides: str) -> RunConfig:
    return compose(("model=llama_tiny", "train.global_batch=8", *overrides))


def _batch(world: World, micro: int) -> StepBatch:
    """The same on every rank: only sizes matter."""
    tokens = torch.arange(8 * 2).remainder(32).view(2, 8)
    return StepBatch([MicroBatch(tokens, tokens)] * micro)


@cache
def _sizes() -> tuple[int, int]:
    """(parameters, those in blocks)."""
    module = build_model(EVEN())
    blocks = sum(p.numel() for block in module.blocks().values() for p in block.parameters())
    return sum(p.numel() for p in module.parameters()), blocks


def _step(world: World, config: RunConfig, micro: int, measure: bool = False) -> list[Call]:
    """Of the second step: the first one also sets up."""
    engine = _engine(config, world)
    engine.forward_backward(_batch(world, micro))
    engine.update(0.0)
    batch = _batch(world, micro)
    batch.measure = measure
    with Recorder(engine) as recorder:
        engine.forward_backward(batch)
    return recorder.calls


Request = tuple[tuple[str, ...], int, bool]
"""Overrides, micro-batches, and whether the first of them is measured."""
GROUPED = ((), ("parallel.bucket_mib=0.016",))
TWO_RANKS: list[Request] = [
    *((("parallel=zero1", *more), micro, False) for more in GROUPED for micro in (1, 3)),
    *((("parallel=zero2", *more), micro, False) for more in GROUPED for micro in (1, 3)),
    *((("parallel=fsdp",), micro, False) for micro in (1, 3)),
    *((("parallel=fsdp", "parallel.reshard_after_forward=false"), micro, False) for micro in (1, 3)),
    *((("parallel=fsdp", f"parallel.prefetch={ahead}"), 1, False) for ahead in (0, 1, 2)),
    (("parallel=zero1",), 3, True),
]
FOUR_RANKS: list[Request] = [
    *(((f"parallel={strategy}", *HYBRID), 2, False) for strategy in ("zero1", "zero2", "fsdp")),
    (("parallel=zero1", *HYBRID), 3, True),
]


def _steps_of_all(world: World, requests: list[Request]) -> dict[Request, list[Call]]:
    return {
        (overrides, micro, measure): _step(world, _config(*overrides), micro, measure)
        for overrides, micro, measure in requests
    }


@cache
def _start(ranks: int) -> dict[Request, list[Call]]:
    """Map each request to what rank 0 sends for it. One start of the ranks serves all requests."""
    requests = FOUR_RANKS if ranks == 4 else TWO_RANKS
    seen = run_ranks(_steps_of_all, ranks, requests, parallel=_config(*requests[0][0]).parallel)
    assert all(rank == seen[0] for rank in seen)
    return seen[0]


def _calls(ranks: int, *overrides: str, micro: int, measure: bool = False) -> list[Call]:
    return _start(ranks)[overrides, micro, measure]


def _volume(calls: Iterable[Call], *names: str) -> float:
    """In parameters."""
    return sum(call.bytes for call in calls if call.name in names) / FLOAT


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize(("more", "groups"), [(GROUPED[0], 1), (GROUPED[1], 3)])
def test_volume_of_a_step_is_that_of_the_stage(micro: int, more: tuple[str, ...], groups: int) -> None:
    everything, _ = _sizes()
    one = _calls(2, "parallel=zero1", *more, micro=micro)
    assert _volume(one, GATHER, SCATTER) == _volume(one, GATHER) * 2 == 2 * everything
    assert {call.micro for call in one if call.name == GATHER} == {1}
    assert {call.micro for call in one if call.name == SCATTER} == {micro}
    two = _calls(2, "parallel=zero2", *more, micro=micro)
    assert _volume(two, GATHER) == everything
    assert _volume(two, GATHER, SCATTER) == (1 + micro) * everything
    assert len([call for call in one if call.name == GATHER]) == groups, "two blocks, one, and the rest"
    assert {call.name for call in [*one, *two]} == {GATHER, SCATTER}


@pytest.mark.parametrize("micro", [1, 3])
def test_volume_of_zero3(micro: int) -> None:
    everything, blocks = _sizes()
    calls = _calls(2, "parallel=fsdp", micro=micro)
    assert _volume(calls, GATHER) == micro * (everything + blocks), "what is in no block is gathered once"
    assert _volume(calls, SCATTER) == micro * everything
    kept = _calls(2, "parallel=fsdp", "parallel.reshard_after_forward=false", micro=micro)
    assert _volume(kept, GATHER) == _volume(kept, SCATTER) == micro * everything


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp"])
def test_replicas_reduce_a_shard_once_a_step(strategy: str) -> None:
    calls = _calls(4, f"parallel={strategy}", *HYBRID, micro=2)
    reduced = [call for call in calls if call.name == REDUCE]
    assert {call.micro for call in reduced} == {2}
    assert _volume(reduced, REDUCE) == _sizes()[0] / 2


@pytest.mark.parametrize("more", [(), HYBRID], ids=["shards", "replicas"])
def test_a_first_micro_batch_that_is_measured_is_reduced_too(more: tuple[str, ...]) -> None:
    calls = _calls(4 if more else 2, "parallel=zero1", *more, micro=3, measure=True)
    assert [call.micro for call in calls if call.name == SCATTER] == [1, 3]
    assert [call.micro for call in calls if call.name == REDUCE] == ([1, 3] if more else [])


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_prefetch_gathers_that_many_blocks_ahead(ahead: int) -> None:
    backward = [call.name for call in _calls(2, "parallel=fsdp", f"parallel.prefetch={ahead}", micro=1)][4:]
    # Of backward: what is gathered before the gradients of the last, the middle, the first block and the rest go out.
    before = [{0: 1, 1: 2, 2: 3}[ahead], {0: 1, 1: 1, 2: 0}[ahead], {0: 1, 1: 0, 2: 0}[ahead], 0]
    assert backward == [name for gathers in before for name in [*[GATHER] * gathers, SCATTER]]


@dataclass(frozen=True)
class Held:
    """Bytes that a rank holds."""

    shards: int
    gathered: int
    gradients: int
    optimizer: int


def _held(engine: Engine, optimizer: torch.optim.Optimizer) -> Held:
    shards = [p for group in optimizer.param_groups for p in group["params"]]
    shown = [p for p in engine.parts[0].parameters() if not isinstance(p, DTensor)]
    gradients = [p.grad for p in [*shards, *shown] if p.grad is not None]
    states = [value for p in shards for value in optimizer.state[p].values() if value.shape == p.shape]
    return Held(*(_storages(tensors) for tensors in (shards, shown, gradients, states)))


def _storages(tensors: Iterable[Tensor]) -> int:
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in local)}
    return sum(storages.values())


@cache
def _memory_of_all(ranks: int) -> list[dict[str, dict[str, Held]]]:
    """Map each strategy to what its ranks hold."""
    configs = {strategy: _config(f"parallel={strategy}") for strategy in FORMULAS}

    def measure(world: World) -> dict[str, dict[str, Held]]:
        return {strategy: _memory(world, config) for strategy, config in configs.items()}

    return run_ranks(measure, ranks, parallel=configs["zero1"].parallel)


def _memory(world: World, config: RunConfig) -> dict[str, Held]:
    """Between steps, after the first of two backwards, and after the second."""
    made: list[torch.optim.Optimizer] = []

    def make(split: nn.Module) -> torch.optim.Optimizer:
        made.append(make_optimizer(split, config.optim))
        return made[0]

    with torch.device("meta"):
        module = build_model(EVEN())
    engine = build(module, make, config, world)
    seen: list[Held] = []

    def look(*_: Any) -> None:
        seen.append(_held(engine, made[0]))

    engine.parts[0].register_forward_pre_hook(look, prepend=True)  # before the gather of fully_shard
    engine.forward_backward(_batch(world, 2))
    after = _held(engine, made[0])
    engine.update(1e-3)
    assert seen[0] == _held(engine, made[0]), "a step leaves nothing behind"
    return {"between steps": seen[0], "between micro-batches": seen[1], "end of backward": after}


FORMULAS = {
    # What a rank holds between two micro-batches, as multiples of the bytes of the parameters over N ranks; the paper's
    # optimizer state has the master copy of the parameters in it, which is the shard here.
    "zero1": lambda n: Held(shards=1 / n, gathered=1, gradients=1, optimizer=2 / n),
    "zero2": lambda n: Held(shards=1 / n, gathered=1, gradients=1 / n, optimizer=2 / n),
    "fsdp": lambda n: Held(shards=1 / n, gathered=0, gradients=1 / n, optimizer=2 / n),
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("strategy", FORMULAS)
def test_memory_of_a_rank_is_that_of_the_paper(strategy: str, ranks: int) -> None:
    whole_bytes = FLOAT * _sizes()[0]
    for rank in (held[strategy] for held in _memory_of_all(ranks)):
        formula = FORMULAS[strategy](ranks)
        wanted = Held(*(round(share * whole_bytes) for share in vars(formula).values()))
        assert rank["between micro-batches"] == wanted
        assert rank["between steps"] == Held(wanted.shards, 0, 0, wanted.optimizer)
        assert rank["end of backward"] == Held(wanted.shards, 0, wanted.shards, wanted.optimizer)


def _gathered_in_blocks(world: World, config: RunConfig) -> list[int]:
    engine = _engine(config, world)
    seen: list[int] = []

    def look(*_: Any) -> None:
        seen.append(_storages(p for p in engine.parts[0].parameters() if not isinstance(p, DTensor)))

    for block in engine.parts[0].blocks().values():
        block.register_forward_hook(look, prepend=True)  # before fully_shard frees what it gathered
    engine.forward_backward(_batch(world, 1))
    return seen


def test_zero3_holds_one_block_at_a_time_and_zero2_all_of_them() -> None:
    everything, blocks = (FLOAT * size for size in _sizes())
    rest = everything - blocks
    config = _config("parallel=fsdp")
    assert run_ranks(_gathered_in_blocks, 2, config, parallel=config.parallel)[0] == [rest + blocks // 3] * 3
    config = _config("parallel=zero2")
    assert run_ranks(_gathered_in_blocks, 2, config, parallel=config.parallel)[0] == [everything] * 3


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("parallel=fsdp", "parallel.bucket_mib=4"), "parallel.bucket_mib=4: zero3 gathers and reduces block by block"),
        (("parallel=zero1", "parallel.reshard_after_forward=false"), "belongs to zero3, not to zero1, which frees"),
        (("parallel=ddp", "parallel.reshard_after_forward=false"), "belongs to zero3, not to ddp"),
        (("parallel=ddp", "parallel.prefetch=2"), "parallel.prefetch=2: ddp gathers nothing"),
        (("parallel=zero2", "parallel.prefetch=0"), "parallel.prefetch=0: is about gathering in backward"),
    ],
)
def test_an_option_of_another_strategy_is_refused(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        check_support(_config(*overrides), 2)
    assert "\n" not in str(caught.value)


def _refusal(world: World, config: RunConfig) -> str:
    with pytest.raises(UserError) as caught:
        engine_of("bare", config, world)
    return str(caught.value)


def test_a_prefetch_that_finds_no_block_is_an_error() -> None:
    layout = Layout(2, ("parallel=fsdp", "parallel.prefetch=2"))
    config = layout.config()
    said, _ = run_ranks(_refusal, 2, config, parallel=config.parallel)
    assert said.startswith("parallel.prefetch=2: Bare is one group, nothing can be gathered ahead")
