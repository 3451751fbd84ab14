"""Asynchronous tensor parallelism: the products of the whole tensors, in both directions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from drawn import draw
from matrix import LENGTH, MODELS, STEPS, Case, fresh, global_batch, share, steps, truth
from outcome import Outcome, assert_close, whole
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpc_train.config.compose import compose
from hpc_train.config.parallel import ParallelConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.parallel.rules.check import check_support
from hpc_train.parallel.tensor.ring_exchange import MatmulRing
from hpc_train.parallel.tensor.ring_matmul import gather_matmul, matmul_scatter
from hpc_train.parallel.tensor.symmetric_matmul import (
    check_symmetric_memory,
    gather_matmul_symmetric,
    matmul_scatter_symmetric,
)
from hpc_train.planner.plan import plan_overrides
from hpc_train.testing import run_ranks

POSITIONS, HIDDEN = 24, 5
WIDTHS = (8, 12)
RANKS = (2, 3, 4)
CHUNKS = {"whole": 1 << 18, "chunks": 1}


@dataclass(frozen=True)
class Shape:
    """What the ring products are tried on."""

    batch: int
    chunk_bytes: int
    dtype: torch.dtype = torch.float64
    symmetric: bool = False
    """By torch's operators of symmetric memory, of which a CPU has the fallback."""


def _draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _own(tensor: Tensor, dim: int, world: World) -> Tensor:
    """This rank's share, a leaf that wants a gradient."""
    return tensor.chunk(world.size, dim)[world.rank].clone().requires_grad_()


def _ring(world: World, shape: Shape) -> MatmulRing:
    return MatmulRing(world.mesh["tp"].get_group(), shape.chunk_bytes)


def _error(got: Tensor | None, wanted: Tensor | None) -> float:
    assert got is not None
    assert wanted is not None
    return float((got.double() - wanted).norm() / wanted.norm())


def _gather_errors(world: World, shape: Shape) -> dict[str, float]:
    """Relative errors of the column-parallel side against products of the whole tensors."""
    x = _draw(0, shape.batch, POSITIONS, HIDDEN).to(shape.dtype)
    weights = [_draw(1 + i, width * world.size, HIDDEN).to(shape.dtype) for i, width in enumerate(WIDTHS)]
    cotangents = [_draw(9 + i, shape.batch, POSITIONS, len(weight)).to(shape.dtype) for i, weight in enumerate(weights)]
    own_x, own = _own(x, 1, world), [_own(weight, 0, world) for weight in weights]
    if shape.symmetric:
        got = gather_matmul_symmetric(own_x, own, world.mesh["tp"].get_group().group_name)
    else:
        got = gather_matmul(own_x, own, _ring(world, shape))
    torch.autograd.backward(got, [c.chunk(world.size, 2)[world.rank] for c in cotangents])

    x, *weights = (tensor.double().requires_grad_() for tensor in (x, *weights))
    wanted = [x @ weight.t() for weight in weights]
    torch.autograd.backward(wanted, [c.double() for c in cotangents])
    assert x.grad is not None
    errors = {"x": _error(own_x.grad, x.grad.chunk(world.size, 1)[world.rank])}
    for i, weight in enumerate(weights):
        assert weight.grad is not None
        errors[f"output {i}"] = _error(got[i], wanted[i].chunk(world.size, 2)[world.rank])
        errors[f"weight {i}"] = _error(own[i].grad, weight.grad.chunk(world.size, 0)[world.rank])
    return errors


def _scatter_errors(world: World, shape: Shape) -> dict[str, float]:
    """The same of the row-parallel side."""
    x = _draw(0, shape.batch, POSITIONS, 7 * world.size).to(shape.dtype)
    weight = _draw(1, HIDDEN, 7 * world.size).to(shape.dtype)
    cotangent = _draw(2, shape.batch, POSITIONS, HIDDEN).to(shape.dtype)
    own_x, own = _own(x, 2, world), _own(weight, 1, world)
    if shape.symmetric:
        got = matmul_scatter_symmetric(own_x, own, world.mesh["tp"].get_group().group_name)
    else:
        got = matmul_scatter(own_x, own, _ring(world, shape))
    got.backward(cotangent.chunk(world.size, 1)[world.rank])

    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    wanted = x @ weight.t()
    wanted.backward(cotangent.double())
    assert x.grad is not None
    assert weight.grad is not None
    return {
        "output": _error(got, wanted.chunk(world.size, 1)[world.rank]),
        "x": _error(own_x.grad, x.grad.chunk(world.size, 2)[world.rank]),
        "weight": _error(own.grad, weight.grad.chunk(world.size, 1)[world.rank]),
    }


SHAPES = [Shape(batch, size) for batch, size in product((1, 2, 3), CHUNKS.values())]
SHAPES += [Shape(batch, 1, symmetric=True) for batch in (1, 2, 3)]
SIDES: dict[str, Callable[[World, Shape], dict[str, float]]] = {"gather": _gather_errors, "scatter": _scatter_errors}


