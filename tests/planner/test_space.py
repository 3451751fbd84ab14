"""The space is what this toolkit can run: all of it, and nothing else."""

from __future__ import annotations

import random
from functools import cache

import pytest
from planner_runs import NAMES, Row, naive_rows, refusal, rows_of, run

from hpc_train.planner.model.inputs import SCHEDULES
from hpc_train.planner.search.degree_limits import find_degree_limits
from hpc_train.planner.search.space import FixedColumns, SearchSpace, iterate_blocks
from hpc_train.schedules.generate import REQUIREMENTS

TINY = ("cluster=dgx_a100", "train.sequence_length=32", "train.micro_batch=1")
CASES = {
    "llama": (*TINY, "model=llama_tiny", "model.layers=4", "train.global_batch=4"),
    "odd": (
        *TINY,
        "model=gpt2_tiny",
        "model.layers=3",
        "model.heads=6",
        "model.hidden=96",
        "model.feed_forward=96",
        "train.global_batch=6",
        "train.sequence_length=24",
    ),
    "ulysses": (*TINY, "model=llama_tiny", "model.layers=2", "train.global_batch=8", "parallel.context.method=ulysses"),
    "dropout": (*TINY, "model=llama_tiny", "model.layers=2", "model.dropout=0.1", "train.global_batch=4"),
    "half": (*TINY, "model=llama_tiny", "model.layers=2", "precision=bf16", "precision.reduce=bf16"),
    "experts": (*TINY, "model=llama_moe_tiny", "model.layers=2", "train.global_batch=4"),
    "compiled": (*TINY, "model=llama_tiny", "model.layers=4", "parallel.compile=true", "train.global_batch=4"),
    "images": (*TINY, "model=vit_tiny", "data=digits", "train.global_batch=4"),
}


@cache
def space(case: str, world: int) -> SearchSpace:
    return SearchSpace(find_degree_limits(run(*CASES[case])), world)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world", [1, 4])
def test_every_candidate_can_be_run(case: str, world: int) -> None:
    found = list(rows_of(space(case, world)))
    assert len(found) == len(set(found)) == sum(block.count for block in iterate_blocks(space(case, world)))
    for row in random.Random(1).sample(found, min(200, len(found))):
        assert refusal(run(*CASES[case]), row, world) is None


@pytest.mark.parametrize(("case", "world"), [*((case, 4) for case in CASES), ("odd", 6)])
def test_everything_that_can_be_run_is_a_candidate(case: str, world: int) -> None:
    """A sample of all combinations of values that the planner has a model of."""
    config = run(*CASES[case])
    naive = [row for row in naive_rows(config, world) if _modelled(row, config.model.layers)]  # type: ignore[attr-defined]
    found = set(rows_of(space(case, world)))
    sample = random.Random(world).sample(naive, min(500, len(naive)))
    missing = [row for row in sample if row not in found and refusal(config, row, world) is None]
    assert [dict(zip(NAMES, row, strict=True)) for row in missing] == []
    assert any(row in found for row in sample)


def _modelled(row: Row, layers: int) -> bool:
    """Whether a stage has as many blocks as every k-th is recomputed of, and what is recomputed is used at once."""
    values = dict(zip(NAMES, row, strict=True))
    stage = -(-layers // (values["pp"] * values["virtual_stages"]))
    requirements = REQUIREMENTS.get(SCHEDULES[int(values["schedule"])])
    waits = values["pp"] > 1 and requirements is not None and requirements.splits_backward
    return values["recompute_every"] <= stage and not (waits and values["recompute"])


def test_the_space_is_the_same_however_it_is_cut() -> None:
    whole = space("llama", 4)
    assert set(rows_of(whole, 64)) == set(rows_of(whole, 1 << 20))
    assert max(block.count for block in iterate_blocks(whole, 64)) <= 64


def test_what_is_fixed_stays() -> None:
    whole = space("llama", 4)
    fixed = FixedColumns({"tp": (2.0,), "recompute": (2.0,), "micro_batch": (1.0,)})
    found = set(rows_of(SearchSpace(whole.shape, 4, fixed)))
    at = [NAMES.index(name) for name in ("tp", "recompute", "micro_batch")]
    assert found == {row for row in rows_of(whole) if [row[number] for number in at] == [2.0, 2.0, 1.0]}
    assert found


def test_a_micro_batch_that_is_fixed_need_not_divide() -> None:
    whole = space("llama", 1)
    found = {
        row[NAMES.index("micro_batch")]
        for row in rows_of(SearchSpace(whole.shape, 1, FixedColumns({"micro_batch": (3.0,)})))
    }
    assert found == {3.0}


def test_a_world_that_nothing_divides_has_no_candidates() -> None:
    assert not list(iterate_blocks(SearchSpace(space("llama", 4).shape, 7)))
