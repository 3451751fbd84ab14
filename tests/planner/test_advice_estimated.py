"""Advice from the planner's own estimate of a run."""

from __future__ import annotations

import pytest
from planner_runs import run

from hpc_train.planner.advice.facts import estimate_for_advice
from hpc_train.planner.advice.lints import run_lints
from hpc_train.planner.constants import default_constants
from hpc_train.planner.model.from_config import jobs_from_config
from hpc_train.planner.model.step_time import estimate_jobs

RUN = ["model=llama_1b", "cluster=dgx_h100", "cluster.nodes=2", "precision=bf16", "parallel=zero3"]
RUN += ["train.global_batch=64", "train.micro_batch=1", "train.sequence_length=2048", "train.steps=1000"]


def about(*more: str) -> set[str]:
    config = run(*RUN, *more)
    return {it.about for it in run_lints(config, estimate_for_advice(config, 16, default_constants()), 16)}


def test_recomputation_and_offload_of_a_model_that_fits_without_are_needless() -> None:
    assert "parallel.recompute.mode" in about("parallel.recompute.mode=full")
    assert "parallel.offload" in about("parallel.offload.optimizer=cpu")
    assert not about() & {"parallel.recompute.mode", "parallel.offload"}


def test_recomputation_of_a_model_that_does_not_fit_without_is_not_needless() -> None:
    large = ["model=llama_70b", "train.sequence_length=8192", "train.micro_batch=4", "parallel.recompute.mode=full"]
    assert "parallel.recompute.mode" not in about(*large)


def test_the_step_is_told_without_saving_and_goals_rest_on_it() -> None:
    config = run(*RUN, "checkpoint.every=1")
    figures, time = (
        estimate_for_advice(config, 16, default_constants()),
        estimate_jobs(jobs_from_config(config, 16), default_constants()).time,
    )
    assert figures.job is not None
    assert figures.job.step_seconds.p50 == pytest.approx(float(time.step - time.checkpoint))
    assert "plan.deadline_days" in about("plan.deadline_days=0.0001")


def test_the_bubble_is_that_of_the_estimate() -> None:
    pipeline = ["parallel=pp", "parallel.pp=4", "parallel.dp_replicate=4", "train.global_batch=32"]
    assert "parallel.pipeline" in about(*pipeline)
    assert "parallel.pipeline" not in about(*pipeline, "train.global_batch=512")


def test_of_a_machine_that_nobody_has_described_nothing_is_said_that_rests_on_its_figures() -> None:
    config = run("model=llama_1b", "parallel.recompute.mode=full", "plan.deadline_days=0.0001")
    figures = estimate_for_advice(config, 2, default_constants())
    assert figures.job is None
    assert figures.memory_without_recompute is None
    assert run_lints(config, figures, 2) == []
