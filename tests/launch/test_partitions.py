"""What a partition can never run is refused before sbatch is called, with what would fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from hpc_train.config.compose import compose
from hpc_train.errors import UserError
from hpc_train.launch.slurm.partitions import PartitionNodes, check_partition, parse_minutes, parse_sinfo
from hpc_train.launch.slurm.request import make_request
from hpc_train.launch.slurm.slurm_cli import Answer
from hpc_train.launch.submit import default_to_slurm
from hpc_train.training.run_directory import RunDirectory

RECORDED = """\
batch*|up|1-00:00:00|4|8|8192|(null)
urgent|up|1-00:00:00|4|8|8192|(null)
"""
SITE = """\
standard*|up|2-00:00:00|100|128|257000+|(null)
debug|up|30:00|2|128|257000|(null)
gpu|up|1-00:00:00|16|64|515000|gpu:a100:4(S:0-3),nvme:1
gpu|up|1-00:00:00|4|64|1031000|gpu:a100:8
long|up|infinite|8|64|515000|gpu:4
old|down|infinite|8|16|64000|gpu:k80:2
"""


def check(sinfo: Answer, *overrides: str) -> None:
    config = compose(default_to_slurm(overrides))
    folder = RunDirectory(Path("/data/run"), Path("/data/run/checkpoints"))

    def ask(command: Sequence[str]) -> Answer:
        assert command[0] == "sinfo"
        if command[-1] == "--nodes=node[1-3],gone":  # as recorded: a node that is not there is not counted
            return Answer(0, RECORDED.replace("|4|", "|3|"))
        return sinfo

    check_partition(config, make_request(config, folder), ask)


def test_sinfo_as_recorded() -> None:
    day = 24 * 60
    assert parse_sinfo(RECORDED) == [
        PartitionNodes("batch", True, True, day, 4, 8, 8192, 0),
        PartitionNodes("urgent", False, True, day, 4, 8, 8192, 0),
    ]
    assert [kind.gpus for kind in parse_sinfo(SITE)] == [0, 0, 4, 8, 4, 2]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("infinite", None), ("30:00", 30), ("2:00:00", 120), ("1-00:00:00", 1440), ("7-12:30:00", 10830), ("n/a", None)],
)
def test_time_limits(limit: str, expected: int | None) -> None:
    assert parse_minutes(limit) == expected


@pytest.mark.parametrize(
    "overrides",
    [
        ["cluster.nodes=100"],
        ["launch.partition=debug", "launch.time_minutes=30"],
        ["launch.partition=gpu", "cluster.node.gpus=4", "cluster.nodes=20"],
        ["launch.partition=gpu", "cluster.node.gpus=8", "cluster.nodes=4"],
        ["launch.partition=long", "launch.time_minutes=100000"],
        ["launch.partition='gpu,long'", "cluster.node.gpus=4", "cluster.nodes=16"],
    ],
)
def test_what_fits(overrides: list[str]) -> None:
    check(Answer(0, SITE), *overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["launch.partition=nowhere"], "launch.partition=nowhere: invalid partition; this cluster has standard, debug"),
        (
            ["cluster.nodes=101"],
            "cluster.nodes=101: partition standard has 100 suitable nodes, for at most 100 ranks at 1",
        ),
        (["launch.partition=debug"], "launch.time_minutes=60: partition debug allows 30; use launch.time_minutes=30"),
        (["launch.partition=debug"], "it fits in partition standard, gpu, long"),
        (
            ["cluster.node.gpus=4"],
            "cluster.node.gpus=4: the nodes of partition standard have 0; it has none; it fits in",
        ),
        (
            ["launch.partition=gpu", "cluster.node.gpus=8", "cluster.nodes=5"],
            "has 4 suitable nodes, for at most 32 ranks at 8",
        ),
        (["launch.partition=gpu", "cluster.node.gpus=16"], "have 8; use cluster.node.gpus=8"),
        (["launch.memory_gib=2000"], "launch.memory_gib=2000: the nodes of partition standard have 250"),
        (["launch.cpus_per_rank=200"], "1 ranks of 200 CPUs per node: the nodes of partition standard have 128"),
        (["launch.partition=old"], "launch.partition=old: it is down; it fits in partition standard"),
    ],
)
def test_what_does_not_fit_and_what_would(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as refused:
        check(Answer(0, SITE), *overrides)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_excluded_nodes_leave_enough() -> None:
    check(Answer(0, RECORDED), "cluster.nodes=1", "launch.exclude='node[1-3],gone'")
    with pytest.raises(UserError) as refused:
        check(Answer(0, RECORDED), "cluster.nodes=2", "launch.exclude='node[1-3],gone'")
    assert str(refused.value) == (
        "launch.exclude=node[1-3],gone: leaves 1 of the 4 nodes of partition batch, and this run needs 2; exclude "
        "fewer, or use a smaller cluster.nodes"
    )


@pytest.mark.parametrize(
    "sinfo", [Answer(127, err="sinfo is not on the PATH"), Answer(0, ""), Answer(0, "a|b\nx|y|z\n")]
)
def test_what_sinfo_does_not_say_is_left_to_sbatch(sinfo: Answer) -> None:
    check(sinfo, "cluster.nodes=1000", "launch.partition=any")
