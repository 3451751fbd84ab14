"""torch.compile of blocks: the numbers of one process, one graph a block, in every row of the table of techniques.

Takes minutes on a busy machine: a C++ compiler runs for each graph of the two cases that test generated code.
"""

from __future__ import annotations

import logging
import re
from functools import cache, partial
from typing import Any

import matrix
import numpy as np
import pytest
import torch
from drawn import draw
from matrix import Case
from outcome import Outcome, assert_close, engine_steps, reference, whole
from plain_setup import FEATURES, LAYOUTS, engine_of, global_batch, share
from test_matrix import assert_outcome
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor import cudagraph_trees

from hpc_train.config.compose import compose
from hpc_train.config.parallel import compute_smallest_world
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.models.layers import cross_entropy_sum
from hpc_train.parallel.apply import build
from hpc_train.parallel.memory.compilation import (
    begin_replays,
    check_compiler,
    check_graph_device,
    report_fallbacks,
)
from hpc_train.parallel.rules.check import check_support
from hpc_train.parallel.rules.support_rows.technique import EXACT, Technique
from hpc_train.parallel.rules.support_table import SUPPORT_TABLE
from hpc_train.testing import run_ranks
from hpc_train.training.optimizer import make_optimizer

COMPILE = "parallel.compile=true"
SYNC = "parallel.sync_batchnorm=true"
FULL, SELECTIVE = "parallel.recompute.mode=full", "parallel.recompute.mode=selective"
OPTIM = ("optim.max_norm=0.05", "optim.eps=1e-6")
STEPS = (0, 1)
UNCOMPILED = "parallel.compile=true: a part of Block runs uncompiled: "


