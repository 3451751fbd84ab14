"""What points ask of Slurm: by the launcher's settings, and by their own parallel degrees and cluster."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from hpc_train.config.compose import compose
from hpc_train.config.launch import LaunchConfig
from hpc_train.config.plain_config import config_to_dict
from hpc_train.errors import UserError
from hydra_plugins.hpc_train_launchers._config import HpcLocalConf, HpcSlurmConf
from hydra_plugins.hpc_train_launchers._slurm import PointArray, PointResources, choose_resources, share_parallel_points

NOT_FOR_ANY_APPLICATION = {
    *(
        "kind",
        "chain",
        "placement",
        "compact_nodes",
        "bind",
        "spares",
        "timeout_seconds",
        "rendezvous_seconds",
        "wrap",
    ),  # of our training
    "cancel_seconds",  # of `hpc-train cancel`
    *("ranks", "threads"),  # hpc_local's; Slurm has ranks_per_node and the CPUs of a task
}
ELSEWHERE = {"snapshot", "modules", "container", "points"}
"""The code of another application is not ours to freeze, nor is its environment ours to load: `setup` and `python`."""


def ours(*overrides: str) -> DictConfig:
    """A point that is a configuration of hpc_train."""
    return OmegaConf.create(config_to_dict(compose(["cluster=dgx_h100", "launch=slurm", *overrides])))


def shape(settings: HpcSlurmConf, point: DictConfig | None = None) -> PointResources:
    return choose_resources(settings, OmegaConf.create({"x": 1}) if point is None else point, Path("/scratch/sweep"))


def test_settings_are_those_of_conf_launch() -> None:
    names = {item.name for kind in (HpcLocalConf, HpcSlurmConf) for item in fields(kind)}
    missing = {item.name for item in fields(LaunchConfig)} - names - NOT_FOR_ANY_APPLICATION
    assert {name for name in missing if name.split("_")[0] not in ELSEWHERE} == set()
    for item in fields(LaunchConfig):
        default = getattr(HpcSlurmConf(name="hpc_train"), item.name, None)
        if default is not None and item.name not in NOT_FOR_ANY_APPLICATION:
            assert default == getattr(LaunchConfig(), item.name), item.name


def test_points_of_different_degrees_ask_for_different_nodes() -> None:
    small, large = (
        shape(HpcSlurmConf(), ours("parallel.tp=8")),
        shape(HpcSlurmConf(), ours("parallel.pp=3", "parallel.tp=8")),
    )
    assert (small.nodes, small.ranks_per_node, small.ranks) == (1, 8, 8)
    assert (large.nodes, large.ranks_per_node, large.ranks) == (3, 8, 24)
    assert small.options["gpus_per_node"] == 8
    assert small.options["exclusive"] is True


def test_any_other_application_says_it_itself() -> None:
    found = shape(HpcSlurmConf(nodes=2, ranks_per_node=4, gpus_per_node=4, memory_gib=8, cpus_per_rank=3))
    assert (found.nodes, found.ranks_per_node) == (2, 4)
    wanted = {"gpus_per_node": 4, "cpus_per_task": 3, "mem": "8192M", "nodes": 2, "ntasks_per_node": 4}
    assert {name: found.options[name] for name in wanted} == wanted
    alone = shape(HpcSlurmConf())
    assert alone.ranks == 1
    assert "gpus_per_node" not in alone.options


def test_a_cluster_and_a_parallel_of_somebody_else_mean_nothing_to_us() -> None:
    point = OmegaConf.create({"cluster": {"agglomerative": True}, "parallel": 7})
    assert shape(HpcSlurmConf(), point).ranks == 1


@pytest.mark.parametrize(
    ("settings", "point", "message"),
    [
        ({"time_minutes": 0}, {}, r"hydra\.launcher\.time_minutes=0: must be >= 1"),
        ({"signal_seconds": 600, "time_minutes": 5}, {}, r"hydra\.launcher\.signal_seconds=600: not before the end"),
        ({"extra": {"array": "0-9"}}, {}, r"hydra\.launcher\.extra\.array: cannot be set"),
        ({"extra": {"comment": "a\nrm -rf ~"}}, {}, r"hydra\.launcher\.extra=.*: control characters"),
        ({"ranks_per_node": 0}, {}, r"hydra\.launcher\.ranks_per_node=0: must be >= 1"),
        ({"nodes": 1}, {"parallel": {"tp": 16}}, r"tp 16 .* = 16, but the world has 8|has no solution"),
    ],
)
def test_what_makes_no_sense_is_one_line(settings: dict[str, Any], point: dict[str, Any], message: str) -> None:
    config = OmegaConf.merge(ours(), point) if point else OmegaConf.create({"x": 1})
    assert isinstance(config, DictConfig)
    with pytest.raises(UserError, match=message) as refused:
        shape(HpcSlurmConf(name="app", **settings), config)
    assert str(refused.value).isprintable()


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 60))
def test_never_more_points_run_than_were_allowed(sizes: list[int], most: int) -> None:
    some = PointResources(1, 1, {})
    arrays = [PointArray(some, tuple(range(size))) for size in sizes]
    at_once, waits = share_parallel_points(arrays, most)
    assert min(at_once) >= 1
    assert all(after is None or after < index for index, after in enumerate(waits))
    started: dict[int, int] = {}
    for index, after in enumerate(waits):  # arrays that wait for one another are never there together
        lane = index if after is None else next(lane for lane, last in started.items() if last == after)
        started[lane] = index
    assert sum(at_once[lane] for lane in started) <= max(most, 0) or sum(sizes) <= most
