"""Tensor parallelism: as many calls and bytes as Megatron says, and no rank with all logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from matrix import LENGTH, MODELS, Case, fresh, global_batch
from recorder import GATHER, REDUCE, SCATTER, Recorder
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpc_train.config.model import TransformerConfig
from hpc_train.interfaces import StepBatch, World
from hpc_train.models.initial_values import initialise_parameters
from hpc_train.models.registry import build_model as build_model
from hpc_train.parallel.apply import build
from hpc_train.testing import run_ranks
from hpc_train.training.optimizer import make_optimizer

NO_SEQUENCE, NO_VOCABULARY = "parallel.tensor.sequence=false", "parallel.tensor.vocabulary=false"
TP2 = ("parallel.tp=2",)


def _one_step(world: World, case: Case) -> list[tuple[str, int]]:
    """Name and bytes of the collectives of a step with one micro-batch; not the first one, which also sets up."""
    engine, batch = fresh(case, world), StepBatch([global_batch(case.kind, 0)])
    engine.forward_backward(batch)
    engine.update(0.0)
    with Recorder(engine) as recorder:
        engine.forward_backward(batch)
    return [(call.name, call.bytes) for call in recorder.calls]


LAYERS = 4
ACTIVATIONS = 16 * LENGTH * 32 * 8
"""B T h in bytes of float64."""


def _count(options: tuple[str, ...]) -> dict[str, int]:
    case = Case(2, (*TP2, *options), "llama", 16)
    ranks = run_ranks(_one_step, 2, case, parallel=case.config().parallel)
    assert ranks[0] == ranks[1]
    names = [name for name, size in ranks[0] if size == ACTIVATIONS]
    return {name: names.count(name) for name in (GATHER, SCATTER, REDUCE)}


def test_split_positions_take_four_gathers_and_four_scatters_a_layer() -> None:
    embedding_and_head = 2
    calls = 4 * LAYERS + embedding_and_head
    assert _count(()) == {GATHER: calls, SCATTER: calls, REDUCE: 0}


def test_whole_positions_take_four_reductions_a_layer() -> None:
    embedding_and_head = 2
    assert _count((NO_SEQUENCE,)) == {GATHER: 0, SCATTER: 0, REDUCE: 4 * LAYERS + embedding_and_head}


def test_a_whole_vocabulary_takes_no_sum_of_activations_at_the_ends() -> None:
    assert _count((NO_SEQUENCE, NO_VOCABULARY)) == {GATHER: 0, SCATTER: 0, REDUCE: 4 * LAYERS}
    assert _count((NO_VOCABULARY,)) == {GATHER: 4 * LAYERS + 2, SCATTER: 4 * LAYERS, REDUCE: 0}


WORDS = 301


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the result of every operation; keeps the largest of those that have a row for each token."""

    def __init__(self, tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tokens = tokens
        self.most: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) and not leaf.is_meta and leaf.ndim > 1:
                rows = leaf.numel() // max(1, leaf.shape[-1])
                self.most = max(self.most, leaf.shape[-1] if rows == self.tokens else 0)
        return out


def _widest(world: World, case: Case) -> int:
    """The most columns of any tensor that has a row for each token of a step, with a vocabulary of WORDS."""
    shape = MODELS[case.kind]
    assert isinstance(shape, TransformerConfig)
    source = build_model(replace(shape, vocab_size=WORDS)).double()
    initialise_parameters(source, 0)
    config, batch = case.config(), StepBatch([global_batch(case.kind, 0)])
    engine = build(source, lambda part: make_optimizer(part, config.optim), config, world)
    with _Largest(tokens=16 * LENGTH) as largest:
        engine.forward_backward(batch)
    widest: int = largest.most
    return widest


@pytest.mark.parametrize(("options", "widest"), [((), [151, 150]), ((NO_VOCABULARY,), [WORDS, WORDS])])
def test_no_rank_ever_has_all_logits(options: tuple[str, ...], widest: list[int]) -> None:
    """Everything else in the model is narrower than half of them."""
    case = Case(2, (*TP2, *options), "tied", 16)
    assert run_ranks(_widest, 2, case, parallel=case.config().parallel) == widest