def _all_errors(world: World) -> dict[tuple[str, Shape], dict[str, float]]:
    shapes = [*SHAPES, Shape(2, 1, torch.float32), Shape(2, 1, torch.bfloat16)]
    return {(side, shape): errors(world, shape) for side, errors in SIDES.items() for shape in shapes}


@pytest.mark.parametrize("ranks", RANKS)
def test_ring_products_are_those_of_the_whole_tensors_forward_and_backward(ranks: int) -> None:
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
    found = run_ranks(_all_errors, ranks, parallel=ParallelConfig(tp=ranks))
    for rank, (side, shape) in product(range(ranks), found[0]):
        for name, error in found[rank][side, shape].items():
            assert error < tolerance[shape.dtype], f"rank {rank} of {ranks}, {side}, {shape}: {name} is off by {error}"


class Traffic(TorchDispatchMode):
    """Bytes of each message that this rank sends to another, and of each collective it takes part in."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[int] = []
        self.collectives: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" and name != "recv_":
            seen = self.messages if name == "send" else self.collectives
            seen.append(max(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, Tensor)))
        return func(*args, **(kwargs or {}))


def _sent(world: World) -> dict[str, list[int]]:
    """Messages of each direction of each side."""
    ring = MatmulRing(world.mesh["tp"].get_group(), chunk_bytes=1)
    x = _draw(0, 2, POSITIONS // world.size, HIDDEN).requires_grad_()
    weights = [_draw(1, width, HIDDEN).requires_grad_() for width in WIDTHS]
    back = _draw(2, HIDDEN, WIDTHS[0]).requires_grad_()
    sent = {}
    with Traffic() as traffic:
        outputs = gather_matmul(x, weights, ring)
        sent["gather"], traffic.messages = traffic.messages, []
        total = matmul_scatter(outputs[0], back, ring)
        sent["scatter"], traffic.messages = traffic.messages, []
        (total.sum() + outputs[1].sum()).backward()
        sent["backward"] = traffic.messages
    assert traffic.collectives == []
    return sent


@pytest.mark.parametrize("ranks", RANKS)
def test_each_direction_sends_one_shard_less_than_there_are_ranks_in_chunks(ranks: int) -> None:
    shard = 2 * POSITIONS // ranks * HIDDEN * 8
    for sent in run_ranks(_sent, ranks, parallel=ParallelConfig(tp=ranks)):
        assert sum(sent["gather"]) == sum(sent["scatter"]) == (ranks - 1) * shard
        assert len(sent["gather"]) == len(sent["scatter"]) == (ranks - 1) * 4
        assert sum(sent["backward"]) == 2 * (ranks - 1) * shard, "one gather, and one scatter for all weights together"


def _frozen(world: World) -> dict[str, int]:
    """How much travels back where only some gradients are wanted, and whether those are right."""
    ring = MatmulRing(world.mesh["tp"].get_group())
    x = _draw(0, 1, POSITIONS // world.size, HIDDEN)
    frozen, trained = _draw(1, WIDTHS[0], HIDDEN), _draw(2, WIDTHS[0], HIDDEN).requires_grad_()
    sent = {}
    for name, own in (("input", x), ("weight", x.clone().requires_grad_())):
        outputs = gather_matmul(own, [frozen, trained], ring)
        with Traffic() as traffic:
            (outputs[0] + outputs[1]).sum().backward()
        sent[name] = sum(traffic.messages)
        assert (own.grad is None) == (name == "input")
    assert frozen.grad is None
    whole = torch.cat([x] * world.size, 1)
    torch.testing.assert_close(trained.grad, 2 * whole.sum(1).expand_as(trained), rtol=1e-12, atol=1e-12)
    row = _draw(3, HIDDEN, WIDTHS[0])
    activations = _draw(4, 1, POSITIONS, WIDTHS[0]).requires_grad_()
    matmul_scatter(activations, row, ring).sum().backward()
    torch.testing.assert_close(activations.grad, row.sum(0).expand_as(activations), rtol=1e-12, atol=1e-12)
    return sent


def test_a_gradient_that_nobody_wants_does_not_travel() -> None:
    for sent in run_ranks(_frozen, 2, parallel=ParallelConfig(tp=2)):
        assert sent == {"input": 0, "weight": POSITIONS // 2 * HIDDEN * 8}


ON = "parallel.tensor.asynchronous=true"
SHARDED = ("parallel=fsdp", "parallel.dp_shard=2", "parallel.tp=2", ON)
FULL = ("parallel.recompute.mode=full",)
KEEP_ATTENTION = ("parallel.recompute.mode=selective", "parallel.recompute.keep=[attention]")
CASES = {
    "tp2": [Case(2, ("parallel.tp=2", ON), "tied"), Case(2, ("parallel.tp=2", ON, *KEEP_ATTENTION))],
    "tp2, more": [Case(2, ("parallel.tp=2", ON), "gpt2"), Case(2, ("parallel.tp=2", ON, *FULL))],
    "tp4": [Case(4, ("parallel.tp=4", ON))],
    "zero3 x tp2": [Case(4, SHARDED, "llama", 3)],
    "zero3 x tp2, gpt2": [Case(4, SHARDED, "gpt2", 8)],
}
TOLERANCE = 1e-10


def _train_all(world: World, cases: list[Case]) -> list[Outcome]:
    return [steps(fresh(case, world), case, world, STEPS) for case in cases]


@cache
def _truth(kind: str) -> Outcome:
    return truth(kind)[0]


@pytest.mark.parametrize("layout", draw(CASES, ("zero3 x tp2",)))
def test_whole_models_give_the_numbers_of_one_process(layout: str) -> None:
    cases = CASES[layout]
    ranks = run_ranks(_train_all, cases[0].ranks, cases, parallel=cases[0].config().parallel)
    for case, outcomes in zip(cases, zip(*ranks, strict=True), strict=True):
        wanted = _truth(case.kind)
        for outcome in outcomes:
            np.testing.assert_allclose(outcome.losses, wanted.losses, rtol=TOLERANCE)
            np.testing.assert_allclose(outcome.norms, wanted.norms, rtol=TOLERANCE)
        for step in STEPS:
            found = whole([outcome.gradients[step] for outcome in outcomes])
            assert_close(found, whole([wanted.gradients[step]]), TOLERANCE)
        assert_close(whole([outcome.state for outcome in outcomes]), whole([wanted.state]), TOLERANCE)


def _traffic_of_a_step(world: World, case: Case) -> tuple[int, int]:
    """Bytes sent between layers, and collectives as large as hidden states, in the second step of training."""
    engine = fresh(case, world)
    batch = share(global_batch(case.kind, 0), world, case.micro)
    engine.forward_backward(batch)
    engine.update(0.0)
    with Traffic() as traffic:
        engine.forward_backward(batch)
    hidden_states = case.micro * LENGTH * case.config().model.hidden * 8
    return sum(traffic.messages), sum(size == hidden_states for size in traffic.collectives)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_every_layer_of_a_model_goes_round_the_ring_and_sends_what_collectives_would(ranks: int) -> None:
    case = Case(ranks, (f"parallel.tp={ranks}", ON))
    model = MODELS["llama"]
    hidden_states = 16 * LENGTH * model.hidden * 8
    exchanges = model.layers * 2 * 2 * 2  # a gather and a scatter, of attention and feed-forward, there and back
    for sent, collectives in run_ranks(_traffic_of_a_step, ranks, case, parallel=case.config().parallel):
        assert sent == exchanges * hidden_states * (ranks - 1) // ranks
        assert collectives == 4 * 16 // case.micro, "of each, the embedding's scatter and the head's gather, both ways"


ZBV = ("parallel.pp=2", "parallel.pipeline.schedule=zbv")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("parallel.tp=1",), "asynchronous=true: has no effect with parallel.tp=1"),
        (("parallel.tp=2", "parallel.tensor.sequence=false"), "use parallel.tensor.sequence=true"),
        (("parallel.tp=2", "model=vit_tiny"), "those of a vision transformer do not divide; leave it out"),
        (
            ("parallel.tp=2", "parallel.recompute.mode=selective"),
            "use parallel.recompute.keep=.attention., or mode=full",
        ),
        (("parallel.tp=2", *ZBV), "schedule=zbv asks for each by itself; use 1f1b or interleaved_1f1b"),
    ],
)
def test_what_does_not_go_with_it_is_refused_in_a_line(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=words) as refused:
        check_support(compose((*overrides, ON)), 4)
    assert "\n" not in str(refused.value)


SYMMETRIC = ("model=llama_tiny", "parallel.tp=2", "parallel.tensor.symmetric=true", "parallel.tensor.asynchronous=true")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ((*SYMMETRIC, "parallel.tensor.asynchronous=false"), "no effect without parallel.tensor.asynchronous=true"),
        ((*SYMMETRIC, "parallel.compile=true"), "is not combined with parallel.compile"),
        ((*SYMMETRIC, "parallel.tp=1", "parallel.tensor.asynchronous=false"), "has no effect with parallel.tp=1"),
        (
            (*SYMMETRIC, "cluster=dgx_h200", "parallel.tp=16", "model.heads=16", "model.kv_heads=16"),
            "parallel.tp=16 ranks do not fit into an NVLink domain of 8 GPUs",
        ),
    ],
)
def test_symmetric_memory_is_refused_where_there_is_none(overrides: tuple[str, ...], says: str) -> None:
    with pytest.raises(UserError) as caught:
        check_support(compose(overrides), 16)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_symmetric_memory_needs_a_gpu() -> None:
    with pytest.raises(UserError, match=r"parallel.tensor.symmetric=true: this rank computes on a CPU"):
        check_symmetric_memory(torch.device("cpu"))


def test_the_planner_is_not_asked_for_what_only_some_layouts_have() -> None:
    for key in ("parallel.tensor.symmetric", "parallel.cuda_graphs"):
        with pytest.raises(UserError, match=rf"{key}=true: is for .*; give that layout, or leave it out"):
            plan_overrides(("model=llama_7b", "cluster=dgx_h200", "cluster.nodes=1", f"{key}=true"))
