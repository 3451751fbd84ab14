"""Functions as jobs, under commands that stand in for Slurm's: what submitit's own executors get wrong."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import submitit
from submitit.core.utils import DelayedSubmission

from hpc_train.errors import UserError
from hpc_train.launch.callables.calls import load_pickle
from hpc_train.launch.callables.local_executor import LocalCallExecutor
from hpc_train.launch.callables.slurm_executor import SlurmCallExecutor
from hpc_train.launch.callables.stop_signals import SIGNAL_SECONDS_VARIABLE, StopSignalHandler

Stub = Callable[[str, str], Path]


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """A command that runs some shell and notes that it was called, with what."""
    folder = tmp_path / "stubs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def write(name: str, script: str) -> Path:
        calls = folder / f"{name}.said"
        (folder / name).write_text(f'#!/bin/bash\necho "$@" >>{calls}\n{script}\n')
        (folder / name).chmod(stat.S_IRWXU)
        return calls

    write("srun", "")
    write("scontrol", 'echo "MaxArraySize = 2"')
    return write


def double(x: int) -> int:
    return 2 * x


def test_arrays_are_cut_and_keep_all_that_a_single_job_has(stub: Stub, tmp_path: Path) -> None:
    calls = stub("sbatch", f'echo "Submitted batch job $(($(wc -l <{tmp_path}/stubs/sbatch.said) + 40))"')
    executor = SlurmCallExecutor(tmp_path / "calls", max_attempts=7)
    executor.update_parameters(partition="batch", array_parallelism=1)
    jobs = executor.map_array(double, [1, 2, 3])
    assert [job.job_id for job in jobs] == ["41_0", "42_0", "42_1"]
    assert len(calls.read_text().splitlines()) == 2
    for script in (tmp_path / "calls").glob("*_submission.sh"):
        text = script.read_text()
        assert "hpc_train.launch.callables.worker" in text, "our own worker"
        assert "hpc_max_attempts=7 " in text, "our own settings"
        assert "--partition=batch" in text
    assert load_pickle(jobs[2].paths.submitted_pickle).args == (3,)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "calls").iterdir()} == {0o600}


def test_when_a_part_is_refused_nothing_is_left_of_the_others(stub: Stub, tmp_path: Path) -> None:
    cancelled = stub("scancel", "")
    stub(
        "sbatch",
        f"[ $(wc -l <{tmp_path}/stubs/sbatch.said) -lt 2 ] && echo Submitted batch job 41 && exit\n"
        'echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit 1',
    )
    executor = SlurmCallExecutor(tmp_path / "calls")
    with pytest.raises(UserError, match="sbatch refused the job: QOSMaxSubmitJobPerUserLimit") as refused:
        executor.map_array(double, [1, 2, 3, 4])
    assert str(refused.value).isprintable()
    assert cancelled.read_text().split() == ["41"]
    assert list((tmp_path / "calls").iterdir()) == []


@pytest.mark.parametrize("field", ["comment", "setup", "additional_parameters", "srun_args"])
def test_a_newline_in_a_value_is_refused_and_not_run(field: str, tmp_path: Path, stub: Stub) -> None:
    value = "x\ntouch executed"
    executor = SlurmCallExecutor(tmp_path / "calls")
    executor.parameters[field] = {"wckey": value} if field == "additional_parameters" else [value]
    with pytest.raises(UserError, match="control character"):
        executor.submit(double, 1)


@pytest.mark.parametrize(("left", "out_of_time"), [("4:48", False), ("1-00:00:00", False), ("0:38", True), ("", False)])
def test_a_short_job_that_is_preempted_is_not_taken_for_one_out_of_time(
    left: str, out_of_time: bool, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub("squeue", f"echo '{left}'")
    for name, value in {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "12", SIGNAL_SECONDS_VARIABLE: "30"}.items():
        monkeypatch.setenv(name, value)
    delayed = DelayedSubmission(double, 1)
    delayed.set_timeout(5, 3)  # minutes: submitit takes everything up to ten for a time-out
    assert StopSignalHandler(submitit.JobEnvironment(), delayed)._is_out_of_time() is out_of_time


def test_no_job_here_is_without_the_gpus_that_it_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen cores and two GPUs are enough for two jobs of one GPU, and for none of three."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    executor = LocalCallExecutor(tmp_path / "calls")
    executor.update_parameters(gpus_per_node=1)
    jobs = [executor.submit(os.getenv, "CUDA_VISIBLE_DEVICES") for _ in range(4)]
    assert [job.result() in ("0", "1") for job in jobs] == [True] * 4
    executor.update_parameters(gpus_per_node=3)
    with pytest.raises(UserError, match="a job asks for 3 GPUs, and 2 are visible here"):
        executor.submit(os.getpid)
