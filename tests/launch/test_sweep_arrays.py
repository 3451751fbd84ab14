"""What is asked of Slurm for a sweep, and what the script of an array does: read by bash, under stubs that tell."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweeps import freeze, make

from hpc_train.launch.local.node_sharing import list_visible_gpus, make_gpu_share_environment
from hpc_train.launch.slurm.array_size import DEFAULT_ARRAY_SIZE, max_array_size, split_evenly
from hpc_train.launch.slurm.slurm_cli import Answer
from hpc_train.launch.sweep import submit_sweep
from hpc_train.launch.sweep.arrays import JobArray, make_arrays, share_throttle
from hpc_train.launch.sweep.sweep_directory import SweepDirectory

STUB = """#!/bin/bash
name="$(basename "$0")"
printf '%s\\n' "$name $*" >>"$STUBS/said"
[ "$name" != squeue ] || echo "RUNNING None"
[ "$name" = srun ] || exit 0
logs="$HPC_TRAIN_RENDEZVOUS"
point="$(basename "$(dirname "$(dirname "$logs")")")"
printf '%s\\n' "$HPC_TRAIN_SHARE" >"$logs/share"
ends="$(sed -n "s/^$point //p" "$STUBS/ends")"
case "$ends" in
  requeue) touch "$logs/requeue"; exit 75 ;;
  fail) exit 3 ;;
esac
touch "$logs/done"
"""


@given(st.integers(0, 500), st.integers(1, 60))
def test_a_long_list_is_cut_into_as_few_parts_as_can_be(count: int, most: int) -> None:
    parts = split_evenly(count, most)
    assert [index for part in parts for index in part] == list(range(count))
    assert len(parts) == -(-count // most)
    assert all(0 < len(part) <= most for part in parts)
    assert max(map(len, parts), default=0) - min(map(len, parts), default=0) <= 1


@pytest.mark.parametrize(
    ("answer", "most"),
    [
        (Answer(0, "MaxArraySize            = 10001\nSchedulerParameters = bf_interval=1"), 10001),
        (Answer(0, "MaxArraySize            = 10001\nSchedulerParameters = a=1,max_array_tasks=500,b"), 500),
        (Answer(0, "MaxArraySize            = 0\n"), 0),
        (Answer(0, "nothing of the kind"), DEFAULT_ARRAY_SIZE),
        (Answer(127, err="scontrol is not on the PATH"), DEFAULT_ARRAY_SIZE),
    ],
)
def test_the_largest_array_is_what_the_controller_says(answer: Answer, most: int) -> None:
    assert max_array_size(lambda _: answer) == most


@given(st.one_of(st.none(), st.integers(1, 40)), st.lists(st.integers(1, 30), min_size=1, max_size=12))
def test_no_more_points_run_at_a_time_than_were_asked_for_however_they_are_split(
    most: int | None, sizes: list[int]
) -> None:
    limits = share_throttle(most, sizes)
    assert len(limits) == len(sizes)
    if most is None:
        assert limits == [(None, None)] * len(sizes)
        return
    lanes: Counter[int] = Counter()
    lane_of: list[int] = []
    for index, (running, behind) in enumerate(limits):
        assert running is not None
        assert running >= 1
        assert behind is None or behind < index
        lane_of.append(index if behind is None else lane_of[behind])
        lanes[lane_of[index]] = max(lanes[lane_of[index]], running)
    assert lanes.total() <= most
    assert len(lanes) == len(limits) if most >= len(sizes) else lanes.total() == most
    followers = [behind for _, behind in limits if behind is not None]
    assert len(followers) == len(set(followers)), "one after the other, not two after one"


def arrays(path: Path, *words: str, most: int = 1001) -> list[JobArray]:
    folder, frozen = freeze(path, *words)
    return make_arrays(frozen.points, folder, None, most, frozen.config_of)


def options(array: JobArray) -> dict[str, Any]:
    names = ("nodes", "ntasks_per_node", "cpus_per_task", "gpus_per_node", "mem", "time")
    found = {name: array.request.parameters[name] for name in names if name in array.request.parameters}
    return {**found, "array": array.request.parameters["additional_parameters"]["array"]}


def test_every_shape_is_one_array_in_the_order_of_the_points(tmp_path: Path) -> None:
    one, two = arrays(tmp_path, "parallel.tp=2,4", "cluster.node.ranks=2", "train.seed=range(3)", "parallel=ddp")
    assert options(one) == {"nodes": 1, "ntasks_per_node": 2, "cpus_per_task": 4, "time": 60, "array": "0-2"}
    assert options(two) == {**options(one), "nodes": 2}
    assert [len(points) for points in (*one.elements, *two.elements)] == [1] * 6
    assert (one.ranks, two.ranks) == (2, 4)
    three = arrays(tmp_path, "launch.time_minutes=10,20,10", "train.seed=1,2", "optim.lr=1,2")
    assert [(options(array)["time"], len(array.points)) for array in three] == [(10, 4), (20, 4)]


def test_split_and_throttled(tmp_path: Path) -> None:
    found = arrays(tmp_path, "train.seed=range(7)", "launch.parallel_points=5", most=3)
    assert [options(array)["array"] for array in found] == ["0-1%2", "0-1%1", "0-2%2"]
    assert [array.behind for array in found] == [None] * 3
    found = arrays(tmp_path, "train.seed=range(7)", "launch.parallel_points=2", most=3)
    assert [options(array)["array"] for array in found] == ["0-1%1", "0-1%1", "0-2%1"]
    assert [array.behind for array in found] == [None, None, 0]
    assert len({point for array in found for point in array.points}) == 7


def test_a_pack_is_so_many_times_one_point_and_no_more(tmp_path: Path) -> None:
    words = ("launch.points_per_job=3", "train.seed=range(7)", "cluster=dgx_h100", "cluster.node.cpus=108")
    (array,) = arrays(tmp_path, *words, "launch.memory_gib=10", "launch.parallel_points=6")
    assert options(array) == {
        **{"nodes": 1, "ntasks_per_node": 6, "gpus_per_node": 8, "mem": "30720M"},
        **{"cpus_per_task": 18, "time": 60, "array": "0-2%2"},
    }
    assert [len(points) for points in array.elements] == [3, 3, 1]
    script = "\n".join(array.request.parameters["setup"])
    assert "--exact --nodes=1 --ntasks=2 --ntasks-per-node=2 --gpus-per-node=2" in script
    assert "--cpus-per-task=18" in script


@dataclass
class Job:
    """An element of an array, run by bash with stubs in place of Slurm's commands."""

    folder: SweepDirectory
    array: JobArray
    place: Path

    def run(self, restart: int = 0, **ends: str) -> int:
        """ends: point -> fail or requeue; the others are done."""
        stubs = self.place / "stubs"
        stubs.mkdir(exist_ok=True)
        for name in ("srun", "scontrol", "scancel", "squeue", "sinfo"):
            (stubs / name).write_text(STUB)
            (stubs / name).chmod(0o700)
        (stubs / "said").write_text("")
        (stubs / "ends").write_text("".join(f"{point} {end}\n" for point, end in ends.items()))
        slurm = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0", "SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "n1"}
        own = {"STUBS": str(stubs), "PATH": f"{stubs}:{os.environ['PATH']}", "SLURM_RESTART_COUNT": str(restart)}
        script = submit_sweep.render_array_script(self.folder, self.array)
        done = subprocess.run(
            ["bash"],
            input=script,
            env={**os.environ, **slurm, **own, "SLURM_MEM_PER_NODE": "900"},
            text=True,
            capture_output=True,
            check=False,
        )
        assert done.stderr == ""
        return done.returncode

    def client_calls(self, command: str) -> list[str]:
        lines = (self.place / "stubs/said").read_text().splitlines()
        return sorted(line for line in lines if line.split()[0] == command)

    def result(self, point: str, attempt: int) -> tuple[Any, ...]:
        found = json.loads((self.folder.run(point) / f"logs/{attempt}/result.json").read_text())
        return found["exit_code"], found["then"]

    def attempts(self, point: str) -> list[str]:
        return sorted(path.parent.name for path in self.folder.run(point).glob("logs/*/attempt.json"))


