"""Time, traffic and memory of the planner follow one rule of what is whole between uses."""

from __future__ import annotations

import numpy as np
import pytest
from planner_runs import run

from hpc_train.config.parallel import resolve_degrees
from hpc_train.planner.constants import default_constants
from hpc_train.planner.model import network
from hpc_train.planner.model.from_config import jobs_from_config
from hpc_train.planner.model.step_time import estimate_jobs
from hpc_train.schedules.generate import generate_order
from hpc_train.schedules.order import Kind
from hpc_train.traffic.flows import compute_flows
from hpc_train.traffic.sharding import count_block_gathers, count_end_gathers, count_reductions, keeps_parameters
from hpc_train.traffic.stages import count_stage_split_backwards

BASE = (
    "model=llama_1b", "cluster=dgx_h100", "cluster.nodes=4", "precision=bf16", "train.sequence_length=2048",
    "train.micro_batch=1", "train.global_batch=128", "parallel.strategy=zero3",
)  # fmt: skip
SCHEDULES = ("1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev")


def piped(schedule: str) -> tuple[str, ...]:
    return ("parallel.pp=4", f"parallel.pipeline.schedule={schedule}") if schedule else ()


@pytest.mark.parametrize("schedule", ["", *SCHEDULES])
def test_freeing_after_forward_costs_time_and_saves_memory(schedule: str) -> None:
    freed, kept = (
        estimate_jobs(jobs_from_config(run(*BASE, *piped(schedule), *more)), default_constants())
        for more in ((), ("parallel.reshard_after_forward=false",))
    )
    assert float(freed.time.data) > float(kept.time.data)
    assert float(freed.memory.total) < float(kept.memory.total)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_bytes_of_stages_are_those_of_the_traffic_model(schedule: str, strategy: str) -> None:
    """The planner uses the mean stage of the first rank, traffic the rank that moves most."""
    config = run(*BASE, *piped(schedule), f"parallel.strategy={strategy}")
    degrees, jobs = resolve_degrees(config.parallel, 32), jobs_from_config(config, 32)
    found = dict.fromkeys(("all_gather", "reduce_scatter"), 0.0)
    for flow in compute_flows(config, 32):
        if flow.axes == ("dp_shard",) and flow.collective in found:
            found[flow.collective] += flow.bytes * flow.calls
    assert degrees.dp_shard == 8
    table = jobs.vocab * jobs.hidden
    planned = network.data_volume(jobs, jobs.layers / jobs.pp * jobs.layer_parameters, table)
    assert float(planned.gathered) == pytest.approx(found["all_gather"], rel=0.3)
    assert float(planned.scattered) == pytest.approx(found["reduce_scatter"], rel=0.3)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_split_backwards_are_those_of_the_order(schedule: str) -> None:
    config = run(*BASE, *piped(schedule))
    virtual = config.parallel.pipeline.virtual_stages
    for ranks, count in ((2, 4), (4, 8), (4, 16)):
        order = generate_order(schedule, ranks, count, virtual)
        split = [0] * order.stages
        for rank in range(ranks):
            for action in order.actions(rank):
                split[action.stage] += action.kind is Kind.I and action.stage > 0
        assert count_stage_split_backwards(config.parallel.pipeline, ranks, count) == tuple(split)


def test_the_rule_takes_numbers_and_columns() -> None:
    cases = [(zero, reshard, pp) for zero in (1, 2, 3) for reshard in (0, 1) for pp in (1, 2)]
    zero, reshard, pp = (np.array(column, float) for column in zip(*cases, strict=True))
    for rule in (count_block_gathers, count_end_gathers):
        columns = rule(zero, reshard, pp, 8.0, 3.0 * (pp > 1))
        assert columns.tolist() == [rule(*case, 8, 3 * (case[2] > 1)) for case in cases]
    assert count_reductions(zero, 8.0).tolist() == [count_reductions(case[0], 8) for case in cases]
    assert keeps_parameters(zero, reshard, pp).tolist() == [bool(keeps_parameters(*case)) for case in cases]
