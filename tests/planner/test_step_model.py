"""Physics that the model of a step must have, whatever its constants."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from planner_runs import run

from hpc_train.planner.constants import Constants, default_constants
from hpc_train.planner.model.from_config import jobs_from_config
from hpc_train.planner.model.inputs import DEEPSPEED, FSDP, MEGATRON, RECOMPUTE
from hpc_train.planner.model.jobs import Jobs, as_column, job_columns, recomputed_share, replace_columns
from hpc_train.planner.model.layer.products import wave_quantization
from hpc_train.planner.model.network import all_gather_seconds, all_reduce_seconds, exposed_seconds, make_rank_group
from hpc_train.planner.model.stage_layers import split_layers
from hpc_train.planner.model.step_time import Estimate, StepTime, estimate_jobs

FLAGSHIP = (
    "model=gpt3_175b", "cluster=dgx_a100", "cluster.nodes=64", "precision=bf16", "parallel.tp=8", "parallel.pp=8",
    "train.global_batch=512", "train.micro_batch=1", "train.sequence_length=2048",
)  # fmt: skip
CONSTANTS = default_constants()


def job(*overrides: str, **columns: object) -> Jobs:
    return replace_columns(jobs_from_config(run(*FLAGSHIP, *overrides)), **columns)


def step(jobs: Jobs) -> float:
    return float(estimate_jobs(jobs, CONSTANTS).time.step)


def test_parts_add_up_and_none_is_negative() -> None:
    told = estimate_jobs(job(tp=[1, 2, 8], pp=8, dp_replicate=[64, 32, 8]), CONSTANTS)
    parts = [getattr(told.time, it.name) for it in fields(StepTime) if it.name not in ("spread", "hardware_flops")]
    assert np.allclose(sum(parts), told.time.step)
    assert all((part >= 0).all() for part in parts)
    assert (told.time.quantile(0.1) < told.time.step).all()
    assert (told.time.quantile(0.9) > told.time.step).all()


def test_many_jobs_are_estimated_as_each_by_itself() -> None:
    many = job(tp=[1, 2, 4, 8], micro_batch=[1, 2, 1, 4], dp_replicate=[64, 32, 16, 8])
    together = estimate_jobs(many, CONSTANTS)
    for row in range(many.n):
        columns = {name: column[[row]] for name, column in job_columns(many).items() if column.ndim}
        alone = estimate_jobs(replace(many, **columns), CONSTANTS)
        assert alone.time.step[0] == together.time.step[row]
        assert alone.memory.total[0] == together.memory.total[row]
        assert alone.memory.fits[0] == together.memory.fits[row]


def test_published_run_of_this_size_is_about_as_fast() -> None:
    """Narayanan et al. 2021, table 2: 175B in 140 to 150 TFLOP/s a GPU, recomputation counted."""
    told: Estimate = estimate_jobs(job(recompute=RECOMPUTE.index("full"), stack=0, fused_attention=0), CONSTANTS)
    assert 0.38 < float(told.hfu) < 0.52
    assert float(told.hfu) == pytest.approx(float(told.mfu) * 4 / 3, rel=0.06)


def test_recomputation_costs_a_third_and_saves_memory() -> None:
    none, full = (estimate_jobs(job(recompute=RECOMPUTE.index(mode)), CONSTANTS) for mode in ("none", "full"))
    assert 1.15 < float(full.time.step / none.time.step) < 1.4
    assert float(full.memory.total) < float(none.memory.total)
    half = estimate_jobs(job(recompute=RECOMPUTE.index("full"), recompute_share=0.5), CONSTANTS)
    assert float(none.time.step) < float(half.time.step) < float(full.time.step)


def test_tensor_parallelism_beyond_the_nvlink_domain_is_slow() -> None:
    inside, outside = job(tp=8, pp=8, dp_replicate=8), job(tp=16, pp=8, dp_replicate=4)
    assert step(outside) > 1.15 * step(inside)
    assert step(replace_columns(outside, nvlink_domain=72)) < 1.2 * step(inside)


def test_a_slower_network_never_helps() -> None:
    base = job("parallel.strategy=zero3", "parallel.pp=1", "parallel.tp=1")
    times = [step(replace_columns(base, nic_bandwidth=rate)) for rate in (5e9, 25e9, 50e9)]
    assert times == sorted(times, reverse=True)
    tapered = replace_columns(base, leaf_gpus=64, leaf_oversubscription=4)
    assert step(tapered) > step(base)


def test_a_group_that_spans_nodes_has_the_nics_of_all_its_ranks() -> None:
    """A group of every GPU of its nodes has all their rails; one of a GPU a node has one."""
    jobs, constants = job(), Constants(link_efficiency=0.8, nic_efficiency=1.0)
    whole = make_rank_group(jobs, constants, as_column(16), as_column(1))
    single = make_rank_group(jobs, constants, as_column(2), as_column(8))
    assert float(single.seconds_per_byte) == pytest.approx(8 * float(whole.seconds_per_byte))
    size = as_column(1e11)
    ring = 2 * 15 / 16 * 1e11 / (8 * float(jobs.nic_bandwidth))
    assert float(all_reduce_seconds(whole, size)) == pytest.approx(ring, rel=0.005)
    assert float(all_gather_seconds(whole, size, as_column(1))) == pytest.approx(ring / 2, rel=0.005)
    assert float(all_reduce_seconds(make_rank_group(jobs, constants, as_column(1), as_column(1)), size)) == 0


@pytest.mark.parametrize(
    ("rows", "outputs", "full"), [(256 * 108, 128, 1.0), (256, 128 * 108, 1.0), (256 * 109, 128, 1.3)]
)
def test_waves_of_tiles(rows: int, outputs: int, full: float) -> None:
    slow = float(wave_quantization(job(), as_column(rows), as_column(outputs)))
    assert slow == pytest.approx(1.0) if full == 1.0 else 1.0 < slow <= 2.0
    assert float(
        wave_quantization(replace_columns(job(), multiprocessors=0), as_column(rows), as_column(outputs))
    ) == pytest.approx(1.0)


def test_head_dimensions_that_tensor_cores_cannot_take_are_slow() -> None:
    """BLOOM's log: 128 heads of 108 in place of 96 of 144 took 40 % longer."""
    shapes = replace_columns(job(), hidden=13824, feed_forward=55296, heads=[96, 128], head_dim=[144, 108])
    jobs = replace_columns(shapes, kv_heads=[96, 128], stack=1, fused_attention=0)
    even, odd = estimate_jobs(jobs, CONSTANTS).time.step
    assert 1.2 < odd / even < 1.7


