"""Two jobs that would write checkpoints in one directory: the second is refused, a dead one is not in the way."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from jobs import FAULTY, Workshop, processes, saved_steps, wait_for

from hpc_train.errors import EXIT_DONE, EXIT_USER_ERROR

SHORT = (*FAULTY, "launch.ranks=1", "train.micro_batch=4", "train.steps=4", "checkpoint.every=2")


def refused(code: int, err: str, where: Path) -> None:
    assert code == EXIT_USER_ERROR
    assert err.count("\n") == 1
    assert f"checkpoint.dir={where}" in err
    assert "is writing checkpoints there; wait for its end" in err


def test_the_second_is_refused_and_the_first_goes_on(workshop: Workshop) -> None:
    first = workshop.start("run", *SHORT, faults="0:train:3:hold")
    workshop.wait_for_fault("0:train:3:hold", first)
    before = (first.run_dir / "job.json").read_bytes()
    second = workshop.train("run", *SHORT, "launch.timeout_seconds=77")
    refused(second.code, second.err, first.run_dir / "checkpoints")
    assert (first.run_dir / "job.json").read_bytes() == before, "nothing of the first was changed"
    other = workshop.train("other", *SHORT, f"checkpoint.dir={first.run_dir / 'checkpoints'}")
    refused(other.code, other.err, first.run_dir / "checkpoints")
    workshop.go()
    assert first.ended().code == EXIT_DONE
    assert saved_steps(first.run_dir) == [2, 4]
    assert not (first.run_dir / "checkpoints" / "lock").exists()


@pytest.mark.long
def test_after_a_kill_the_same_command_goes_on(workshop: Workshop) -> None:
    job = workshop.start("run", *SHORT, faults="0:train:4:hold")
    workshop.wait_for_fault("0:train:4:hold", job)
    wait_for((job.run_dir / "checkpoints" / "step-2").exists, job)
    job.popen.kill()
    for process in processes(job.run_dir):
        process.send(signal.SIGKILL)
    wait_for(lambda: processes(job.run_dir) == [])
    assert (job.run_dir / "checkpoints" / "lock").exists()
    again = workshop.train("run", *SHORT)
    assert again.code == EXIT_DONE, again
    assert "resumed at step 2 of 4" in again.out
    assert saved_steps(job.run_dir) == [2, 4]
