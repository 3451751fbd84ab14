"""The tests' own short cut to a configuration leads where the long way does."""

from __future__ import annotations

import pytest
from planner_runs import run

from hpc_train.config.compose import compose


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("cluster=dgx_a100", "model=llama_7b", "precision=bf16", "parallel.tp=2", "train.global_batch=64"),
        ("parallel=3d", "plan.nodes=[1,4]", "plan.tokens=1e10", "cluster.nodes=8"),
        ("cluster=leonardo", "model=gpt3_175b", "parallel=zero1", "precision=fp16", "checkpoint=none", "data=digits"),
        ("cluster=dgx_h100", "model=vit_large", "parallel=hsdp", "container=pyxis", "launch=slurm", "launch.ranks=8"),
        ("cluster=dgx_a100", "parallel=auto", "parallel.tp=2", "train.micro_batch=2"),
        ("cluster=local", "model=custom", "model.name=mine", "checkpoint=none", "launch.ranks=2"),
    ],
)
def test_a_run_is_what_compose_makes_of_it(overrides: tuple[str, ...]) -> None:
    assert run(*overrides) == compose(overrides)