def test_small_layers_wait_for_the_host() -> None:
    small = {"hidden": 512, "feed_forward": 2048, "heads": 8, "head_dim": 64, "sequence": 256, "vocab": 1024}
    told = estimate_jobs(job("model=gpt3_1_3b", tp=1, dp_replicate=64, micro_batch=1, **small), CONSTANTS)
    assert float(told.time.launch) > float(told.time.compute)
    assert float(estimate_jobs(job(), CONSTANTS).time.launch) < 0.05 * step(job())


def test_what_overlap_leaves() -> None:
    assert float(exposed_seconds(as_column(1), as_column(10), as_column(0.8), as_column(0.1))) == pytest.approx(0.1)
    assert float(exposed_seconds(as_column(9), as_column(10), as_column(0.8), as_column(0.1))) == pytest.approx(1)
    assert float(exposed_seconds(as_column(9), as_column(10), as_column(0), as_column(0.1))) == 9
    assert float(exposed_seconds(as_column(0), as_column(10), as_column(0.5), as_column(0.1))) == 0


def test_more_micro_batches_shrink_the_bubbles_share() -> None:
    times = [estimate_jobs(job(global_batch=batch), CONSTANTS).time for batch in (64, 256, 1024)]
    share = [float(it.bubble / it.step) for it in times]
    assert share == sorted(share, reverse=True)
    assert share[0] > 0.3 > 0.1 > share[2]


@pytest.mark.parametrize(
    ("layers", "stages", "every", "share"),
    [(5, 1, 1, 1), (5, 1, 2, 3 / 5), (6, 1, 2, 1 / 2), (7, 2, 3, 2 / 4), (3, 1, 9, 1 / 3)],
)
def test_the_first_of_every_so_many_layers_is_recomputed(layers: int, stages: int, every: int, share: float) -> None:
    """As parallel.recompute.every has it: of 5 layers with every=2 the first, the third and the fifth."""
    assert recomputed_share(layers, stages, every) == share


def test_megatron_core_adds_up_gradients_in_the_product() -> None:
    """Wider gradients move more bytes for each micro-batch, which the arithmetic of the product hides."""
    core = job(stack=MEGATRON, fused_elementwise=1, gradient_bytes=[2, 4])
    eager = job(stack=MEGATRON, fused_elementwise=0, gradient_bytes=[2, 4])
    (hidden, hidden_wide), (added, added_wide) = (estimate_jobs(it, CONSTANTS).time.compute for it in (core, eager))
    assert hidden_wide == hidden
    assert added_wide > added * 1.01
    short = job(stack=MEGATRON, fused_elementwise=1, gradient_bytes=[2, 4], sequence=256)
    narrow, wide = estimate_jobs(short, CONSTANTS).time.compute
    assert wide > narrow, "few tokens hide little"


