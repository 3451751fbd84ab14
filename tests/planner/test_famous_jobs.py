"""Jobs whose layout and speed were published: hpc_train's own estimate of the same layout has the speed in its band."""

from __future__ import annotations

import pytest
from planner_runs import run

from hpc_train.planner.constants import default_constants
from hpc_train.planner.model.from_config import jobs_from_config
from hpc_train.planner.model.jobs import take_single
from hpc_train.planner.model.step_time import Estimate, estimate_jobs

BASE = ("precision=bf16", "parallel.compile=true", "parallel.recompute.mode=none", "train.micro_batch=1")
ZERO1 = ("parallel.strategy=zero1", "parallel.dp_replicate=1")
INTERLEAVED = "parallel.pipeline.schedule=interleaved_1f1b"
LLAMA_405B = (
    "model=llama_405b", "cluster=meta_roce_24k", "cluster.nodes=2048", "parallel.tp=8", "parallel.pp=16",
    "parallel.dp_shard=128", *ZERO1, INTERLEAVED, "parallel.pipeline.virtual_stages=8", "parallel.tensor.sequence=true",
    "parallel.tensor.asynchronous=true", "train.global_batch=2048", "train.sequence_length=8192",
)  # fmt: skip
TENSOR = ("parallel.tensor.sequence=true", "parallel.tensor.asynchronous=true")
TIMED: dict[str, tuple[float, int, tuple[str, ...]]] = {
    # github.com/NVIDIA/dgxc-benchmarking@v25.02.02, llama3.1/README_8b.md and nemo_megatron
    "llama_8b": (12.8, 8, (
        "model=llama_8b", "cluster=dgx_h100", "cluster.nodes=1", "parallel.cp=2", "parallel.dp_shard=4", *ZERO1,
        "train.global_batch=128", "train.sequence_length=8192",
    )),
    "gpt3_175b": (8.31, 128, (
        "model=gpt3_175b", "cluster=dgx_h100", "cluster.nodes=16", "parallel.tp=4", "parallel.pp=8", *TENSOR,
        "parallel.dp_shard=4", *ZERO1, INTERLEAVED, "parallel.pipeline.virtual_stages=12",
        "train.global_batch=256", "train.sequence_length=2048",
    )),
    # Megatron-Core 0.9's README: 468 TFLOP/s
    "mixtral_8x7b": (2.9, 64, (
        "model=mixtral_8x7b", "cluster=dgx_h100", "cluster.nodes=8", "parallel.pp=4", "parallel.ep=8",
        "parallel.dp_shard=16", *ZERO1, INTERLEAVED, "parallel.pipeline.virtual_stages=8", "train.global_batch=256",
        "train.sequence_length=4096",
    )),
}  # fmt: skip
"""Seconds of a step, GPUs, and the layout."""


def estimate(ranks: int, *overrides: str) -> Estimate:
    return estimate_jobs(jobs_from_config(run(*BASE, *overrides), ranks), default_constants())


@pytest.mark.parametrize("name", TIMED)
def test_the_published_step_is_in_the_band(name: str) -> None:
    seconds, ranks, layout = TIMED[name]
    time = estimate(ranks, *layout).time
    assert take_single(time.quantile(0.1)) < seconds < take_single(time.quantile(0.9))


def test_llama_405b_on_16384_gpus_has_the_published_mfu() -> None:
    """Meta's layout reached 41 % (Llama team 2024, arXiv:2407.21783, table 4)."""
    assert take_single(estimate(16384, *LLAMA_405B).mfu) == pytest.approx(0.41, abs=0.03)
