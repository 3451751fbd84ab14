"""Jobs whose layout and speed were published.

hpc_train's own estimate of the same layout has the speed in its band, and its plan of the job, which is free to choose,
has a layout that the experts' one may equal: their bands meet.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from planner_runs import asked, run

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
ON_H100 = ("cluster=dgx_h100",)
TENSOR = ("parallel.tensor.sequence=true", "parallel.tensor.asynchronous=true")


@dataclass(frozen=True)
class FamousJob:
    """A published layout and its step."""

    seconds: float
    gpus: int
    job: tuple[str, ...]
    """Model, machine and batch: what a plan is asked about."""
    degrees: tuple[str, ...]
    techniques: tuple[str, ...]
    fixed: tuple[str, ...] = ()
    """Settings that the plan has to keep."""


FAMOUS = {
    # github.com/NVIDIA/dgxc-benchmarking@v25.02.02, llama3.1/README_8b.md, README_70b.md and nemo_megatron
    "llama_8b": FamousJob(
        12.8, 8,
        ("model=llama_8b", *ON_H100, "cluster.nodes=1", "train.global_batch=128", "train.sequence_length=8192"),
        ("parallel.tp=1", "parallel.pp=1", "parallel.cp=2"), ("parallel.dp_shard=4", *ZERO1),
    ),
    "llama_70b": FamousJob(
        14.61, 64,
        ("model=llama_70b", *ON_H100, "cluster.nodes=8", "train.global_batch=128", "train.sequence_length=8192"),
        ("parallel.tp=4", "parallel.pp=4", "parallel.cp=2"),
        ("parallel.dp_shard=2", *ZERO1, *TENSOR, INTERLEAVED, "parallel.pipeline.virtual_stages=5"),
    ),
    "gpt3_175b": FamousJob(
        8.31, 128,
        ("model=gpt3_175b", *ON_H100, "cluster.nodes=16", "train.global_batch=256", "train.sequence_length=2048"),
        ("parallel.tp=4", "parallel.pp=8", "parallel.cp=1"),
        ("parallel.dp_shard=4", *ZERO1, *TENSOR, INTERLEAVED, "parallel.pipeline.virtual_stages=12"),
        fixed=("parallel.recompute.offload=false",),  # no measured run has it
    ),
    # Megatron-Core 0.9's README: 468 TFLOP/s
    "mixtral_8x7b": FamousJob(
        2.9, 64,
        ("model=mixtral_8x7b", *ON_H100, "cluster.nodes=8", "train.global_batch=256", "train.sequence_length=4096"),
        ("parallel.tp=1", "parallel.pp=4", "parallel.cp=1", "parallel.ep=8"),
        ("parallel.dp_shard=16", *ZERO1, INTERLEAVED, "parallel.pipeline.virtual_stages=8"),
    ),
    # github.com/allenai/OLMo-core@7e58d1289 README.md: 10,000 tokens/s of a GPU; its HSDP shards over one node, and its
    # PyTorch of 2024 had FlashAttention-2
    "olmo2_7b": FamousJob(
        8192 / 10_000, 8,
        ("model=olmo2_7b", *ON_H100, "cluster.nodes=1", "train.global_batch=16", "train.sequence_length=4096"),
        ("parallel.tp=1", "parallel.pp=1", "parallel.cp=1"),
        ("parallel.strategy=zero3", "parallel.dp_replicate=1", "parallel.dp_shard=8", "train.micro_batch=2"),
        fixed=("model.attention=flash",),
    ),
}  # fmt: skip
BEYOND_A_NODE = ("llama_70b", "gpt3_175b", "mixtral_8x7b")
"""Jobs whose plans take several seconds."""


def estimate(ranks: int, *overrides: str) -> Estimate:
    return estimate_jobs(jobs_from_config(run(*overrides), ranks), default_constants())


@pytest.mark.parametrize("name", FAMOUS)
def test_the_published_step_is_in_the_band(name: str) -> None:
    it = FAMOUS[name]
    given = {word.split("=")[0] for word in it.techniques}
    base = [word for word in BASE if word.split("=")[0] not in given]
    time = estimate(it.gpus, *base, *it.job, *it.degrees, *it.techniques, *it.fixed).time
    assert take_single(time.quantile(0.1)) < it.seconds < take_single(time.quantile(0.9))


@pytest.mark.parametrize("name", [pytest.param(it, marks=[pytest.mark.long] * (it in BEYOND_A_NODE)) for it in FAMOUS])
def test_the_experts_layout_is_the_first_or_within_its_band(name: str) -> None:
    """Their degrees, in the variant that hpc_train runs best: with what fits and may be combined."""
    it = FAMOUS[name]
    free, expert = (asked(*it.job, *it.fixed, "precision=bf16", *degrees, top=1).best for degrees in ((), it.degrees))
    assert free is not None
    assert expert is not None
    assert expert.fits == "yes"
    assert free.step is not None
    assert expert.step is not None
    assert expert.step.p10 < free.step.p90
    assert free.step.p50 <= expert.step.p50 * 1.02, "a search of all layouts finds no slower one"


def test_llama_405b_on_16384_gpus_has_the_published_mfu() -> None:
    """Meta's layout reached 41 % (Llama team 2024, arXiv:2407.21783, table 4)."""
    assert take_single(estimate(16384, *BASE, *LLAMA_405B).mfu) == pytest.approx(0.41, abs=0.03)
