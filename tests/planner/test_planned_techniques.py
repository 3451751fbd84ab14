"""Plans with products in 8 bits and with adapters."""

from __future__ import annotations

import pytest
from planner_runs import asked, run

from hpc_train.cli.main import main
from hpc_train.errors import UserError
from hpc_train.parallel.rules.check import check_support
from hpc_train.planner.constants import default_constants
from hpc_train.planner.model.from_config import jobs_from_config
from hpc_train.planner.model.step_time import Estimate, estimate_jobs
from hpc_train.planner.rehearsal.rehearse import rehearse_run

RUN = (
    "cluster=dgx_h100", "cluster.nodes=1", "model=llama_8b", "train.sequence_length=4096", "train.global_batch=64",
    "train.micro_batch=1", "parallel.strategy=zero3",
)  # fmt: skip


def estimate(*overrides: str) -> Estimate:
    own = {item.partition("=")[0]: item for item in (*RUN, *overrides)}
    return estimate_jobs(jobs_from_config(run(*own.values()), 8), default_constants())


def test_products_in_8_bits_are_faster_and_less_so_with_a_scale_for_each_row() -> None:
    wide = estimate("precision=bf16")
    tensor, rows, weights = (
        estimate("precision=bf16", f"precision.float8={recipe}")
        for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
    )
    steps = [float(found.time.step) for found in (tensor, rows, weights, wide)]
    assert steps == sorted(steps)
    assert steps[0] > 0.55 * steps[3], "attention, the head and elementwise work stay in 16 bits"
    assert float(rows.mfu) > float(wide.mfu), "of the same peak"
    assert float(rows.time.spread) > float(wide.time.spread)


def test_weights_gathered_in_8_bits_are_faster_where_the_network_is_slow() -> None:
    words = ("precision=bf16", "precision.float8=tensorwise", "cluster.node.gpu_link_gb_s=10")
    wide, narrow = estimate(*words), estimate(*words, "precision.float8_gather=true")
    assert float(narrow.time.data) < 0.8 * float(wide.time.data)


def test_experts_are_not_planned_compiled() -> None:
    with pytest.raises(UserError, match="has experts, whose numbers of tokens are known only as they run"):
        asked("cluster=dgx_h100", "cluster.nodes=1", "model=llama_moe_tiny", "parallel.compile=true")


def test_a_card_without_8_bits_is_refused() -> None:
    with pytest.raises(UserError, match="cluster=dgx_a100 has no products in 8 bits"):
        jobs_from_config(run("cluster=dgx_a100", "model=llama_1b", "precision=fp8", "train.global_batch=8"), 8)


GATHER = ("precision=fp8", "precision.float8=tensorwise", "precision.float8_gather=true")


@pytest.mark.parametrize(
    "more",
    [("precision=fp8",), GATHER, ("precision=bf16", "adapter.kind=lora")],
    ids=["fp8", "gather", "lora"],
)
def test_candidates_are_accepted(more: tuple[str, ...]) -> None:
    plan = asked(*RUN, "parallel.cp=1", *more, top=5)
    assert plan.best is not None
    for candidate in plan.candidates:
        check_support(candidate.config, 8)
        assert candidate.config.parallel.tp == 1 or "precision=fp8" not in more


def test_moments_in_8_bits_are_a_quarter_and_keep_their_blocks_whole() -> None:
    full, eight = estimate("precision=bf16"), estimate("precision=bf16", "optim.state=8bit")
    share = float(eight.memory.optimizer.max() / full.memory.optimizer.max())
    assert share == pytest.approx((1 + 4 / 128) / 4, rel=0.01)
    words = (*RUN, "precision=bf16", "optim.state=8bit", "model.feed_forward=14464", "model.vocab_size=8192")
    plan = asked(*words, "parallel.cp=1", top=50)  # 113 blocks of 128 in a row
    assert plan.best is not None
    for candidate in plan.candidates:
        check_support(candidate.config, 8)
        assert candidate.config.parallel.tp == 1