def _steps(world: World, config: RunConfig) -> tuple[Outcome, int, int]:
    """(what was trained, graphs that were compiled, places where a graph had to end)."""
    engine = engine_of("untied", config, world)
    outcome = engine_steps(engine, world, config, "untied", "two", STEPS)
    return outcome, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        pytest.param("zero3-2", (), marks=pytest.mark.long),
        pytest.param("ddp-2", (FULL,), marks=pytest.mark.long),
        ("ddp-1", (FULL,)),
    ],
    ids=["zero3", "ddp-recompute", "one-recompute"],
)
def test_compiled_blocks_give_the_numbers_of_one_process(
    layout: str, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no worker processes under a rank
    config = LAYOUTS[layout].config(COMPILE, *OPTIM, *more)
    # Without it three files are compiled first, to see whether the compiler knows what /proc/cpuinfo says of vectors.
    # Not by monkeypatch, which would leave the setting unreadable.
    with inductor_config.patch({"cpp.vec_isa_ok": True}):
        ranks = run_ranks(_steps, LAYOUTS[layout].ranks, config, parallel=config.parallel, timeout=400)
    truth = reference("untied", LAYOUTS["ddp-1"].config(*OPTIM), STEPS)
    for outcome, graphs, breaks in ranks:
        np.testing.assert_allclose(outcome.losses, truth.losses, rtol=1e-10)
        np.testing.assert_allclose(outcome.norms, truth.norms, rtol=1e-10)
        assert (graphs, breaks) == (1, 0), "both blocks run the same compiled code, with nothing outside of it"
    assert_close(whole([outcome.state for outcome, _, _ in ranks]), whole([truth.state]), 1e-10)


ASYNCHRONOUS = ("parallel.tp=2", "parallel.tensor.asynchronous=true")
ULYSSES = ("parallel.cp=2", "parallel.context.method=ulysses")
CASES = {
    "tp-full": Case(2, ("parallel.tp=2", FULL)),
    "tp-selective": Case(2, ("parallel.tp=2", SELECTIVE), "tied"),
    "tp-no-sequence-full": Case(2, ("parallel.tp=2", "parallel.tensor.sequence=false", FULL)),
    "tp-shared-heads-full": Case(2, ("parallel.tp=2", FULL), "grouped"),
    "tp-gpt2-every-2nd": Case(2, ("parallel.tp=2", FULL, "parallel.recompute.every=2"), "gpt2"),
    "tp-vit-full": Case(2, ("parallel.tp=2", FULL), "vit"),
    "asynchronous-full": Case(2, (*ASYNCHRONOUS, FULL)),
    "asynchronous-attention": Case(2, (*ASYNCHRONOUS, SELECTIVE, "parallel.recompute.keep=[attention]"), "gpt2"),
    "ring-full": Case(2, ("parallel.cp=2", FULL)),
    "ring-selective": Case(2, ("parallel.cp=2", SELECTIVE), "gpt2"),
    "ring-unbalanced-products": Case(
        2, ("parallel.cp=2", "parallel.context.balanced=false", SELECTIVE, "parallel.recompute.keep=[mm]")
    ),
    "ulysses-full": Case(2, (*ULYSSES, FULL)),
    "ulysses-selective": Case(2, (*ULYSSES, SELECTIVE)),
    "zero3-tp-full": Case(4, ("parallel=fsdp", "parallel.tp=2", FULL)),
    "pp-cp-selective": Case(4, ("parallel.pp=2", "parallel.cp=2", SELECTIVE)),
    "tp-cp-full": Case(4, ("parallel.tp=2", "parallel.cp=2", FULL)),
    "tp-dropout-full": Case(2, ("parallel.tp=2", FULL), "grouped-dropout"),
    "cp-dropout": Case(2, ("parallel.cp=2",), "llama-dropout"),
    "ulysses-dropout-full": Case(2, (*ULYSSES, FULL), "tied-dropout"),
    "pp-dropout": Case(2, ("parallel.pp=2",), "llama-dropout"),
    "windows-full": Case(2, ("parallel=fsdp", FULL), "windows"),
    "tp-capped-selective": Case(2, ("parallel.tp=2", SELECTIVE), "capped"),
    "tp-olmo-full": Case(2, ("parallel.tp=2", FULL), "olmo-grouped"),
    "tp-4-windows-olmo": Case(4, ("parallel.tp=4",), "olmo"),
    "ring-windows": Case(2, ("parallel.cp=2",), "windows"),
    "ring-capped": Case(2, ("parallel.cp=2",), "capped"),
}


@cache
def _truth(kind: str) -> Outcome:
    return matrix.truth(kind)[0]


def _compiled_steps(world: World, case: Case) -> tuple[Outcome, int, int]:
    """(two steps, graphs that were compiled, places where a graph had to end)."""
    outcome = matrix.steps(matrix.fresh(case, world), case, world, matrix.STEPS)
    return outcome, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def count_graphs(name: str) -> int:
    """Two where blocks differ: in whether they are computed again, or in whether they have a window."""
    return 2 if "every" in name or "windows" in name or "windows" in CASES[name].kind else 1


def _compile(case: Case, graphs: int = 1, most: int = 1, timeout: float = 280) -> list[Outcome]:
    """Train a case with compiled blocks, and count what was compiled: `graphs` graphs, or at most `most`.

    timeout: limit in seconds; a C++ compiler on a busy machine takes minutes.
    """
    case = Case(case.ranks, (*case.overrides, COMPILE), case.kind, case.micro)
    ranks = run_ranks(_compiled_steps, case.ranks, case, parallel=case.config().parallel, timeout=timeout)
    for _, compiled, breaks in ranks:
        assert graphs <= compiled <= max(graphs, most)
        assert breaks == 0
    return [outcome for outcome, _, _ in ranks]


@pytest.fixture
def graphs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs, and their gradients' graphs, are made as ever, but run by torch's own kernels: no C++ compiler runs."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    # Once, before ranks are forked, so that not each of them imports the compiler anew.
    torch.compile(torch.sin)(torch.ones(2, requires_grad=True)).sum().backward()
    counters.clear()


DRAWN = ("asynchronous-full",)


@pytest.mark.usefixtures("graphs_only")
@pytest.mark.parametrize("name", draw(CASES, DRAWN))
def test_recomputed_blocks_of_split_tensors_are_one_graph(name: str) -> None:
    case = CASES[name]
    # Every second block is recomputed, or has no window, which is another graph.
    graphs = count_graphs(name)
    assert_outcome(_compile(case, graphs), _truth(case.kind))


def _rows() -> list[Any]:
    """The techniques of our own models that run here: those of GPUs and of ranks that MPI starts change no block, and
    these models are too narrow for moments in 8 bits.
    """
    rows = [row for row in SUPPORT_TABLE if "MPI" not in row.needs and "GPUs;" not in row.needs and row.option != SYNC]
    rows = [row for row in rows if not row.option.startswith("model=hf ") and row.option != "optim.state=8bit"]
    large = {
        row.option for row in rows if compute_smallest_world(Case(2, tuple(row.option.split())).config().parallel) > 2
    }
    drawn = {row.option for row in rows if row.option not in large}
    drawn = set(sorted(drawn)[::18])
    return [pytest.param(row, id=row.option, marks=() if row.option in drawn else pytest.mark.long) for row in rows]


def _trains_otherwise(row: Technique) -> bool:
    """Whether a technique is exact, but does not train all parameters of the model by AdamW."""
    return row.option.startswith(("adapter=", "optim"))


def _without_compilation(case: Case) -> Outcome:
    """What the same layout gives, over all ranks."""
    ranks = run_ranks(_plain_steps, case.ranks, case, parallel=case.config().parallel)
    parts = [[held for rank in ranks for held in rank.gradients[step]] for step in range(len(matrix.STEPS))]
    return Outcome(ranks[0].losses, ranks[0].norms, parts, [held for rank in ranks for held in rank.state])


def _plain_steps(world: World, case: Case) -> Outcome:
    return matrix.steps(matrix.fresh(case, world), case, world, matrix.STEPS)


@pytest.mark.usefixtures("graphs_only")
@pytest.mark.parametrize("row", _rows())
def test_every_technique_of_the_table_compiles_to_one_graph_a_block(row: Technique) -> None:
    has_experts = "model=" in row.option
    case = Case(2, tuple(row.option.split()), "experts" if has_experts else "llama")
    config = case.config()
    ranks = max(2, compute_smallest_world(config.parallel))
    if "no compilation" in row.needs or has_experts:
        with pytest.raises(UserError, match=r"parallel\.compile=true"):
            check_support(Case(ranks, (*case.overrides, COMPILE), case.kind).config(), ranks)
        return
    more = ("precision=fp32",) if re.search("(no|not) precision=fp64", row.needs) else ()
    chosen = Case(ranks, (*case.overrides, *more), micro=2 if config.parallel.pp > 1 else 4)
    outcomes = _compile(chosen, most=4)  # the model has four blocks
    if row.numbers == EXACT:
        assert_outcome(outcomes, _without_compilation(chosen) if _trains_otherwise(row) else _truth("llama"))
    assert np.isfinite([outcome.losses for outcome in outcomes]).all()


class NormBlock(nn.Module):
    """A block with a BatchNorm layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, FEATURES) -> the same shape."""
        return x + torch.tanh(self.linear(self.norm(x)))


class NormModel(nn.Module):
    """Two such blocks and an output layer."""

    plan: dict[str, str] = {}

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([NormBlock(), NormBlock()])
        self.out = nn.Linear(FEATURES, 5)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, FEATURES) -> logits (B, 5)."""
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.out(x)
        return out

    def blocks(self) -> dict[str, nn.Module]:
        """By name."""
        return {f"layers.{index}": layer for index, layer in enumerate(self.layers)}

    def stage(self, names: list[str]) -> nn.Module:
        """Has no stages."""
        raise NotImplementedError

    def loss_sum(self, out: Tensor, target: Tensor) -> Tensor:
        """Cross entropy."""
        return cross_entropy_sum(out, target)


def _norm_steps(world: World, config: RunConfig) -> tuple[list[float], int, int]:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = NormModel()
    engine = build(model, lambda split: make_optimizer(split, config.optim), config, world)
    losses = []
    for step in STEPS:
        losses.append(float(engine.forward_backward(share(global_batch("bare", step), world)).loss))
        engine.clip(None)
        engine.update(1e-2)
    return losses, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.usefixtures("graphs_only")
def test_synchronised_batch_norm_compiles_to_one_graph_a_block() -> None:
    plain, compiled = (
        run_ranks(_norm_steps, 2, config, parallel=config.parallel)[0]
        for config in (LAYOUTS["ddp-2"].config(SYNC), LAYOUTS["ddp-2"].config(SYNC, COMPILE))
    )
    np.testing.assert_allclose(compiled[0], plain[0], rtol=1e-12)
    assert (compiled[1:], plain[1:]) == ((2, 0), (0, 0))


@pytest.mark.timeout(900)
@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_generated_code_gives_the_numbers_of_one_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    case = CASES[name]
    assert_outcome(_compile(case, count_graphs(name), timeout=840), _truth(case.kind))


def test_what_torch_does_not_compile_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x + len(repr(x.sum().item()))

    said: set[str] = set()
    blocks = [report_fallbacks("Block", torch.compile(forward, backend="eager"), said) for _ in range(2)]
    with caplog.at_level(logging.WARNING, logger="hpc_train"):
        for block in blocks:
            block(torch.ones(2))
    lines = [message for message in caplog.messages if message.startswith(UNCOMPILED)]
    assert len(lines) == 1
    assert "\n" not in lines[0]


def test_a_block_that_is_compiled_anew_too_often_is_said(caplog: pytest.LogCaptureFixture) -> None:
    block = report_fallbacks("Block", torch.compile(lambda x, word: x + len(word), backend="eager"), set())
    with caplog.at_level(logging.WARNING, logger="hpc_train"):
        for letter in "abcdefghijkl":
            block(torch.ones(2), letter)
    lines = [message for message in caplog.messages if message.startswith(UNCOMPILED)]
    assert len(lines) == 1
    assert "recompile" in lines[0]


def _refused(world: World, config: RunConfig) -> str:
    with pytest.raises(UserError) as caught:
        engine_of("bare", config, world)
    return str(caught.value)


def test_a_model_without_blocks_is_refused() -> None:
    said = run_ranks(_refused, 1, LAYOUTS["ddp-1"].config(COMPILE))[0]
    assert said.startswith("parallel.compile=true: Bare does not say what its blocks are")
    assert "\n" not in said


def test_no_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"parallel.compile=true: there is no C\+\+ compiler no-such-compiler here"):
        check_compiler(torch.device("cpu"))


GRAPHS = ("model=llama_tiny", "parallel.cuda_graphs=true", COMPILE)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ((*GRAPHS, "parallel.compile=false"), "records compiled blocks; set parallel.compile=true"),
        ((*GRAPHS, "parallel=fsdp"), "parallel.strategy=zero3 gathers parameters into other memory each time; use ddp"),
        ((*GRAPHS, "parallel.tp=2"), "parallel.tp=2 exchanges within blocks"),
        ((*GRAPHS, "parallel.recompute.offload=true"), "parallel.recompute.offload=true moves what a replay needs"),
        (
            (*GRAPHS, "train.global_batch=16", "train.micro_batch=2"),
            "the 4 micro-batches of a step would write their gradients into the same memory; use train.micro_batch=8",
        ),
    ],
)
def test_graphs_are_refused_where_a_replay_would_be_wrong(overrides: tuple[str, ...], says: str) -> None:
    with pytest.raises(UserError) as caught:
        check_support(compose(overrides), 2)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_graphs_need_a_gpu_and_a_micro_batch_of_the_whole_share() -> None:
    config = compose((*GRAPHS, "train.global_batch=16", "train.micro_batch=8"))
    check_support(config, 2)
    with pytest.raises(UserError, match=r"parallel.cuda_graphs=true: this rank computes on a CPU; leave it out"):
        check_graph_device(torch.device("cpu"))


def test_torch_is_told_where_a_forward_begins() -> None:
    """torch counts the marks down; without them it would guess which results of replays are still needed."""
    before = cudagraph_trees.MarkStepBox.mark_step_counter
    begin_replays()
    assert cudagraph_trees.MarkStepBox.mark_step_counter == before - 1