def test_launches_of_experts_are_waited_for_unless_graphs_launch_the_whole_step() -> None:
    experts = {
        "experts": 64,
        "top_k": 2,
        "expert_width": 4096,
        "stack": MEGATRON,
        "dp_replicate": 1,
        "dp_shard": 8,
        "zero": 1,
    }
    none, layers, whole = estimate_jobs(job(**experts, cuda_graphs=[0, 1, 2]), CONSTANTS).time.launch
    assert none == layers > whole == 0
    few, many = estimate_jobs(job(**experts, ep=[8, 1]), CONSTANTS).time.launch
    assert many == pytest.approx(8 * few), "products of each expert are launched one by one"
    one, same = estimate_jobs(job(**{**experts, "stack": FSDP}, tp=1, ep=[8, 1]), CONSTANTS).time.launch
    assert one == same < few, "torch has one kernel for all of a rank"


def test_an_interleaved_pipeline_of_megatron_hides_gradients_behind_a_round_of_micro_batches() -> None:
    wide = {"stack": MEGATRON, "zero": 1, "overlap_data": 1, "dp_shard": 8, "dp_replicate": 1}
    one, several = estimate_jobs(job(**wide, virtual_stages=[1, 6]), CONSTANTS).time.data
    assert several < 0.7 * one
    assert estimate_jobs(job(**{**wide, "overlap_data": 0}, virtual_stages=[1, 6]), CONSTANTS).time.data.std() == 0


def test_all_to_alls_beside_another_micro_batch_cost_their_share_of_multiprocessors() -> None:
    experts = {"experts": 64, "top_k": 8, "expert_width": 4096, "stack": MEGATRON, "dp_shard": 8, "zero": 1, "ep": 8}
    alone, beside = estimate_jobs(job(**experts, dp_replicate=1, overlap_experts=[0, 1]), CONSTANTS).time.experts
    assert 0 < beside < alone