def job(path: Path, *words: str) -> tuple[Job, list[str]]:
    folder, frozen = freeze(path / "it's a sweep", *words)
    (array,) = make_arrays(frozen.points, folder, None, 10, frozen.config_of)
    made, ids = make(path / "it's a sweep", *words)
    assert made == folder
    return Job(folder, array, path), ids


def test_an_element_is_its_point(tmp_path: Path) -> None:
    batch_job, (first, second) = job(tmp_path, "train.seed=0,1")
    assert batch_job.run() == 0
    assert batch_job.result(first, 0) == (0, "")
    assert not batch_job.folder.run(second).exists()
    assert json.loads((batch_job.folder.run(first) / "job.json").read_text())["config"]["train"]["seed"] == 0
    assert json.loads((batch_job.folder.run(first) / "logs/0/attempt.json").read_text())["job_id"] == "7_0"
    batch_job = replace(batch_job, folder=SweepDirectory(tmp_path / "not there"))
    script = submit_sweep.render_array_script(batch_job.folder, batch_job.array).replace("a sweep'", "nowhere'")
    nowhere = subprocess.run(["bash"], input=script, text=True, capture_output=True, check=False)
    assert nowhere.returncode != 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["it's a sweep", "stubs"]


def test_points_of_one_job_have_steps_shares_and_ends_of_their_own(tmp_path: Path) -> None:
    batch_job, ids = job(tmp_path, "train.seed=range(3)", "launch.points_per_job=3")
    assert batch_job.run(**{ids[1]: "fail"}) == 3
    assert [batch_job.result(point, 0) for point in ids] == [(0, ""), (3, ""), (0, "")]
    steps = batch_job.client_calls("srun")
    assert [f"--job-name={point} " in step for step, point in zip(steps, sorted(ids), strict=True)] == [True] * 3
    assert all("--exact --nodes=1 --ntasks=2 --ntasks-per-node=2 " in step and "--mem=300M" in step for step in steps)
    assert all("--cpus-per-task=1 " in step for step in steps)
    shares = [(batch_job.folder.run(point) / "logs/0/share").read_text().split("/") for point in ids]
    assert [share[:2] for share in shares] == [["0", "3"], ["1", "3"], ["2", "3"]]
    assert len({share[2] for share in shares}) == 1
    assert batch_job.client_calls("scontrol") == []
    events = (batch_job.folder.run(ids[1]) / "events.jsonl").read_text()
    assert json.loads(events)["event"] == "failure"


