"""Hybrid sharding: one copy of the model in each NVLink domain, where the user leaves it to the cluster."""

from __future__ import annotations

import pytest

from hpc_train.config.compose import compose
from hpc_train.config.parallel import Degrees, ParallelConfig, resolve_degrees
from hpc_train.config.plain_config import config_from_dict, config_to_dict
from hpc_train.errors import UserError

SLURM = "launch=slurm"


def parallel(*overrides: str) -> ParallelConfig:
    return compose(("parallel=hsdp", *overrides)).parallel


@pytest.mark.parametrize(
    ("overrides", "world", "degrees"),
    [
        (("cluster=dgx_h100", SLURM), 32, Degrees(1, 4, 8, 1, 1)),
        (("cluster=dgx_h100", SLURM, "parallel.tp=2", "parallel.cp=2"), 32, Degrees(1, 4, 2, 2, 2)),
        (("cluster=dgx_h100", SLURM, "parallel.pp=2"), 32, Degrees(2, 2, 8, 1, 1)),
        (("cluster=gb200_nvl72", SLURM), 144, Degrees(1, 2, 72, 1, 1)),
        (("cluster=frontier", SLURM), 16, Degrees(1, 2, 8, 1, 1)),
        (("cluster=slurm", SLURM, "cluster.node.ranks=4"), 12, Degrees(1, 3, 4, 1, 1)),
        (("cluster=dgx_h100",), 8, Degrees(1, 1, 8, 1, 1)),
        (("launch.ranks=4",), 4, Degrees(1, 1, 4, 1, 1)),
    ],
)
def test_a_copy_of_the_model_fills_an_nvlink_domain_or_a_node(
    overrides: tuple[str, ...], world: int, degrees: Degrees
) -> None:
    assert resolve_degrees(parallel(*overrides), world) == degrees


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_every_zero_strategy_can_be_hybrid(strategy: str) -> None:
    config = compose((f"parallel.strategy={strategy}", "parallel.dp_replicate=-1", "cluster=dgx_h100", SLURM)).parallel
    assert resolve_degrees(config, 16) == Degrees(1, 2, 8, 1, 1)


def test_what_the_user_says_stands() -> None:
    assert resolve_degrees(parallel("cluster=dgx_h100", SLURM, "parallel.dp_shard=4"), 16) == Degrees(1, 4, 4, 1, 1)
    assert resolve_degrees(parallel("cluster=dgx_h100", SLURM, "parallel.dp_replicate=2"), 16) == Degrees(1, 2, 8, 1, 1)


def test_the_number_is_part_of_the_frozen_config() -> None:
    config = compose(("parallel=hsdp", "cluster=dgx_h100", SLURM))
    assert config.parallel.dp_shard == 8
    assert config_from_dict(config_to_dict(config)) == config


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("cluster=dgx_h100", SLURM, "parallel.tp=3"), r"an NVLink domain of 8 ranks needs a dp_shard of 8 / \(tp 3 x"),
        (("cluster=dgx_h100", SLURM, "parallel.tp=8"), "not a whole number above 1; give parallel.dp_shard"),
        (("cluster=slurm", SLURM), "one copy of the model in a node of 1 ranks needs"),
    ],
)
def test_a_domain_that_does_not_fit_is_one_line(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        parallel(*overrides)
    assert "\n" not in str(caught.value)


def test_a_world_that_the_domain_does_not_divide_prints_the_equation() -> None:
    with pytest.raises(UserError, match=r"dp_replicate \? x dp_shard 8 x cp 1 x tp 1 = 12 has no solution"):
        resolve_degrees(parallel("cluster=dgx_h100", SLURM), 12)
