"""Activations that wait on the host, and exchanges of heads for positions: what they cost and what they save."""

from __future__ import annotations

import pytest
from planner_runs import asked, run

from hpc_train.config.run import RunConfig
from hpc_train.planner.constants import Constants
from hpc_train.planner.model.from_config import jobs_from_config
from hpc_train.planner.model.jobs import as_column, replace_columns
from hpc_train.planner.model.memory import Memory, estimate_memory
from hpc_train.planner.model.network import all_gather_seconds, all_to_all_seconds, make_rank_group
from hpc_train.planner.model.step_time import StepTime, estimate_step_time
from hpc_train.planner.settings import settings_to_overrides

PLAIN = Constants(activations=1.0, fragmentation=0.0, context=0.0, jitter=0.0)
BASE = (
    "cluster=dgx_h100", "precision=bf16", "model=llama_7b", "train.sequence_length=4096", "train.global_batch=32",
    "train.micro_batch=1", "parallel.strategy=zero3", "parallel.dp_shard=8",
)  # fmt: skip
LONG = ("train.sequence_length=16384", "model.max_positions=16384")
MOVED = "parallel.recompute.offload=true"


def estimated(*more: str, ranks: int = 8) -> tuple[Memory, StepTime]:
    jobs = jobs_from_config(run(*BASE, *more), ranks)
    return estimate_memory(jobs, PLAIN), estimate_step_time(jobs, PLAIN)


def test_the_host_has_what_the_device_no_longer_has() -> None:
    """Except for two layers: one that is computed, and a neighbour on its way, when another moment is the peak."""
    (kept, _), (moved, _) = estimated(), estimated(MOVED)
    one = float(moved.host) / 32
    assert 29 * one < float(kept.total - moved.total) < 30.01 * one
    assert float(kept.host) == 0
    hidden, wide, tokens = 4096, 11008, 4096
    assert one > tokens * 2 * (6 * hidden + 3 * wide), "norms' and products' inputs, and what attention keeps"


def test_of_the_copies_shows_what_takes_longer_than_the_layer_beside_them() -> None:
    (moved, slow), (_, quick) = estimated(MOVED), estimated()
    bus = float(jobs_from_config(run(*BASE), 8).host_bandwidth)
    copies = 4 * 2 * float(moved.host) / bus  # there and back, four micro-batches
    assert copies - float(quick.compute) < float(slow.offload) < copies
    faster = replace_columns(jobs_from_config(run(*BASE, MOVED), 8), host_bandwidth=as_column(1e15))
    assert float(estimate_step_time(faster, PLAIN).offload) == 0
    assert float(quick.offload) == 0
    assert float(slow.compute) == pytest.approx(float(quick.compute))
    assert float(slow.step) > float(quick.step)


def test_recomputed_layers_move_their_inputs_only() -> None:
    full = "parallel.recompute.mode=full"
    moved, time_ = estimated(MOVED, full)
    inputs = 32 * 4096 * 4096 * 2
    assert float(moved.host) == pytest.approx(inputs)
    assert float(time_.offload) == 0, "hidden by the computation"
    assert 0.93 * inputs < float(estimated(full)[0].total - moved.total) < 0.95 * inputs, "all but those of two layers"


def test_a_pipeline_keeps_the_ends_of_its_stages() -> None:
    degrees = ("parallel.strategy=ddp", "parallel.dp_shard=1", "parallel.pp=8", "train.global_batch=16")
    moved, _ = estimated(MOVED, *degrees)
    one_more = float(moved.activations[0] - moved.activations[1])
    assert one_more == pytest.approx(2 * 4096 * 4096 * 2)
    assert moved.activations[0] > moved.activations[2], "the first stage has most micro-batches in flight"


def test_the_planner_moves_activations_where_nothing_else_helps() -> None:
    """A model that fills its devices: the search finds what fits, and says it as the toolkit takes it."""
    words = ("model=llama_7b", "cluster=dgx_a100", "precision=bf16", "cluster.nodes=1")
    words = (*words, "train.sequence_length=131072", "model.max_positions=131072")
    fixed = ("parallel.tp=1", "parallel.cp=1", "parallel.pp=1", "train.global_batch=8", "train.micro_batch=1")
    open_, kept = asked(*words, *fixed, top=3), asked(*words, *fixed, "parallel.recompute.offload=false", top=3)
    assert open_.best is not None
    assert kept.best is None or kept.best.total > open_.best.total
    assert open_.best.config.parallel.recompute.offload
    assert "parallel.recompute.offload=true" in settings_to_overrides(open_.best.settings)


def pair(config: RunConfig, ranks: int) -> tuple[float, float]:
    """(all-to-all, all-gather) seconds of 1 GB over cp."""
    jobs = jobs_from_config(config, ranks)
    at = make_rank_group(jobs, PLAIN, jobs.cp, jobs.tp)
    return tuple(float(it(at, as_column(1e9), as_column(0.0))) for it in (all_to_all_seconds, all_gather_seconds))  # type: ignore[return-value]


def test_exchanges_leave_a_node_by_each_ranks_own_nic() -> None:
    """Inside a node as an all-gather; over two, half of each rank's data leaves, where a ring's shares all NICs."""
    words = ("cluster=dgx_h100", "model=llama_7b", "precision=bf16", *LONG)
    inside, gather = pair(run(*words, "parallel.cp=8", "parallel.dp_replicate=1"), 8)
    assert inside == pytest.approx(gather)
    config = run(*words, "parallel.cp=16", "parallel.dp_replicate=1")
    across, _ = pair(config, 16)
    jobs = jobs_from_config(config, 16)
    assert across == pytest.approx(1e9 / 2 / float(jobs.nic_bandwidth * PLAIN.nic_efficiency))


def test_exchanges_move_less_than_a_ring_unless_keys_are_few() -> None:
    """A ring moves all keys and values and their gradients; heads are exchanged whatever the keys."""
    found = {}
    for kv_heads in (32, 1):
        words = ("cluster=dgx_h100", "model=llama_7b", "precision=bf16", *LONG, f"model.kv_heads={kv_heads}")
        jobs = jobs_from_config(run(*words, "parallel.cp=32", "parallel.dp_replicate=1"), 32)
        found[kv_heads] = [
            float(estimate_step_time(replace_columns(jobs, ulysses=way), PLAIN).context) for way in (0.0, 1.0)
        ]
    assert found[32][1] < found[32][0]
    assert found[1][1] > found[1][0]
