"""Pipeline parallelism: every schedule gives one process's numbers; what is sent, what is refused, what is recorded."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining  # imported once here and not by every forked rank
from drawn import draw, runs_long_tests
from matrix import LENGTH, SEQUENCES, STEPS, VOCABULARY, Case, fresh, global_batch, model, resume, share, steps, truth
from outcome import Outcome, assert_close, whole
from recorder import REDUCE, SCATTER, Recorder
from torch import nn
from torch.distributed.tensor import DTensor

from hpc_train.checkpoint import save_step
from hpc_train.config.parallel import SCHEDULES
from hpc_train.config.run import RunConfig
from hpc_train.interfaces import IGNORED_TARGET, Engine, Model, World
from hpc_train.models.registry import build_model as build_model
from hpc_train.parallel.apply import build
from hpc_train.parallel.engines.pipeline_engine import PipelineEngine
from hpc_train.parallel.pipeline.measurement import TimelineEvent, measure_bubble
from hpc_train.schedules.generate import generate_order
from hpc_train.testing import RankFailure, run_ranks
from hpc_train.training.optimizer import make_optimizer

TOLERANCE = 1e-10
FSDP = ("parallel=fsdp", "parallel.dp_shard=2")
KEPT = "parallel.reshard_after_forward=false"
CSV = "0F0,0F1,0I0,0F2,0B1,0W0,0F3,0B3,0B2\n1F0,1I0,1F1,1W0,1B1,1F2,1F3,1B3,1B2\n"
"""An order that no schedule with a name has: 4 micro-batches over 2 ranks, one of them with a split backward."""


def _case(schedule: str, *more: str, ranks: int = 2, pp: int = 2, kind: str = "tied", micro: int = 3) -> Case:
    return Case(ranks, (f"parallel.pp={pp}", f"parallel.pipeline.schedule={schedule}", *more), kind, micro)


def _starts(csv: Path) -> dict[str, dict[str, Case]]:
    """By start of ranks, and within it by name. 16 sequences in parts of 3: the last micro-batch has one."""
    virtual = "parallel.pipeline.virtual_stages="
    return {
        "pp2": {
            **{name: _case(name) for name in SCHEDULES},
            "csv": _case(str(csv), kind="gpt2", micro=4),
            "uneven": _case("gpipe", "parallel.pipeline.costs=[0,3,1,1,1,0]", kind="gpt2"),
            "four-virtual": _case("looped_bfs", virtual + "4", kind="deep"),
            "zero-bubble-h1": _case("interleaved_zero_bubble", virtual + "1", kind="vit"),
            "few": _case("zbv", kind="gpt2", micro=16),
            "empty-micro-batches": _case("zbv", kind="llama", micro=1),
        },
        "pp4": {
            **{name: _case(name, ranks=4, pp=4, kind="deep") for name in ("1f1b", "interleaved_1f1b", "zbv")},
            "dualpipev": _case("dualpipev", ranks=4, pp=4, kind="deep", micro=2),
        },
        "pp2-sharded": {
            **{name: _case(name, *FSDP, ranks=4) for name in SCHEDULES if name not in ("1f1b", "dualpipev")},
            "1f1b": _case("1f1b", *FSDP, ranks=4, kind="vit"),
            "dualpipev": _case("dualpipev", *FSDP, ranks=4, micro=2, kind="gpt2"),
            "kept": _case("naive", *FSDP, KEPT, ranks=4, kind="gpt2"),
            "kept, split": _case("zbv", *FSDP, KEPT, ranks=4),
            "zero2": _case("interleaved_1f1b", "parallel=zero2", "parallel.dp_shard=2", ranks=4, kind="gpt2"),
            "zero2, split": _case("interleaved_zero_bubble", "parallel=zero2", "parallel.dp_shard=2", ranks=4),
            "zero1, split": _case("dualpipev", "parallel=zero1", "parallel.dp_shard=2", ranks=4, micro=2),
            "far ahead": _case("zbv", *FSDP, "parallel.prefetch=3", ranks=4),
            "nothing ahead": _case("interleaved_zero_bubble", *FSDP, "parallel.prefetch=0", ranks=4),
        },
        "pp2-copied": {  # the last micro-batch reduces a shard's gradients over the copies
            name: _case(name, "parallel=hsdp", "parallel.dp_replicate=2", "parallel.dp_shard=2", ranks=8, micro=1)
            for name in ("1f1b", "zbv")
        },
    }


DRAWN = {
    "pp2": (*SCHEDULES, "csv", "uneven", "four-virtual", "empty-micro-batches"),
    "pp4": ("zbv",),
    "pp2-sharded": ("1f1b", "zbv", "zero2, split", "zero1, split"),
    "pp2-copied": ("zbv",),
}
"""Every schedule once, every kind of stages, and every strategy with a split backward and without."""


def _list_names() -> list[Any]:
    return [
        pytest.param(start, name, marks=() if name in DRAWN[start] else pytest.mark.long)
        for start, cases in _starts(Path("x.csv")).items()
        for name in cases
    ]


@dataclass
class Seen:
    """What one rank saw of one case."""

    trained: Outcome
    before: float
    """Loss of an evaluation of the first batch before any training."""
    after: float
    """The same after it."""
    training: bool
    """Whether what the evaluation left behind is as it was."""


def _see(world: World, cases: dict[str, Case]) -> dict[str, Seen]:
    return {name: _see_one(world, case) for name, case in cases.items()}


def _see_one(world: World, case: Case) -> Seen:
    engine = fresh(case, world)
    off = engine.parts[0].get_submodule("layers").eval()
    before = _evaluated(engine, case, world)
    trained = steps(engine, case, world, STEPS)
    after = _evaluated(engine, case, world)
    modules = [module for part in engine.parts for module in part.modules()]
    kept = {id(module) for module in off.modules()}
    as_before = all(module.training == (id(module) not in kept) for module in modules)
    held = all(isinstance(p, DTensor) and p.grad is None for part in engine.parts for p in part.parameters())
    return Seen(trained, before, after, as_before and held)


def _evaluated(engine: Engine, case: Case, world: World) -> float:
    sums = engine.evaluate(share(global_batch(case.kind, 0), world, case.micro))
    return float(sums.loss) / sums.tokens


@pytest.fixture(scope="module")
def csv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("schedules") / "own.csv"
    path.write_text(CSV)
    return path


@pytest.fixture(scope="module")
def seen(csv: Path, request: pytest.FixtureRequest) -> dict[str, list[dict[str, Seen]]]:
    """What each rank saw, by start; a start serves all of its cases."""
    found, long = {}, runs_long_tests(request.session)
    for start, every in _starts(csv).items():
        cases = {name: case for name, case in every.items() if long or name in DRAWN[start]}
        first = next(iter(cases.values()))
        found[start] = run_ranks(_see, first.ranks, cases, parallel=first.config().parallel)
    return found


@cache
def _truth(kind: str) -> Outcome:
    return truth(kind)[0]


@cache
def _untrained_loss(kind: str) -> float:
    batch = global_batch(kind, 0)
    logits = model(kind)(batch.inputs).flatten(0, -2)
    return nn.functional.cross_entropy(logits, batch.targets.flatten(), ignore_index=IGNORED_TARGET).item()


@pytest.mark.parametrize(("start", "name"), _list_names())
def test_every_schedule_gives_the_numbers_of_one_process(
    seen: dict[str, list[dict[str, Seen]]], csv: Path, start: str, name: str
) -> None:
    ranks, kind = [rank[name] for rank in seen[start]], _starts(csv)[start][name].kind
    wanted = _truth(kind)
    for rank in ranks:
        np.testing.assert_allclose(rank.trained.losses, wanted.losses, rtol=TOLERANCE)
        np.testing.assert_allclose(rank.trained.norms, wanted.norms, rtol=TOLERANCE)
        np.testing.assert_allclose(rank.before, _untrained_loss(kind), rtol=TOLERANCE)
        assert rank.after < rank.before
        assert rank.after == ranks[0].after
        assert rank.training
    for step in STEPS:
        gradients = whole([rank.trained.gradients[step] for rank in ranks])
        assert_close(gradients, whole([wanted.gradients[step]]), TOLERANCE)
    assert_close(whole([rank.trained.state for rank in ranks]), whole([wanted.state]), TOLERANCE)


def test_a_tied_embedding_is_written_once(seen: dict[str, list[dict[str, Seen]]]) -> None:
    for name in ("1f1b", "zbv"):
        state = [piece for rank in seen["pp2"] for piece in rank[name].trained.state]
        for tensor in ("embed.weight", "optim.exp_avg.embed.weight"):
            assert sorted(piece.replica for piece in state if piece.name == tensor) == [0, 1]


def _save_and_resume(world: World, case: Case, other: Case, folder: Path) -> Outcome:
    """Two steps in one layout, and one more in another."""
    engine = fresh(case, world)
    steps(engine, case, world, STEPS)
    save_step(folder, len(STEPS), engine.shards(), {}, world).wait()
    return resume(world, other, folder)


def test_a_run_goes_on_in_other_stages(tmp_path: Path) -> None:
    first, second = _case("zbv"), _case("1f1b", "parallel.pipeline.costs=[0,1,1,1,5,0]", micro=2)
    wanted = truth("tied")[1]
    ranks = run_ranks(_save_and_resume, 2, first, second, tmp_path, parallel=first.config().parallel)
    alone = Case(1, (), "tied", micro=16)
    for outcomes in (ranks, run_ranks(resume, 1, alone, tmp_path, parallel=alone.config().parallel)):
        assert_close(whole([rank.state for rank in outcomes]), whole([wanted.state]), TOLERANCE)


TRAFFIC = [("zero1", "1f1b"), ("zero2", "zbv"), ("zero3", "1f1b"), ("zero3", "zbv")]


@cache
def _traffic_of_all() -> list[list[dict[str, int]]]:
    """Bytes by name, of each rank in each case of TRAFFIC; one start of the ranks serves all cases."""
    cases = [
        _case(schedule, f"parallel={strategy}", "parallel.dp_shard=2", ranks=4, micro=2)
        for strategy, schedule in TRAFFIC
    ]
    return run_ranks(lambda world: [_traffic(world, case) for case in cases], 4, parallel=cases[0].config().parallel)


def _traffic(world: World, case: Case) -> dict[str, int]:
    engine = fresh(case, world)
    batch = share(global_batch(case.kind, 0), world, case.micro)
    engine.forward_backward(batch)
    engine.update(0.0)
    with Recorder(engine) as recorder:
        engine.forward_backward(batch)
    names = {call.name for call in recorder.calls}
    return {name: sum(call.bytes for call in recorder.calls if call.name == name) for name in names}


@pytest.mark.parametrize(("strategy", "schedule"), TRAFFIC)
def test_ranks_send_hidden_states_once_each_way_and_reduce_gradients(schedule: str, strategy: str) -> None:
    """A pipeline of S stages moves 2 n (S - 1) B T hidden, less within a rank, and reduces tied gradients once.

    zero1 reduces a gradient once per step, zero2 and zero3 in every micro-batch.
    """
    ranks = [rank[TRAFFIC.index((strategy, schedule))] for rank in _traffic_of_all()]
    whole_model, sent = model("tied"), [rank["send"] for rank in ranks]
    hidden, micro_batches = 8 * 2 * LENGTH * 32, SEQUENCES // 2 // 2
    crossings = 2 if schedule == "zbv" else 1  # stages 1 and 2 of the V are on one rank
    tied = 0 if schedule == "zbv" else 2 * 8 * (VOCABULARY + 1) // 2 * 32
    pairs = (sent[0] + sent[2], sent[1] + sent[3])  # ranks 0 and 2 are one pipeline, with rows 0 to 14 of the embedding
    assert pairs[0] == 2 * micro_batches * crossings * hidden + tied
    assert pairs[1] == pairs[0] - (tied and 2 * 8 * 32)  # rows 15 to 28
    owned = sum(parameter.nbytes for parameter in whole_model.parameters())
    padded = owned + whole_model.get_parameter("embed.weight").nbytes  # both copies of it
    scattered = sum(rank[SCATTER] for rank in ranks) / 2 / (1 if strategy == "zero1" else micro_batches)
    assert padded <= scattered <= padded * 1.05, "each parameter padded to an even number of rows"
    assert all(rank.get(REDUCE, 0) == 0 for rank in ranks)


def _half_frozen(world: World, config: RunConfig) -> None:
    whole_model = model("llama")
    for name in ("embed", "layers.0", "layers.1"):
        whole_model.get_submodule(name).requires_grad_(False)
    build(whole_model, lambda split: make_optimizer(split, config.optim), config, world)


def test_a_stage_with_nothing_to_train_is_refused_on_every_rank() -> None:
    config = _case("1f1b", kind="llama").config()
    with pytest.raises(RankFailure, match=r"UserError: parallel.pp: no parameter of stage 0 requires a gradient"):
        run_ranks(_half_frozen, 2, config, parallel=config.parallel)


def _recorded(world: World, case: Case, run_dir: Path) -> tuple[list[TimelineEvent], list[int]]:
    """What was recorded over more steps than are, and the blocks of each stage of this rank in a second attempt."""
    config = replace(case.config(), run_dir=str(run_dir))
    batch = share(global_batch(case.kind, 0), world, case.micro)

    def attempt() -> PipelineEngine:
        with torch.device("meta"):
            whole_model = build_model(config.model)
        engine = build(whole_model, lambda split: make_optimizer(split, config.optim), config, world)
        assert isinstance(engine, PipelineEngine)
        return engine

    engine = attempt()
    for _ in range(9):
        engine.evaluate(batch)
        engine.forward_backward(batch)
        engine.update(0.0)
    if world.rank == 0:
        _slow_first_block(run_dir / "stage_times.json")
    dist.barrier()
    return engine.timeline.events, [len(part.blocks()) for part in attempt().parts if isinstance(part, Model)]


def _slow_first_block(file: Path) -> None:
    """Pretend that a block was ten times as slow as all others together: what is really measured here is noise."""
    seconds = json.loads(file.read_text())
    assert seconds.keys() == {"before", "after", *(f"layers.{index}" for index in range(8))}
    assert min(seconds[f"layers.{index}"] for index in range(8)) > 0
    seconds["layers.0"] = 10 * sum(seconds.values())
    file.write_text(json.dumps(seconds))


@pytest.mark.parametrize("schedule", draw(["1f1b", "zbv"], ["zbv"]))
def test_what_a_run_records(schedule: str, tmp_path: Path) -> None:
    more = ("parallel.pipeline.timeline=true", "parallel.pipeline.resplit=true")
    case = _case(schedule, *more, kind="deep", micro=4)
    ranks = run_ranks(_recorded, 2, case, tmp_path, parallel=case.config().parallel)
    order, timelines = generate_order(schedule, 2, 4), [events for events, _ in ranks]
    for rank, events in enumerate(timelines):
        assert {event.step for event in events} == set(range(8)), "the first steps of a run, and no evaluation"
        computed = [event for event in events if event.kind != "L"]
        got = [f"{event.stage}{event.kind}{event.micro}" for event in computed if event.step == 3]
        assert got == [str(action) for action in order.actions(rank)]
        assert all(before.end <= after.start for before, after in pairwise(computed))
        written = json.loads((tmp_path / "timeline" / f"rank-{rank}.json").read_text())
        assert len(written["traceEvents"]) == len(events)
    assert all(0 < idle < 1 for idle in measure_bubble(timelines))
    assert ranks[0][1][0] == 1, "the stage of the slow block has no other"
    assert sum(sum(blocks) for _, blocks in ranks) == 8
