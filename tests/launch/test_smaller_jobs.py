"""Which smaller numbers of nodes a run can go on with, what is refused at submission, and what Slurm's answers mean."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpc_train.config.compose import compose
from hpc_train.config.parallel import AXES, reduce_replicas, resolve_degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.launch.recovery.elastic import check_elastic, find_smaller_size, shrink_config
from hpc_train.launch.recovery.restarting import Allocation, choose_nodes
from hpc_train.launch.slurm.slurm_cli import Answer
from hpc_train.launch.slurm.waiting_time import NodeDemand, estimate_wait, fit_demand
from hpc_train.launch.submit import default_to_slurm
from hpc_train.resilience.exclusion import HARDWARE, Strike, append_strike
from hpc_train.training.run_directory import RunDirectory


def elastic(*overrides: str, least: int = 1) -> RunConfig:
    settings = ["cluster.node.ranks=2", f"resilience.elastic.min_nodes={least}", "train.global_batch=24"]
    return compose(default_to_slurm([*settings, *overrides]))


@pytest.mark.parametrize(
    ("overrides", "nodes", "sizes"),
    [
        ((), 4, {3: 3, 2: 2, 1: 1, 0: 0}),
        (("train.global_batch=16",), 4, {3: 2, 2: 2, 1: 1}),
        (("parallel.tp=2", "parallel.dp_replicate=4"), 4, {3: 3, 1: 1}),
        (("parallel.tp=4",), 4, {3: 2, 1: 0}),
        (("parallel.pp=2", "model.layers=4", "train.micro_batch=4"), 4, {3: 3, 2: 2}),
        (("parallel=fsdp",), 4, {3: 3}),
        (("parallel=fsdp", "parallel.dp_shard=4", "parallel.dp_replicate=2"), 4, {3: 2, 1: 0}),
        (("parallel=fsdp", "parallel.dp_shard=8"), 4, {3: 3}),
    ],
)
def test_the_largest_number_of_nodes_that_shares_the_batch(
    overrides: Sequence[str], nodes: int, sizes: dict[int, int]
) -> None:
    config = elastic(*overrides)
    assert {usable: find_smaller_size(config, nodes, usable) for usable in sizes} == sizes


def test_what_stays_in_a_smaller_world_and_what_gets_less() -> None:
    config = elastic(
        "parallel=fsdp", "parallel.dp_replicate=3", "parallel.dp_shard=2", "parallel.tp=2", "parallel.cp=2"
    )
    smaller = shrink_config(config, 24, 16)
    degrees = resolve_degrees(smaller.parallel, 16)
    assert dict(zip(AXES, degrees.sizes, strict=True)) == {
        "pp": 1,
        "dp_replicate": 2,
        "dp_shard": 2,
        "cp": 2,
        "tp": 2,
    }
    assert smaller.cluster.nodes == 8
    assert (smaller.train, smaller.model, smaller.optim) == (config.train, config.model, config.optim)
    assert shrink_config(config, 24, 24) is config
    assert shrink_config(compose([]), 4, 2).parallel == compose([]).parallel


def test_every_smaller_world_is_used_whole_or_refused() -> None:
    parallel = elastic("parallel=fsdp", "parallel.dp_replicate=6", "parallel.dp_shard=2", "parallel.tp=2").parallel
    for world in range(1, 25):
        if world % 4:
            with pytest.raises(UserError, match="not a multiple of 4, the product of all degrees but dp_replicate"):
                reduce_replicas(parallel, 24, world)
        else:
            assert math.prod(resolve_degrees(reduce_replicas(parallel, 24, world), world).sizes) == world


@pytest.mark.parametrize(
    ("overrides", "least", "nodes", "message"),
    [
        ((), 4, 4, "resilience.elastic.min_nodes=4: the run has 4 nodes; use at most 3"),
        ((), 1, 1, "resilience.elastic.min_nodes=1: the run has 1 node; leave it out"),
        (("resilience.restarts=0",), 1, 2, "goes on with fewer nodes by a restart, and those are off; use "),
        (("launch.points_per_job=2",), 1, 2, "points that share a job are not started again in it"),
        (("parallel.tp=8",), 2, 4, "no number of nodes from 2 to 3 would do (with 3: parallel: 6 ranks"),
        (("train.global_batch=16",), 3, 4, "(with 3: train.global_batch=16: does not divide over 6 data-parallel"),
    ],
)
def test_settings_that_could_never_have_an_effect(
    overrides: Sequence[str], least: int, nodes: int, message: str
) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        check_elastic(elastic(*overrides, least=least), nodes)


def test_nodes_for_the_next_attempt(tmp_path: Path) -> None:
    folder = RunDirectory(tmp_path, tmp_path / "checkpoints")
    lost = Allocation(("n1", "n2", "n3", "n4"), ("n2",), wanted=4)
    assert list(choose_nodes(elastic(), folder, lost).start) == ["n1", "n3", "n4"]
    assert list(choose_nodes(elastic("train.global_batch=16"), folder, lost).start) == ["n1", "n3"]
    assert list(choose_nodes(elastic(least=4), folder, lost).start) == []
    spare = Allocation(("n1", "n2", "n3", "n4"), ("n2",), wanted=3)
    assert list(choose_nodes(elastic(), folder, spare).start) == ["n1", "n3", "n4"]


@pytest.mark.parametrize(
    ("answer", "seconds"),
    [
        (Answer(0, err="sbatch: Job 9 to start at {start} using 8 processors on nodes node4 in partition batch"), 90),
        (Answer(1, err="allocation failure: Requested node configuration is not available"), None),
        (Answer(124, err="sbatch gave no answer within 30 s"), None),
        (Answer(0, err="sbatch: something else"), None),
    ],
)
def test_what_slurm_says_of_the_missing_nodes(answer: Answer, seconds: float | None, tmp_path: Path) -> None:
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 90))
    asked: list[str] = []

    def ask(command: Sequence[str]) -> Answer:
        asked.extend(command)
        return Answer(answer.code, err=answer.err.replace("{start}", start))

    config = elastic("launch.partition=long", "launch.time_minutes=30", "launch.exclude=n9")
    found = estimate_wait(config, RunDirectory(tmp_path, tmp_path / "c"), 2, ["n1", "n2"], ask)
    assert found == (None if seconds is None else pytest.approx(seconds, abs=5))
    assert {"--nodes=2", "--exclude=n9,n1,n2", "--partition=long", "--time=30"} <= set(asked)


@pytest.mark.parametrize("seconds", [-3600, 3600])
def test_a_wait_is_measured_by_the_clock_that_slurm_answers_by(
    seconds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()

    def ask(command: Sequence[str]) -> Answer:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now + (0 if command[0] == "scontrol" else 90)))
        return Answer(0, f"Configuration data as of {stamp}\n", f"sbatch: Job 9 to start at {stamp} using 8 processors")

    monkeypatch.setattr("time.time", lambda: now + seconds)
    assert estimate_wait(elastic(), RunDirectory(tmp_path, tmp_path / "c"), 2, [], ask) == 90


@pytest.mark.parametrize(
    ("up", "spares", "exclude", "expected"),
    [
        (9, 1, ["n5"], (5, ["n5"])),
        (5, 1, ["n5"], (4, ["n5"])),
        (6, 2, ["n5", "n6"], (4, ["n5", "n6"])),
        (5, 2, ["n5", "n6"], (4, ["n5"])),
        (4, 0, ["n4"], (4, [])),
        (4, 1, ["n4"], (4, [])),
        (2, 1, ["n4"], (5, [])),
        (2, 1, [], (5, [])),
    ],
)
def test_a_requeue_asks_for_no_more_than_slurm_has(
    up: int, spares: int, exclude: list[str], expected: tuple[int, Sequence[str]], tmp_path: Path
) -> None:
    folder = RunDirectory(tmp_path, tmp_path / "c")
    for host in exclude:  # recorded before the decision, and still given up in it
        append_strike(folder.path, Strike(host, HARDWARE, "does not answer", 0))

    def ask(command: Sequence[str]) -> Answer:
        words = dict(word.partition("=")[::2] for word in command)
        if int(words["--nodes"]) > up - len([host for host in words.get("--exclude", "").split(",") if host]):
            return Answer(1, err="allocation failure: Requested node configuration is not available")
        return Answer(0, err="sbatch: Job 9 to start at 2026-11-23T21:38:37 using 4 processors on nodes n[1-4]")

    config = elastic(f"launch.spares={spares}", least=0)
    demand = fit_demand(config, folder, 4, exclude, ask)
    assert (demand.nodes, list(demand.exclude)) == expected
    assert len(demand.concessions) == (demand.nodes < 4 + spares) + len(exclude) - len(demand.exclude)


def test_a_requeue_keeps_its_exclusions_where_slurm_cannot_be_asked(tmp_path: Path) -> None:
    config, folder = elastic("launch.spares=1", least=0), RunDirectory(tmp_path, tmp_path / "c")
    answer = Answer(124, err="sbatch gave no answer within 30 s")
    assert fit_demand(config, folder, 4, ["n2"], lambda command: answer) == NodeDemand(5, ["n2"])
