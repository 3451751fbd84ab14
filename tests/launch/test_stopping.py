"""A signal at any moment, to any process of a job, ends it with everything saved; the same command goes on.

Takes about a minute: a run is stopped at several moments one after another, and each time two ranks import torch.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from jobs import ALONE, FAULTY, LONG, Job, Workshop, assert_same_run, numbers, processes, saved_steps, wait_for

from hpc_train.errors import EXIT_DONE, EXIT_NO_REQUEUE, EXIT_REQUEUE

USR2, TERM, INT = signal.SIGUSR2, signal.SIGTERM, signal.SIGINT


def stopped(workshop: Workshop, job: Job, step: int) -> None:
    """The job saved `step` and ended on purpose; nothing of it is left."""
    ended = job.ended()
    assert ended.code == EXIT_REQUEUE, ended
    assert f"stopped at step {step}, saved" in ended.out
    assert "Traceback" not in ended.err
    assert saved_steps(job.run_dir)[-1] == step == numbers(job.run_dir)[-1][0]
    attempt = max(int(path.name) for path in (job.run_dir / "logs").iterdir())
    assert (job.run_dir / "logs" / str(attempt) / "requeue").exists()
    assert processes(job.run_dir) == []
    (workshop.folder / "go").unlink(missing_ok=True)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)], ids=["some", "every"])
def test_a_run_stopped_at_many_moments_ends_as_one_that_was_never_stopped(
    workshop: Workshop, uninterrupted: Path, every: bool
) -> None:
    def begin(fault: str = "", *more: str, wait: bool = True) -> Job:
        job = workshop.start("run", *LONG, *more, faults=fault)
        if fault and wait:
            workshop.wait_for_fault(fault, job)
        return job

    if every:
        # Before there are ranks: the launcher is told as soon as the process that will start them appears.
        job = begin("0:build:1:listen", wait=False)
        job.controller()
        job.popen.send_signal(TERM)
        stopped(workshop, job, step=1)

    # During import torch: one rank alone is told, as soon as its process appears.
    job = begin()
    job.task(1).send(TERM)
    stopped(workshop, job, step=1 + every)

    if every:
        # During a step, while the rank that is told waits for another one.
        job = begin("0:train:2:hold")
        job.task(1).send(USR2)
        workshop.go()
        stopped(workshop, job, step=5)

    # During an evaluation, and when it is made up for.
    for fault in ("1:eval:1:hold", "0:eval:1:hold") if every else ():
        job = begin(fault)
        job.task(0).send(USR2)
        workshop.go()
        stopped(workshop, job, step=6)

    # While a checkpoint is being written, of step 8 or 4.
    job = begin("1:save:1:listen", "checkpoint.background=false")
    job.controller().send(TERM)
    stopped(workshop, job, step=9 if every else 5)

    if every:
        # Ctrl-C in the terminal reaches the launcher alone.
        job = begin("0:train:1:listen")
        job.popen.send_signal(INT)
        stopped(workshop, job, step=11)

    # In the last step what is left is to evaluate.
    job = begin("1:train:1:hold" if every else "1:train:7:hold")
    job.task(1).send(TERM)
    workshop.go()
    stopped(workshop, job, step=12)
    assert begin().ended().code == EXIT_DONE
    assert "already done" in begin().ended().out
    assert_same_run(job.run_dir, uninterrupted)


def test_a_stop_while_a_save_is_under_way_in_the_background(workshop: Workshop) -> None:
    """It is waited for, and so is the one that the stop asks for."""
    job = workshop.start("run", *LONG, faults="1:save:1:hold 0:train:6:hold")
    workshop.wait_for_fault("1:save:1:hold", job)
    workshop.wait_for_fault("0:train:6:hold", job)
    job.task(0).send(TERM)
    workshop.go()
    stopped(workshop, job, step=6)
    assert saved_steps(job.run_dir) == [4, 6]


def test_a_run_that_never_saves_says_so_and_is_not_to_be_requeued(workshop: Workshop) -> None:
    fault = "0:train:2:hold"
    job = workshop.start("run", *FAULTY, *ALONE, "train.steps=1000", "checkpoint.every=0", faults=fault)
    workshop.wait_for_fault(fault, job)
    job.task(0).send(USR2)
    workshop.go()
    ended = job.ended()
    assert ended.code == EXIT_NO_REQUEUE
    assert "stopped at step 3, NOT saved (checkpoint.every=0)" in ended.out
    assert not (job.run_dir / "logs/0/requeue").exists()
    assert saved_steps(job.run_dir) == []


def test_a_stop_whose_save_fails_goes_on_from_an_earlier_checkpoint_of_the_same_attempt(
    workshop: Workshop, uninterrupted: Path
) -> None:
    job = workshop.start("run", *LONG, faults="1:save:2:raise 0:train:6:hold")
    workshop.wait_for_fault("0:train:6:hold", job)
    job.task(0).send(TERM)
    workshop.go()
    ended = job.ended()
    assert ended.code == EXIT_REQUEUE, ended
    assert "stopped at step 6, NOT saved: checkpoint step 6 was not saved" in ended.out
    assert "the run goes on from step 4" in ended.out
    assert (job.run_dir / "logs/0/requeue").exists()
    again = workshop.start("run", *LONG)
    assert again.ended().code == EXIT_DONE
    assert_same_run(job.run_dir, uninterrupted)


def test_a_stop_after_which_nothing_is_new_on_the_disk_is_not_requeued(workshop: Workshop) -> None:
    job = workshop.start("run", *LONG, *ALONE, faults="0:save:1:raise 0:train:2:hold")
    workshop.wait_for_fault("0:train:2:hold", job)
    job.task(0).send(TERM)
    workshop.go()
    ended = job.ended()
    assert ended.code == EXIT_NO_REQUEUE
    assert "NOT saved, as no save before: checkpoint step" in ended.out
    assert not (job.run_dir / "logs/0/requeue").exists()


@pytest.mark.parametrize("victim", ["launcher", "controller"])
def test_when_the_process_above_is_killed_the_ranks_save_and_stop(workshop: Workshop, victim: str) -> None:
    fault = "1:train:2:listen"
    job = workshop.start("run", *FAULTY, "train.steps=1000", "checkpoint.every=500", faults=fault)
    workshop.wait_for_fault(fault, job)
    above = job.popen.pid if victim == "launcher" else job.controller().pid
    os.kill(above, signal.SIGKILL)
    ended = job.ended() if victim == "controller" else None
    wait_for(lambda: not processes(job.run_dir))
    assert saved_steps(job.run_dir) == [3]
    if ended is not None:
        assert ended.code == 128 + signal.SIGKILL
        assert "the process that held the ranks was killed" in ended.err


def test_a_second_ctrl_c_kills_a_job_that_does_not_stop(workshop: Workshop) -> None:
    fault = "1:train:2:hold"
    job = workshop.start("run", *FAULTY, "train.steps=1000", faults=fault)
    workshop.wait_for_fault(fault, job)
    job.popen.send_signal(INT)
    assert job.popen.stderr is not None
    assert "SIGINT: asking the ranks to save and stop" in job.popen.stderr.readline()
    job.popen.send_signal(INT)
    ended = job.ended()
    assert (ended.code, ended.err) == (128 + INT, "hpc-train: killed; what was not saved is lost\n")
    assert processes(job.run_dir) == []
