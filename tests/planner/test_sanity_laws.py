"""What must hold of every estimate, whatever the constants: asked of jobs drawn at random."""

from __future__ import annotations

import numpy as np
import pytest
from planner_runs import run

from hpc_train.planner.constants import default_constants
from hpc_train.planner.model.from_config import jobs_from_config
from hpc_train.planner.model.inputs import OFFLOAD, SCHEDULES, STACKS
from hpc_train.planner.model.jobs import Jobs, replace_columns
from hpc_train.planner.model.stage_layers import split_layers
from hpc_train.planner.model.step_time import Estimate, estimate_jobs

COUNT = 600
SURE = 1 + 1e-9


def drawn() -> Jobs:
    """Legal jobs: every stack, powers of two of every degree, one to 16,384 GPUs, 1 k to 1 M tokens a sequence."""
    chance = np.random.default_rng(11)

    def one_of(*values: float) -> np.ndarray:  # type: ignore[type-arg]
        return chance.choice(np.array(values, np.float64), COUNT)

    heads, tp, pp = one_of(16, 32, 64, 128), one_of(1, 2, 4, 8), one_of(1, 2, 4, 8)
    micro, dp = one_of(1, 2, 4), one_of(1, 2, 8, 64)
    return replace_columns(
        jobs_from_config(run("cluster=dgx_h100", "model=llama_7b", "precision=bf16"), 1),
        layers=pp * one_of(2, 4, 12),
        heads=heads,
        kv_heads=np.minimum(heads, 16),
        head_dim=128,
        hidden=heads * 128,
        feed_forward=heads * 512,
        vocab=one_of(32000, 128256),
        sequence=one_of(1024, 4096, 32768, 1048576),
        micro_batch=micro,
        global_batch=dp * micro * pp * one_of(2, 4),
        dp_replicate=1,
        dp_shard=dp,
        cp=one_of(1, 1, 2, 4),
        tp=tp,
        pp=pp,
        zero=np.where(dp > 1, one_of(1, 2, 3), 0),
        schedule=np.where(pp > 1, one_of(SCHEDULES.index("1f1b"), SCHEDULES.index("gpipe")), SCHEDULES.index("1f1b")),
        recompute=one_of(0, 1, 2),
        offload=one_of(0, 0, *range(1, len(OFFLOAD))),
        stack=one_of(*range(len(STACKS))),
    )


@pytest.fixture(scope="module")
def jobs() -> Jobs:
    return drawn()


@pytest.fixture(scope="module")
def told(jobs: Jobs) -> Estimate:
    return estimate_jobs(jobs, default_constants())


def step(jobs: Jobs) -> np.ndarray:  # type: ignore[type-arg]
    return estimate_jobs(jobs, default_constants()).time.step


def held(jobs: Jobs) -> np.ndarray:  # type: ignore[type-arg]
    return estimate_jobs(jobs, default_constants()).memory.total


def test_parts_are_positive_and_shares_believable(jobs: Jobs, told: Estimate) -> None:
    parts = (told.time.compute, told.time.launch, told.time.tensor, told.time.context, told.time.data)
    parts += (told.time.pipeline, told.time.bubble, told.time.optimizer, told.time.jitter, told.time.checkpoint)
    assert all((part >= 0).all() for part in parts)
    assert sum(parts) == pytest.approx(told.time.step)
    assert (told.mfu > 0).all()
    assert (told.mfu <= jobs.gemm_ceiling).all()
    assert (told.hfu >= told.mfu / SURE).all()
    assert np.isfinite(told.memory.total).all()


def test_percentiles_are_in_order(told: Estimate) -> None:
    low, middle, high = (told.time.quantile(p) for p in (0.1, 0.5, 0.9))
    assert (low < middle).all()
    assert (middle < high).all()


@pytest.mark.parametrize("name", ["global_batch", "sequence", "layers", "vocab", "feed_forward"])
def test_more_work_takes_longer(jobs: Jobs, told: Estimate, name: str) -> None:
    more = replace_columns(jobs, **{name: 2 * getattr(jobs, name)})
    assert (step(more) > told.time.step).all()