def test_casts_to_8_bits_weigh_more_in_narrow_models() -> None:
    def gain(hidden: int) -> float:
        sizes = {"hidden": hidden, "feed_forward": 4 * hidden, "heads": hidden // 128, "kv_heads": hidden // 128}
        peak = float(np.max(job().peak_flops))
        wide, narrow = estimate_jobs(job(stack=MEGATRON, **sizes, peak_flops=[peak, 2 * peak]), CONSTANTS).time.compute
        return float(wide / narrow)

    assert gain(4096) < gain(16384) < 2


def test_products_of_pytorch_are_megatrons_on_ampere_and_slower_on_later_gpus() -> None:
    constants = replace(CONSTANTS, products_pytorch=0.9, products_blackwell=0.7)
    for peak, slower in ((312e12, False), (989e12, True), (2500e12, True)):
        jobs = job(stack=FSDP, peak_flops=peak, peak_flops_attention=peak, tp=1, pp=1)
        times = [
            estimate_jobs(jobs, which).time.compute
            for which in (constants, replace(CONSTANTS, products_pytorch=1.0, products_blackwell=1.0))
        ]
        assert bool(times[0] > times[1]) == slower


def test_tensor_parallel_ranks_add_up_the_squares_of_norms_over_all_heads() -> None:
    for tp in (1, 4):
        head, full = estimate_jobs(job(tp=tp, full_norms=[0, 1]), CONSTANTS).time.tensor
        assert (head < full) == (tp > 1)


def test_norms_of_several_kernels_and_of_heads_take_longer_unless_compiled() -> None:
    for name in ("composite_norms", "head_norms"):
        without, with_them = estimate_jobs(
            job(stack=FSDP, fused_elementwise=0, **{name: [0, 1]}), CONSTANTS
        ).time.compute
        assert without < with_them, name
    same, compiled = estimate_jobs(job(stack=FSDP, fused_elementwise=1, composite_norms=[0, 1]), CONSTANTS).time.compute
    assert same == compiled


SHARDED = {"stack": FSDP, "zero": 3, "dp_replicate": 1, "dp_shard": 64, "overlap_data": 1}


def test_hidden_traffic_slows_down_the_computation_that_hides_it() -> None:
    free, taken = (
        float(estimate_jobs(job(**SHARDED, tp=1, pp=1), replace(CONSTANTS, contention=share)).time.data)
        for share in (0.0, 0.5)
    )
    assert free < taken
    exposed = job(**{**SHARDED, "overlap_data": 0}, tp=1, pp=1)
    same = {float(estimate_jobs(exposed, replace(CONSTANTS, contention=share)).time.data) for share in (0.0, 0.5)}
    assert len(same) == 1, "nothing is hidden"


def test_gathers_of_all_micro_batches_overlap_also_if_the_last_one_alone_reduces() -> None:
    """Seconds that a step waits grow with the reductions, not with micro-batches whose gathers are hidden."""
    constants = replace(CONSTANTS, contention=0.0)
    once, each = (
        estimate_jobs(job(**SHARDED, tp=1, pp=1, reduce_once=flag, global_batch=[128, 1024]), constants).time.data
        for flag in (1, 0)
    )
    assert once[1] < 4 * once[0]
    assert (once <= each * 1.001).all()


def test_traffic_over_tp_hides_traffic_over_dp() -> None:
    slow = replace(CONSTANTS, contention=0.0, link_efficiency=0.05)
    wait, more = (
        estimate_jobs(job(**SHARDED, tp=8, pp=1, nic_bandwidth=2e9), constants).time.data
        for constants in (replace(CONSTANTS, contention=0.0), slow)
    )
    assert more < wait, "a longer layer hides more"


def test_layers_that_gather_their_inputs_by_themselves_wait_longer_and_compiled_ones_less_so() -> None:
    tensor = {"stack": FSDP, "tp": 8, "sequence_parallel": 1, "separate_gathers": [0, 1]}
    shared, separate = estimate_jobs(job(**tensor, fused_elementwise=0), CONSTANTS).time.tensor
    same, compiled = estimate_jobs(job(**tensor, fused_elementwise=1), CONSTANTS).time.tensor
    assert shared == same < compiled < separate < 2 * shared


def test_inputs_are_gathered_in_8_bits_if_all_ranks_share_a_scale() -> None:
    tensor = {"stack": FSDP, "tp": 8, "sequence_parallel": 1, "recompute": 0}
    wide, one_scale, rows = (
        float(estimate_jobs(job(**tensor, float8=recipe), CONSTANTS).time.tensor) for recipe in (0, 1, 2)
    )
    assert one_scale == pytest.approx(7 / 8 * wide)
    assert rows == wide


def test_tokens_travel_to_fewer_nodes_if_the_router_may_choose_from_few_and_in_fewer_bytes() -> None:
    experts = {"experts": 64, "top_k": 8, "expert_width": 4096, "dp_shard": 64, "zero": 1, "ep": 64, "sends_once": 1}
    alone = {**experts, "dp_replicate": 1, "tp": 1, "pp": 1}
    everywhere, few = estimate_jobs(job(**alone, routed_share=[1, 0.25]), CONSTANTS).time.experts
    wide, narrow = estimate_jobs(job(**alone, dispatch_bytes=[2, 1]), CONSTANTS).time.experts
    assert few < 0.5 * everywhere
    assert narrow == pytest.approx(0.75 * wide, rel=0.05)


def test_bands_differ_by_stack_and_generation() -> None:
    def spread(**columns: object) -> float:
        return float(np.max(estimate_jobs(job(**columns), CONSTANTS).time.spread))

    assert spread(stack=MEGATRON) == CONSTANTS.spread
    assert spread(stack=MEGATRON, peak_flops=1979e12, peak_flops_attention=989e12) == CONSTANTS.spread_narrow
    assert spread(stack=MEGATRON, peak_flops=2500e12, peak_flops_attention=2500e12) == CONSTANTS.spread_blackwell
    assert spread(stack=DEEPSPEED) == CONSTANTS.spread_deepspeed
    assert (spread(stack=FSDP, tp=1), spread(stack=FSDP)) == (CONSTANTS.spread_fsdp, CONSTANTS.spread_pytorch)


def test_a_rank_of_several_stages_has_one_layer_more_not_one_in_each() -> None:
    """80 layers in 20 stages: one stage has five layers, and the last, with the head, three."""
    sizes = {"layers": 80, "pp": 4, "virtual_stages": 5, "vocab": 128256, "hidden": 8192, "feed_forward": 28672}
    split = split_layers(job(**sizes, gated=1, heads=64, kv_heads=8, head_dim=128, sequence=8192))
    assert float(split.middle) <= 21
    assert float(split.first + split.last) + 2 * float(split.middle) >= 80


def test_a_cpu_hides_neither_launches_nor_traffic() -> None:
    device, cpu = (job(**SHARDED, tp=1, pp=1, host_computes=flag) for flag in (0, 1))
    ahead, itself = (estimate_jobs(jobs, CONSTANTS).time for jobs in (device, cpu))
    assert float(ahead.launch) == 0 < float(itself.launch)
    assert float(ahead.data) < float(itself.data)
    assert float(ahead.compute) == float(itself.compute)