def test_frozen_weights_have_neither_gradients_nor_moments() -> None:
    whole, adapted = estimate("precision=bf16"), estimate("precision=bf16", "adapter.kind=lora")
    assert adapted.memory.optimizer.max() < 0.02 * whole.memory.optimizer.max()
    assert adapted.memory.gradients.max() < 0.02 * whole.memory.gradients.max()
    assert adapted.memory.parameters.max() == pytest.approx(whole.memory.parameters.max(), rel=0.02)
    assert 0.6 * float(whole.time.step) < float(adapted.time.step) < float(whole.time.step)
    assert adapted.mfu < whole.mfu, "gradients of frozen weights are not computed, and so not counted"


SMALL = (
    "cluster=dgx_h100", "cluster.nodes=1", "precision=bf16", "train.sequence_length=1024", "train.micro_batch=1",
    "train.global_batch=16", "model=llama_1b", "model.layers=4", "model.hidden=1024", "model.heads=8",
    "model.kv_heads=4", "model.feed_forward=4096", "model.vocab_size=16384", "adapter.kind=lora",
    "parallel.strategy=zero3",
)  # fmt: skip


def test_memory_of_products_in_8_bits_is_what_a_rehearsal_counts() -> None:
    words = (
        "cluster=dgx_h100", "cluster.nodes=1", "precision=bf16", "precision.float8=tensorwise", "model=llama_125m",
        "model.layers=3", "model.hidden=2048", "model.heads=16", "model.feed_forward=8192", "model.vocab_size=1024",
        "train.sequence_length=512", "train.micro_batch=2", "train.global_batch=32", "parallel.strategy=zero3",
    )  # fmt: skip
    counted, planned = [], []
    for more in ((), ("precision.float8_gather=true",)):
        rehearsal = rehearse_run(run(*words, *more), 8, "0", 1)
        assert rehearsal.ranks[0].counted.peak is not None
        counted.append(rehearsal.ranks[0].counted.peak)
        planned.append(sum(rehearsal.planned[0].values()))
        assert planned[-1] == pytest.approx(counted[-1], rel=0.1)
    saved = 2 * (4 * 2048**2 + 3 * 2048 * 8192)
    assert planned[0] - planned[1] == pytest.approx(saved, rel=0.01), "a byte of each weight of two gathered blocks"
    assert counted[0] - counted[1] >= saved


@pytest.mark.parametrize("base", ["full", "bf16"])
def test_memory_with_adapters_is_what_a_rehearsal_counts(base: str) -> None:
    found = rehearse_run(run(*SMALL, f"adapter.base={base}"), 8, "0", 1)
    (built,) = found.ranks
    assert built.counted.peak is not None
    assert sum(found.planned[0].values()) == pytest.approx(built.counted.peak, rel=0.1)


def test_adapters_on_few_layers_cost_less_than_on_all() -> None:
    """Each adapter reads its layer's input and writes its output; layers without one do neither."""
    words = ("precision=bf16", "adapter.kind=lora")
    one, two, every = (
        float(estimate(*words, f"adapter.targets=[{targets}]").time.step) for targets in ("'*.v'", "'*.q','*.v'", "")
    )
    assert one < two < 0.95 * every


def test_a_base_in_bf16_takes_half_of_the_memory() -> None:
    words = ("precision=bf16", "adapter.kind=lora", "model.vocab_size=512")
    full, low = estimate(*words), estimate(*words, "adapter.base=bf16")
    assert low.memory.parameters.max() == pytest.approx(full.memory.parameters.max() / 2, rel=0.02)


def test_a_base_that_the_trainer_refuses_is_refused_by_the_plan_in_the_same_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["model=llama_tiny", "adapter=qlora", "cluster=dgx_h100", "cluster.nodes=1", "precision=bf16"]
    assert main(["plan", *words]) == 2
    planned = capsys.readouterr().err
    assert main(["train", *words]) == 2
    assert planned == capsys.readouterr().err
    assert "the base is read from files at every start" in planned