@pytest.mark.parametrize("name", ["sequence", "layers", "vocab", "feed_forward", "micro_batch"])
def test_more_of_a_model_needs_more_memory(jobs: Jobs, told: Estimate, name: str) -> None:
    """On a rank that has the same layers: a larger head leaves the last stage of a pipeline fewer of them."""
    more = replace_columns(jobs, **{name: 2 * getattr(jobs, name)})
    if name == "micro_batch":  # as many of them a step
        more = replace_columns(more, global_batch=2 * jobs.global_batch)
    same = split_layers(more).last == split_layers(jobs).last if name == "vocab" else np.full(jobs.layers.shape, True)
    assert (held(more) > told.memory.total / SURE)[same].all()


SPEEDS = ("peak_flops", "memory_bandwidth", "link_bandwidth", "nic_bandwidth", "host_bandwidth", "checkpoint_bandwidth")


@pytest.mark.parametrize("names", [("peak_flops", "peak_flops_attention"), *((name,) for name in SPEEDS[1:])])
def test_a_faster_part_slows_nothing(jobs: Jobs, told: Estimate, names: tuple[str, ...]) -> None:
    """But for what the same computation is taken to hide twice: the ring of cp, the data-parallel axes, launches."""
    faster = replace_columns(jobs, **{name: 2 * getattr(jobs, name) for name in names})
    assert (step(faster) <= told.time.step * 1.02).all()


def test_a_cluster_of_twice_the_speed_is_up_to_twice_as_fast(jobs: Jobs, told: Estimate) -> None:
    faster = replace_columns(jobs, **{name: 2 * getattr(jobs, name) for name in (*SPEEDS, "peak_flops_attention")})
    ratio = told.time.step / step(faster)
    assert (ratio > 1).all()
    assert (ratio <= 2 * SURE).all()


@pytest.mark.parametrize("name", ["tp", "dp_shard", "cp"])
def test_more_ranks_need_no_more_memory_each(jobs: Jobs, name: str) -> None:
    """At the same micro-batch and model, but for one that becomes two: it has no buckets beside its gradients."""
    several = jobs.world > 1
    more = replace_columns(jobs, global_batch=2 * jobs.global_batch)
    wider = replace_columns(more, **{name: 2 * getattr(jobs, name)})
    assert (held(wider) <= held(more) * SURE)[several].all()


def test_more_stages_need_no_more_memory_each(jobs: Jobs) -> None:
    """Where layers are split evenly and nothing is kept of a micro-batch in flight but its activations: twice as many
    are then in flight, of half as many layers."""
    even = replace_columns(
        jobs, stack=np.where(jobs.stack == STACKS.index("fsdp"), jobs.stack, STACKS.index("megatron"))
    )
    deep = replace_columns(even, pp=2 * jobs.pp, global_batch=4 * jobs.global_batch)
    assert (held(deep) <= held(replace_columns(even, global_batch=4 * jobs.global_batch)) * SURE).all()


def test_recomputation_saves_memory_and_takes_time(jobs: Jobs) -> None:
    none, some, full = (replace_columns(jobs, recompute=mode) for mode in (0, 1, 2))
    assert (step(none) <= step(some) * SURE).all()
    assert (step(some) <= step(full) * SURE).all()
    deep = jobs.layers / jobs.pp >= 4
    assert (held(full) <= held(none))[deep].all()


def test_a_higher_stage_of_zero_needs_no_more_memory(jobs: Jobs) -> None:
    sharded = replace_columns(jobs, dp_shard=np.maximum(jobs.dp_shard, 2), offload=0)
    one, two, three = (held(replace_columns(sharded, zero=stage)) for stage in (1, 2, 3))
    # In hpc_train's own, the buffers that each backward reduces may cost more than the halves of so few ranks spare,
    # above all where embedding and head, which are reduced whole, outweigh the blocks.
    tables, blocks = 2 * sharded.vocab * sharded.hidden, 12 * sharded.layers * sharded.hidden**2
    own = np.where(tables > 0.5 * blocks, 1.25, 1.1)
    assert (two <= one * np.where(sharded.stack == STACKS.index("hpc_train"), own, SURE)).all()
    plain = sharded.stack != STACKS.index("deepspeed")
    assert (three <= two * 1.02)[plain].all()