def test_a_job_that_has_to_go_on_is_requeued_once_and_runs_what_is_not_over(tmp_path: Path) -> None:
    batch_job, ids = job(tmp_path, "train.seed=range(4)", "launch.points_per_job=4")
    assert batch_job.run(**{ids[0]: "requeue", ids[1]: "fail", ids[2]: "requeue"}) == 75
    assert batch_job.client_calls("scontrol") == ["scontrol requeue 7_0"]
    assert [batch_job.result(point, 0)[1] for point in ids] == ["requeue", "", "requeue", ""]
    (batch_job.folder.run(ids[2]) / "logs/0/result.json").unlink()  # as where its node was lost
    assert batch_job.run(restart=1) == 3, "one of them has failed, in the attempt before"
    assert len(batch_job.client_calls("srun")) == 2
    assert [batch_job.attempts(point) for point in ids] == [["0", "1"], ["0"], ["0", "1"], ["0"]]
    assert [batch_job.result(point, 1) for point in (ids[0], ids[2])] == [(0, ""), (0, "")]
    assert batch_job.client_calls("scontrol") == []
    assert batch_job.run(restart=2) == 3, "nothing is left to run"
    assert batch_job.client_calls("srun") == []


def test_what_fails_before_the_ranks_is_the_end_of_all_points(tmp_path: Path) -> None:
    batch_job, ids = job(tmp_path, "train.seed=0,1", "launch.points_per_job=2", "launch.setup=['exit 5']")
    assert batch_job.run() == 5
    results = [json.loads((batch_job.folder.run(point) / "logs/0/result.json").read_text()) for point in ids]
    assert [(result["exit_code"], result["why"]) for result in results] == [(5, "launch.setup failed")] * 2
    assert batch_job.client_calls("srun") == []
    batch_job.folder.points.chmod(0o606)
    other, ids = job(tmp_path / "other", "train.seed=0,1", "launch.points_per_job=2")
    other.folder.points.chmod(0o606)
    assert other.run() == 2
    whys = [json.loads((other.folder.run(point) / "logs/0/result.json").read_text())["why"] for point in ids]
    assert whys == ["the reading of points.jsonl failed"] * 2


def test_a_point_that_is_cancelled_before_its_job_begins_does_not_run_with_its_neighbours(tmp_path: Path) -> None:
    batch_job, ids = job(tmp_path, "train.seed=0,1", "launch.points_per_job=2")
    (batch_job.folder.run(ids[0]) / "logs").mkdir(parents=True)
    (batch_job.folder.run(ids[0]) / "logs/cancel-7_0").touch()
    assert batch_job.run() == 75
    assert [batch_job.result(point, 0) for point in ids] == [(75, "cancel"), (0, "")]
    assert batch_job.client_calls("scancel") == []


def test_points_here_have_gpus_of_their_own_as_far_as_there_are_any() -> None:
    assert [make_gpu_share_environment(slot, 2, "0123", {}) for slot in range(3)] == [
        {"CUDA_VISIBLE_DEVICES": gpus} for gpus in ("0,1", "2,3", "0,1")
    ]
    env = {"ROCR_VISIBLE_DEVICES": "2,3"}
    assert make_gpu_share_environment(1, 1, list_visible_gpus(env), env) == {"ROCR_VISIBLE_DEVICES": "3"}
    assert make_gpu_share_environment(0, 1, (), {}) == {}
    assert make_gpu_share_environment(0, 4, "01", {}) == {}


@pytest.mark.parametrize(
    ("chosen", "gpus"),
    [("5,GPU-7,MIG-a/1/0", ["5", "GPU-7", "MIG-a/1/0"]), ("", []), ("-1", []), ("NoDevFiles", []), ("1,-1,2", ["1"])],
)
def test_the_gpus_that_a_variable_names_are_those_before_the_first_entry_that_names_none(
    chosen: str, gpus: list[str]
) -> None:
    assert list_visible_gpus({"CUDA_VISIBLE_DEVICES": chosen}) == gpus
