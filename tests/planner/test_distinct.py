"""What thousands of candidates share is computed once: with the same results as for each candidate by itself."""

from __future__ import annotations

import numpy as np
import pytest
from planner_runs import run

from hpc_train.planner.constants import default_constants
from hpc_train.planner.model.distinct import find_distinct
from hpc_train.planner.model.from_config import jobs_from_config
from hpc_train.planner.model.jobs import Jobs, job_columns, replace_columns
from hpc_train.planner.model.memory import (
    bound_memory_totals,
    estimate_host_memory,
    estimate_memory,
    estimate_memory_totals,
)
from hpc_train.planner.model.step_time import estimate_step_time
from hpc_train.planner.search.degree_limits import find_degree_limits
from hpc_train.planner.search.search import SearchBase, candidates_to_jobs
from hpc_train.planner.search.space import TECHNIQUE_COLUMNS, SearchSpace, iterate_blocks
from hpc_train.planner.settings import make_single_rank_config

TOGETHER, ALONE = 400, 5
SPACES = {
    "dense": ("cluster=dgx_a100", "model=gpt3_22b", "train.sequence_length=2048"),
    "uplinks": (
        "cluster=leonardo",
        "cluster.fabric.oversubscription=2",
        "model=llama_8b",
        "train.sequence_length=4096",
    ),
    "experts": ("cluster=dgx_h100", "model=mixtral_8x7b", "train.sequence_length=4096"),
    "adapters": ("cluster=dgx_h100", "model=llama_8b", "adapter=lora", "train.sequence_length=4096"),
    "dropout": ("cluster=dgx_a100", "model=gpt3_1_3b", "model.dropout=0.1", "train.sequence_length=2048"),
}


def draw_jobs(space: str, per_block: int) -> list[Jobs]:
    """Draw candidates of every block of a space, [n] each."""
    config = run(*SPACES[space], "precision=bf16", "train.global_batch=64")
    base = SearchBase(jobs_from_config(make_single_rank_config(config, 64), 1), 4.0)
    chance, found = np.random.default_rng(5), []
    for block in iterate_blocks(SearchSpace(find_degree_limits(config), 16), 1 << 20):
        row = chance.integers(0, len(block.rows["pp"]), per_block)
        technique = chance.integers(0, block.techniques.count, per_block)
        columns = {name: column[row] for name, column in block.rows.items()}
        columns |= {name: block.techniques.columns[name][technique] for name in TECHNIQUE_COLUMNS}
        found.append(candidates_to_jobs(base, columns, block.techniques.share[technique]))
    return found


@pytest.mark.parametrize("space", SPACES)
def test_candidates_together_are_as_each_by_itself(space: str) -> None:
    constants = default_constants()
    for jobs in draw_jobs(space, TOGETHER)[::6]:
        step, totals = estimate_step_time(jobs, constants).step, estimate_memory_totals(jobs, constants)
        for row in range(ALONE):
            own = {name: column[row] for name, column in job_columns(jobs).items() if column.ndim}
            alone = replace_columns(jobs, **own)
            assert float(estimate_step_time(alone, constants).step) == step[row]
            assert float(estimate_memory_totals(alone, constants).total[0]) == totals.total[row]


@pytest.mark.parametrize("space", SPACES)
def test_totals_are_those_of_the_parts(space: str) -> None:
    for jobs in draw_jobs(space, 40):
        totals, memory = (estimate(jobs, default_constants()) for estimate in (estimate_memory_totals, estimate_memory))
        assert np.array_equal(totals.total, memory.total)
        assert np.array_equal(totals.fits, memory.fits)
        assert np.array_equal(np.broadcast_to(estimate_host_memory(jobs, totals.waiting), 40), memory.host)


@pytest.mark.parametrize("space", SPACES)
def test_bounds_of_totals_are_below_them_and_near(space: str) -> None:
    shares = []
    for jobs in draw_jobs(space, 40):
        bounds, totals = (
            estimate(jobs, default_constants()) for estimate in (bound_memory_totals, estimate_memory_totals)
        )
        assert np.all(bounds.total <= totals.total)
        assert np.all(bounds.fits >= totals.fits)
        shares.append(bounds.total / totals.total)
    assert np.median(np.concatenate(shares)) > 0.9


@pytest.mark.parametrize("kind", ["few", "fractions", "many", "wide", "none"])
def test_distinct_columns_and_their_places(kind: str) -> None:
    chance = np.random.default_rng(1)
    values = {
        "few": chance.integers(0, 5, (4, 1000)).astype(float),
        "fractions": chance.integers(0, 3, (2, 1000)) / 3,
        "many": chance.integers(0, 900, (5, 3000)).astype(float),
        "wide": chance.integers(-(2**40), 2**40, (2, 500))[:, chance.integers(0, 500, 900)],
        "none": np.zeros((3, 0)),
    }[kind]
    keys, index = find_distinct(values)
    assert np.array_equal(keys[:, index], values)
    assert keys.shape[1] == np.unique(values, axis=1).shape[1]
