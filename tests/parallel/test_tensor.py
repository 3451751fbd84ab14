"""Tensor parallelism gives the numbers of one process, and its state moves into any other layout."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn import runs_long_tests
from matrix import STEPS, Case, fresh, global_batch, model, resume, steps, train_and_save, truth
from outcome import Held, Outcome, assert_close, held, whole
from torch import nn

from hpc_train.interfaces import StepBatch, World
from hpc_train.models.layers import cross_entropy_sum
from hpc_train.parallel.apply import build
from hpc_train.testing import run_ranks
from hpc_train.training.optimizer import make_optimizer, seed_step

TOLERANCE = 1e-10
NO_SEQUENCE, NO_VOCABULARY = "parallel.tensor.sequence=false", "parallel.tensor.vocabulary=false"
TP2, TP4 = ("parallel.tp=2",), ("parallel.tp=4",)
ZERO3 = ("parallel=fsdp", "parallel.tp=2", "parallel.dp_shard=2")
HSDP = ("parallel.tp=2", "parallel.dp_replicate=2")
MICRO = 10
"""The last micro-batch of a step is a shorter one, of 6 sequences."""
HALF = 5
"""The same for half of the sequences, of 3."""

LAYOUTS: dict[str, list[Case]] = {
    "tp2": [
        Case(2, TP2, "gpt2", MICRO),  # llama and vit: test_matrix.py
        Case(2, TP2, "grouped", MICRO),
        Case(2, (*TP2, NO_SEQUENCE), "gpt2", MICRO),
        Case(2, (*TP2, NO_VOCABULARY), "tied", MICRO),
        Case(2, (*TP2, NO_SEQUENCE, NO_VOCABULARY), "llama", MICRO),
        Case(2, TP2, "olmo-grouped", MICRO),
    ],
    "tp4": [
        Case(4, TP4, "llama", MICRO),  # two key and value heads
        Case(4, (*TP4, NO_SEQUENCE), "tied", MICRO),
        Case(4, TP4, "olmo", MICRO),
    ],
    "zero3-2-tp2": [Case(4, ZERO3, "tied", HALF), Case(4, (*ZERO3, NO_VOCABULARY), "gpt2", HALF)],
    "replicate-2-tp2": [Case(4, HSDP, "llama", HALF), Case(4, HSDP, "vit", HALF)],
}
DRAWN = {"tp2": (0, 1, 4, 5), "tp4": (1, 2), "zero3-2-tp2": (), "replicate-2-tp2": (1,)}
"""Every model, two key and value heads over four ranks, and every option."""


def _list_cases() -> list[Any]:
    return [
        pytest.param(name, at, id=f"{name}-{case.kind}-{at}", marks=() if at in DRAWN[name] else pytest.mark.long)
        for name, cases in LAYOUTS.items()
        for at, case in enumerate(cases)
    ]


@cache
def _trained(name: str, indices: tuple[int, ...]) -> list[dict[int, Outcome]]:
    """What each rank of a layout saw, by case; one start of the ranks serves all cases."""
    cases = {at: LAYOUTS[name][at] for at in indices}

    def every(world: World) -> dict[int, Outcome]:
        return {at: steps(fresh(case, world), case, world, STEPS) for at, case in cases.items()}

    first = LAYOUTS[name][0]
    return run_ranks(every, first.ranks, parallel=first.config().parallel)


@cache
def _truth(kind: str) -> tuple[Outcome, Outcome]:
    return truth(kind)


@pytest.mark.parametrize(("name", "index"), _list_cases())
def test_every_layout_gives_the_numbers_of_one_process(name: str, index: int, request: pytest.FixtureRequest) -> None:
    indices = tuple(range(len(LAYOUTS[name]))) if runs_long_tests(request.session) else DRAWN[name]
    _assert_outcome([rank[index] for rank in _trained(name, indices)], _truth(LAYOUTS[name][index].kind)[0])


def _assert_outcome(ranks: list[Outcome], wanted: Outcome) -> None:
    for rank in ranks:
        np.testing.assert_allclose(rank.losses, wanted.losses, rtol=TOLERANCE)
        np.testing.assert_allclose(rank.norms, wanted.norms, rtol=TOLERANCE)
    for step, expected in enumerate(wanted.gradients):
        assert_close(whole([rank.gradients[step] for rank in ranks]), whole([expected]), TOLERANCE)
    assert_close(whole([rank.state for rank in ranks]), whole([wanted.state]), TOLERANCE)


@pytest.mark.long  # test_matrix.py does it with tied embeddings
def test_state_moves_into_another_layout(tmp_path: Path) -> None:
    start = LAYOUTS["tp4"][0]
    run_ranks(train_and_save, start.ranks, start, tmp_path, parallel=start.config().parallel)
    for case in (Case(4, ZERO3, "llama", HALF), Case(1, (), "llama", 16)):
        ranks = run_ranks(resume, case.ranks, case, tmp_path, parallel=case.config().parallel)
        _assert_outcome(ranks, _truth("llama")[1])


def _from_values(world: World, case: Case, drop: float) -> tuple[list[Held], list[list[Held]], float, float]:
    """Of a model that has its values already: the pieces, the same after two steps, and the loss of an evaluation."""
    config, source = case.config(), model(case.kind)
    for module in source.modules():
        if isinstance(module, nn.Dropout):
            module.p = drop
    engine = build(source, lambda part: make_optimizer(part, config.optim), config, world)
    start = held(engine.shards())
    batch = StepBatch([global_batch(case.kind, 0)])
    evaluated = float(engine.evaluate(batch).loss)
    states = []
    for step in range(2):
        seed_step(0, step, world.dp_index)
        trained = float(engine.forward_backward(batch).loss)
        engine.update(1e-2)
        states.append(held(engine.shards()))
    return start, states, evaluated, trained


@pytest.mark.parametrize("options", [(), (NO_SEQUENCE,)])
def test_a_model_keeps_its_values_and_dropout_does_not_part_the_ranks(options: tuple[str, ...]) -> None:
    case = Case(2, (*TP2, *options), "llama", 16)
    ranks = run_ranks(_from_values, 2, case, 0.2, parallel=case.config().parallel)
    source, batch = model("llama"), global_batch("llama", 0)
    values, loss = source.state_dict(), float(cross_entropy_sum(source(batch.inputs), batch.targets).detach())
    start = whole([pieces for pieces, *_ in ranks])
    for name, value in values.items():
        np.testing.assert_array_equal(start[name], value.numpy())
    for _, _, evaluated, _ in ranks:
        np.testing.assert_allclose(evaluated, loss, rtol=TOLERANCE)
    for step in range(2):
        whole([states[step] for _, states, *_ in ranks])  # copies must agree bit for bit
    assert len({trained for *_, trained in ranks}) == 1
