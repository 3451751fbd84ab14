"""Sweeps on a real Slurm: arrays by resource shape, points side by side in one job, resumed, cancelled, refused.

Takes about a minute: each array starts ranks that import torch, and two sweeps run to their ends.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from slurm_client import SlurmCluster
from sweep_client import ENDLESS, LATER, TINY, Sweep, ended, waits_for_its_time

from hpc_train.launch.state.attempts import read_attempts
from hpc_train.placement.node.cpu_binding import parse_cpus


@pytest.mark.timeout(300)
def test_two_shapes_are_two_arrays_and_the_point_that_raises_is_the_one_that_runs_again(
    slurm_cluster: SlurmCluster, sweep: Sweep
) -> None:
    said = sweep.submit("cluster.nodes=1,2", "train.seed=0,1", "launch.parallel_points=2", faults="1:train:2:raise")
    assert [(job["nodes"], job["ranks"], len(job["points"])) for job in said["jobs"]] == [(1, 1, 2), (2, 2, 2)]
    assert sorted(path.name for path in sweep.path.iterdir()) == [
        ".submitit",
        "ledger.jsonl",
        "logs",
        "points",
        "points.jsonl",
    ]
    names = said["points"]
    assert list(sweep.rows()) == names, "in the order of the grid, those that have not begun too"
    assert {job["job_id"] for job in said["jobs"]} == {row["job_id"].split("_")[0] for row in sweep.rows().values()}
    sweep.wait("the end", ended)
    rows = sweep.rows()
    (failed,) = [name for name in names if rows[name]["state"] == "FAILED"]
    assert failed in said["jobs"][1]["points"], "only there is a rank 1"
    assert sorted(sweep.states()) == ["DONE", "DONE", "DONE", "FAILED"]
    assert rows[failed]["reason"].endswith("RuntimeError: a fault of the user's model")
    assert rows[failed]["exit_code"] == 1
    errors = sweep.run("logs", "--first-error", str(sweep.path))
    assert errors.splitlines() == [f"{failed}: FAILED: {rows[failed]['reason']}"]
    assert "Traceback" in sweep.run("logs", "--first-error", str(sweep.point(failed)))
    element = rows[failed]["job_id"]
    assert json.loads(sweep.run("status", "--json", element)) == [rows[failed]]
    assert len(json.loads(sweep.run("status", "--json", element.split("_")[0]))) == 2

    sweep.path.joinpath("points.jsonl").chmod(0o620)
    assert "is not yours alone" in sweep.run("resume", str(sweep.path), code=2)
    sweep.path.joinpath("points.jsonl").chmod(0o600)
    resumed = json.loads(sweep.run("resume", "--json", str(sweep.path)))
    assert resumed["points"] == [failed]
    sweep.wait("the end of the second go", ended)
    rows = sweep.rows()
    assert set(sweep.states()) == {"DONE"}
    assert rows[failed]["job_id"] == f"{resumed['jobs'][0]}_0"
    assert [rows[name]["attempt"] for name in names] == [1 if name == failed else 0 for name in names]
    assert sweep.run("resume", str(sweep.path)) == "nothing to resume: 4 DONE\n"
    results = json.loads(sweep.run("results", "--json", str(sweep.path)))
    assert [row["overrides"] for row in results] == [
        {"cluster.nodes": nodes, "train.seed": seed} for nodes in (1, 2) for seed in (0, 1)
    ]
    assert [row["final"]["step"] for row in results] == [3] * 4
    last = [sweep.point(name).joinpath("metrics.jsonl").read_text().splitlines()[-1] for name in names]
    assert [row["value"] for row in results] == [json.loads(line)["loss"] for line in last]


@pytest.mark.timeout(300)
def test_points_side_by_side_have_their_own_cpus_end_and_one_requeue(slurm_cluster: SlurmCluster, sweep: Sweep) -> None:
    words = ("cluster.nodes=1", "train.seed=0,1", "launch.points_per_job=2", ENDLESS)
    said = sweep.submit(*words, STEP_SECONDS="0.05")  # so that it leaves processors to the other tests
    (job,) = said["jobs"]
    one, other = said["points"]
    element = f"{job['job_id']}_0"
    sweep.wait("both train", lambda _: sweep.steps(one) > 5 and sweep.steps(other) > 5)
    cpus = [
        parse_cpus(json.loads((sweep.point(name) / "rankmap.json").read_text())["ranks"][0]["cpus"])
        for name in (one, other)
    ]
    assert cpus[0]
    assert not cpus[0] & cpus[1]
    assert {row["job_id"] for row in sweep.rows().values()} == {element}
    assert slurm_cluster.job(element)["NumCPUs"] == "2"
    assert "--overlap" in sweep.run("attach", "--dry-run", str(sweep.point(one)))

    assert "asked to save and end" in sweep.run("cancel", "--yes", str(sweep.point(one)))
    sweep.wait("the end of one", lambda rows: rows[one]["state"] == "CANCELLED")
    steps = sweep.steps(other)
    sweep.wait("the other goes on", lambda rows: rows[other]["state"] == "RUNNING" and sweep.steps(other) > steps)
    slurm_cluster.command("scancel", "--signal=USR2", element)
    sweep.wait("the requeue", lambda rows: rows[other]["attempt"] == 1 and sweep.steps(other) > 0)
    rows = sweep.rows()
    assert (rows[one]["state"], rows[one]["attempt"]) == ("CANCELLED", 0)
    assert rows[other]["job_id"] == element
    assert slurm_cluster.job(element)["Restarts"] == "1"
    assert [it.result.then for it in read_attempts(sweep.point(other)) if it.result] == ["requeue"]
    assert list((sweep.point(other) / "checkpoints").glob("step-*")), "it had saved"
    sweep.run("cancel", "--yes", str(sweep.path))
    sweep.wait("the end", ended)
    assert set(sweep.states()) == {"CANCELLED"}


def test_what_sbatch_refuses_of_a_sweep_is_one_line_and_leaves_nothing(
    slurm_cluster: SlurmCluster, sweep: Sweep
) -> None:
    said = sweep.submit("+launch.extra.nodelist=node1,nowhere", "launch.name=refused", LATER, code=2)
    assert "sbatch refused the job" in said
    assert said.count("\n") == 1
    assert not sweep.path.exists()
    assert not [line for line in slurm_cluster.squeue("-o", "%j") if line == "refused"]
    said = sweep.submit("optim.lr=1e-3,nonsense,1e-2", code=2)
    assert said == "hpc-train: point optim.lr=nonsense: optim.lr=nonsense: must be a number\n"
    assert not sweep.path.exists()


def test_a_sweep_that_is_too_large_for_an_array_is_several_and_is_cancelled_as_it_waits(
    slurm_cluster: SlurmCluster, sweep: Sweep, tmp_path: Path
) -> None:
    real = shutil.which("scontrol")
    (tmp_path / "bin").mkdir()
    wrapper = tmp_path / "bin/scontrol"
    wrapper.write_text(f"#!/bin/sh\n{real} \"$@\" | sed 's/^MaxArraySize .*/MaxArraySize = 3/'\n")
    wrapper.chmod(0o755)
    path = f"{wrapper.parent}:{os.environ['PATH']}"
    old = sweep.code_of_nobody()
    said = sweep.submit("train.seed=range(5)", "launch.parallel_points=4", LATER, PATH=path)
    assert not old.exists()
    assert [len(job["points"]) for job in said["jobs"]] == [2, 3]
    sweep.wait("why Slurm lets them wait", waits_for_its_time)
    jobs = [job["job_id"] for job in said["jobs"]]
    assert [slurm_cluster.job(job).get("ArrayTaskThrottle") for job in jobs] == ["2", "2"]
    assert not list((sweep.path / "points").iterdir())

    first = said["points"][0]
    assert sweep.run("cancel", "--yes", str(sweep.point(first))) == f"job {jobs[0]}_0: cancelled\n"
    states = {name: row["state"] for name, row in sweep.rows().items()}
    assert states == {name: "CANCELLED" if name == first else "PENDING" for name in said["points"]}
    assert json.loads(sweep.run("resume", "--json", "--mode", "read-only", str(sweep.path))) == [
        {"point": name, "state": states[name], "again": name == first} for name in said["points"]
    ]
    assert "4 jobs that waited: cancelled" in sweep.run("cancel", "--yes", str(sweep.path))
    assert set(sweep.states()) == {"CANCELLED"}
    assert not list((sweep.path / "points").iterdir())


def test_a_run_that_was_cancelled_as_it_waited_is_submitted_again_as_it_was(
    slurm_cluster: SlurmCluster, sweep: Sweep
) -> None:
    words = ("submit", "--json", *TINY, "data=text", f"data.path={sweep.store}", f"run_dir={sweep.path}", LATER)
    first = json.loads(sweep.run(*words, "launch.name=again"))["job_id"]
    assert sweep.run("resume", str(sweep.path)) == "nothing to resume: 1 PENDING\n"
    frozen = (sweep.path / "job.json").read_text()
    said = sweep.run(*words, "optim.lr=0.5", code=2)
    assert f"job {first} is PENDING there" in said
    assert f"`hpc-train cancel {sweep.path}` ends it" in said
    assert "is PENDING there" in sweep.run("train", *words[2:-1], "launch.ranks=1", code=2)
    sweep.run("cancel", "--yes", str(sweep.path))
    said = sweep.run(*words, "optim.lr=0.5", "launch.reservation=nowhere", code=2)
    assert "sbatch refused the job" in said
    assert (sweep.path / "job.json").read_text() == frozen, "what was submitted before is what resume submits"
    (second,) = json.loads(sweep.run("resume", "--json", str(sweep.path)))["jobs"]
    assert second != first
    sweep.wait("why Slurm lets it wait", waits_for_its_time)
    assert [row["job_id"] for row in sweep.rows().values()] == [second]
    scripts = [(sweep.path / f".submitit/{job}_submission.sh").read_text() for job in (first, second)]
    assert scripts[0] == scripts[1]
    assert slurm_cluster.job(second)["JobName"] == "again"
    sweep.run("cancel", "--yes", str(sweep.path))


def test_all_anew_sets_aside_only_what_a_new_job_stands_for(
    slurm_cluster: SlurmCluster, sweep: Sweep, tmp_path: Path
) -> None:
    words = ("submit", "--json", *TINY, "data=text", f"data.path={sweep.store}", f"run_dir={sweep.path}", LATER)
    old = sweep.code_of_nobody()
    sweep.run(*words)
    assert not old.exists()
    sweep.run("cancel", "--yes", str(sweep.path))
    results = sweep.path / "metrics.jsonl"
    results.write_text("of weeks\n")
    (tmp_path / "bin").mkdir()
    refusing = tmp_path / "bin/sbatch"
    refusing.write_text("#!/bin/sh\necho sbatch: error: the queue is full >&2; exit 1\n")
    refusing.chmod(0o755)
    force = ("resume", "--json", "--mode", "force", str(sweep.path))
    assert "the queue is full" in sweep.run(*force, code=2, PATH=f"{refusing.parent}:{os.environ['PATH']}")
    assert results.exists()
    (job,) = json.loads(sweep.run(*force))["jobs"]
    assert slurm_cluster.job_state(job) == "PENDING"
    assert "Held" not in slurm_cluster.job(job)["Reason"]
    assert not results.exists()
    assert (sweep.path / "before/0/metrics.jsonl").read_text() == "of weeks\n"
    sweep.run("cancel", "--yes", str(sweep.path))
