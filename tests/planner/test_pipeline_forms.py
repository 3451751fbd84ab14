"""Closed forms of the pipeline against the event simulation of the orders that run."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from planner_runs import run

from hpc_train.errors import UserError
from hpc_train.planner.model.from_config import jobs_from_config
from hpc_train.planner.model.inputs import SCHEDULES
from hpc_train.planner.model.jobs import Jobs, replace_columns
from hpc_train.planner.model.pipeline import micro_batches_in_flight
from hpc_train.planner.model.stage_layers import rank_layers, split_layers
from hpc_train.planner.model.step_time import bubble_seconds
from hpc_train.schedules.generate import REQUIREMENTS, generate_order
from hpc_train.schedules.simulate import ActionTimes, Simulation, simulate_order
from hpc_train.traffic.stages import compute_block_costs, split_blocks

TIMES = ((1.0, 1.0, 1.0), (1.0, 1.3, 0.7), (1.0, 2.0, 1.0))
V_SHAPED = {"zbv", "dualpipev"}


def job(name: str, ranks: int, micro_batches: int, virtual: int) -> Jobs:
    columns = {"pp": ranks, "virtual_stages": virtual, "micro_batch": 1, "global_batch": micro_batches}
    base = jobs_from_config(run("model=gpt3_1_3b", "launch.ranks=1"))
    return replace_columns(base, **columns, schedule=SCHEDULES.index(name), dp_replicate=1, dp_shard=1)


def simulated(name: str, ranks: int, micro_batches: int, virtual: int, times: tuple[float, ...]) -> Simulation | None:
    try:
        order = generate_order(name, ranks, micro_batches, virtual)
    except UserError:
        return None
    forward, inputs, weights = (time / virtual for time in times)
    return simulate_order(order, ActionTimes.even(ranks * virtual, forward, inputs, weights))


def cases(name: str) -> list[tuple[int, int, int]]:
    virtual = [REQUIREMENTS[name].virtual_stages] if REQUIREMENTS[name].most_virtual else [2, 3]
    return [(ranks, ranks * rounds, v) for ranks, rounds, v in product((2, 4, 8), (2, 4), virtual)]


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_bubble_is_that_of_the_simulated_order(name: str) -> None:
    compared = 0
    for (ranks, count, virtual), times in product(cases(name), TIMES):
        found = simulated(name, ranks, count, virtual, times)
        if found is None:
            continue
        told = bubble_seconds(
            job(name, ranks, count, virtual), np.float64((ranks - 1) * sum(times)), *map(np.float64, times)
        )
        idle = found.makespan - count * sum(times)
        assert float(told) == pytest.approx(idle, rel=0.17 if name in V_SHAPED else 1e-9), (
            ranks,
            count,
            virtual,
            times,
        )
        compared += 1
    assert compared >= 6


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_micro_batches_in_flight_are_those_of_the_simulated_order(name: str) -> None:
    for ranks, count, virtual in cases(name):
        found = simulated(name, ranks, count, virtual, TIMES[0])
        if found is not None:
            told = [float(it) * virtual for it in micro_batches_in_flight(job(name, ranks, count, virtual))]
            assert told == pytest.approx([found.live[0], found.live[1], found.live[-1]]), (ranks, count, virtual)


@pytest.mark.parametrize(
    ("layers", "ranks", "virtual"), [(24, 4, 1), (62, 32, 1), (126, 8, 4), (78, 12, 1), (30, 4, 2)]
)
@pytest.mark.parametrize("stack", [0, 3])
def test_stages_hold_all_layers_and_none_is_much_larger(layers: int, ranks: int, virtual: int, stack: int) -> None:
    jobs = replace_columns(job("1f1b", ranks, ranks, virtual), layers=layers, stack=stack)
    found = split_layers(jobs)
    assert float(found.first + (ranks - 2) * found.middle + found.last) == pytest.approx(layers, abs=virtual * ranks)
    assert float(found.middle) <= np.ceil(layers / (ranks * virtual) + 1) * virtual
    assert float(found.first) <= float(found.middle)
    if layers % (ranks * virtual) == 0 and stack == 0:
        assert float(found.first) == float(found.middle) == layers / ranks


@pytest.mark.parametrize("model", ["gpt3_1_3b", "llama_8b", "llama_70b", "gpt3_175b"])
@pytest.mark.parametrize("ranks", [2, 4, 8, 12])
def test_ours_are_split_as_the_pipeline_splits_them(model: str, ranks: int) -> None:
    config = run(f"model={model}", "train.sequence_length=2048", "cluster=dgx_h100", "precision=bf16")
    jobs = replace_columns(jobs_from_config(config, 1), pp=ranks)
    real = split_blocks(compute_block_costs(config.model, 2048, int(jobs.layers)), ranks)
    told = split_layers(jobs)
    assert float(told.last) == len(real[-1])
    assert float(told.first) == len(real[0])
    assert max(float(told.first), float(told.middle)) == max(map(len, real[:-1]))


@pytest.mark.parametrize("layers", [5, 10, 13, 32])
@pytest.mark.parametrize(("ranks", "virtual", "v_shaped"), [(2, 1, False), (2, 2, False), (2, 2, True), (4, 2, False)])
@pytest.mark.parametrize("vocab", [2048, 131072])
def test_ranks_hold_the_layers_that_the_pipeline_gives_them(
    layers: int, ranks: int, virtual: int, v_shaped: bool, vocab: int
) -> None:
    if layers < ranks * virtual:
        layers += ranks
    config = run("model=llama_8b", f"model.layers={layers}", f"model.vocab_size={vocab}", "cluster=dgx_h100")
    jobs = replace_columns(jobs_from_config(config, 1), pp=ranks, virtual_stages=virtual)
    real = list(
        map(len, split_blocks(compute_block_costs(config.model, config.train.sequence_length, layers), ranks * virtual))
    )
    last = 2 * ranks - 1
    held = [
        sum(real[i] for i in ((rank, last - rank) if v_shaped else range(rank, len(real), ranks)))
        for rank in range(ranks)
    ]
    first, middle, end, stage = map(float, rank_layers(jobs, np.array(v_shaped)))
    assert (first, end, stage) == (held[0], held[-1], real[-1])
    assert ranks == 2 or middle == max(held[1:-1])


def test_a_heavy_head_takes_layers_from_the_last_stage_of_ours_only() -> None:
    jobs = replace_columns(job("1f1b", 4, 4, 1), layers=32, vocab=3 * 12 * 4096, hidden=4096, feed_forward=4 * 4096)
    jobs = replace_columns(jobs, heads=32, kv_heads=32, head_dim=128, gated=0, sequence=512)
    ours, theirs = split_layers(replace_columns(jobs, stack=3)), split_layers(replace_columns(jobs, stack=0))
    assert float(ours.last) < float(ours.middle)
    assert float(theirs.last) == 8
