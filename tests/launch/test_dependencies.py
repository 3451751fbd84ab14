"""`submit --after`: what a run that waits hands to sbatch, and whom it refuses to wait for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpc_train.config.compose import compose
from hpc_train.errors import UserError
from hpc_train.launch.slurm.request import make_request
from hpc_train.launch.slurm.sbatch import render_script
from hpc_train.launch.slurm.slurm_cli import Answer
from hpc_train.launch.submit import default_to_slurm, list_jobs_to_wait_for
from hpc_train.training.run_directory import RunDirectory


class Slurm:
    """Knows the state of each job."""

    def __init__(self, **states: str) -> None:
        self.states = {name.removeprefix("job"): state for name, state in states.items()}

    def __call__(self, command: Sequence[str]) -> Answer:
        if command[0] == "squeue":
            return Answer(0, "".join(f"{job}|{job}|{state}||None\n" for job, state in self.states.items()))
        shown = "".join(
            f"JobId={job} JobName=x JobState={state} Reason=None Dependency=(null) ExitCode=1:0 NodeList=(null)\n"
            for job, state in self.states.items()
            if command[-1] == job
        )
        return Answer(0, shown) if shown else Answer(1, err="slurm_load_jobs error: Invalid job id specified")


def submitted(path: Path, *jobs: str) -> str:
    (path / "logs").mkdir(parents=True)
    event = {"event": "submit", "time": 1.0, "attempt": -1, "job_id": jobs[0], "job_ids": jobs}
    (path / "events.jsonl").write_text(json.dumps(event) + "\n")
    return str(path)


def test_runs_that_wait_or_run_are_waited_for_and_done_ones_are_not(tmp_path: Path) -> None:
    slurm = Slurm(job1="RUNNING", job2="COMPLETED", job3="PENDING", job4="PENDING")
    runs = [submitted(tmp_path / name, job) for name, job in (("a", "1"), ("b", "2"), ("c", "3"))]
    assert list_jobs_to_wait_for([*runs, "4", "2"], slurm) == ["1", "3", "4"]


def test_whom_nobody_can_wait_for(tmp_path: Path) -> None:
    slurm = Slurm(job1="FAILED", job2="RUNNING", job3="PENDING")
    failed, chain = submitted(tmp_path / "failed", "1"), submitted(tmp_path / "chain", "2", "3")
    for run, message in (
        (failed, "failed is FAILED"),
        (chain, "a chain of jobs"),
        ("1", "--after 1: it is FAILED"),
        ("9", "--after 9: Invalid job id specified"),
        ("nowhere", "no such run directory"),
    ):
        with pytest.raises(UserError, match=message):
            list_jobs_to_wait_for([run], slurm)


def script(jobs: Sequence[str], *overrides: str) -> list[str]:
    config = compose(default_to_slurm(overrides))
    folder = RunDirectory(Path("/scratch/run"), Path("/scratch/run/checkpoints"))
    return render_script(folder, make_request(config, folder).after(jobs)).splitlines()


def test_what_sbatch_is_told() -> None:
    assert not [line for line in script([]) if "dependency" in line]
    lines = script(["12", "14_1", "12"])
    assert "#SBATCH --dependency=afterok:12:14_1" in lines
    assert "#SBATCH --kill-on-invalid-dep=yes" in lines


def test_a_chain_waits_for_its_own_name_and_ends_with_the_run() -> None:
    lines = script(["12"], "launch.chain=3")
    assert "#SBATCH --dependency=afterok:12,singleton" in lines
    (name,) = (line for line in lines if line.startswith("#SBATCH --job-name="))
    assert name.startswith("#SBATCH --job-name=hpc_train-")
    assert name in script([], "launch.chain=2")
    assert any("scancel --quiet --state=PENDING" in line for line in lines)
    assert not any("scontrol requeue" in line and "then=requeue" in line for line in lines)


def test_a_job_that_may_run_once_is_not_requeued_by_slurm_either() -> None:
    assert "#SBATCH --no-requeue" in script([], "launch.max_attempts=1")
    assert "#SBATCH --requeue" in script([])
