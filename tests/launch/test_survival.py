"""Faults of local ranks: noticed, explained and survived without a person, with the numbers of a run without any."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from drawn import draw
from jobs import ALONE, LONG, Workshop, assert_same_run, processes, saved_steps, wait_for

from hpc_train.cli.main import main
from hpc_train.errors import EXIT_REQUEUE
from hpc_train.training.records.run_records import read_metrics

QUICK = ("resilience.hang.step_seconds=2", "resilience.hang.first_step_seconds=4")
"""Twelve steps are over before any deadline is learned: until then that of a first step counts."""


def events(workshop: Workshop, kind: str) -> list[dict[str, Any]]:
    lines = (workshop.folder / "run" / "events.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == kind]


@pytest.mark.parametrize(
    "fault",
    draw(
        ["1:build:1:kill", "0:train:3:kill", "1:train:7:kill", "1:eval:3:kill", "0:save:2:kill"],
        ["0:save:2:kill"],
    ),
)
def test_a_killed_rank_is_started_again_and_the_numbers_are_the_same(
    workshop: Workshop, uninterrupted: Any, fault: str
) -> None:
    ended = workshop.train("run", *LONG, faults=fault)
    assert ended.code == 0, ended
    assert_same_run(workshop.folder / "run", uninterrupted)
    why, again = [line for line in ended.err.splitlines() if not re.match("hpc-train: (warning|error): ", line)]
    assert why.startswith(f"hpc-train: task {fault[0]} was killed by SIGKILL; its log: ")
    assert re.fullmatch(r"hpc-train: starting again from .+ \(restart 1 of 3 without a newer save\)", again)
    (restart,) = events(workshop, "restart")
    assert (restart["cause"], restart["action"]) == ("a rank was killed", "restarted")
    assert processes(workshop.folder) == []


@pytest.mark.parametrize(
    ("action", "seen"),
    [
        pytest.param("stop", "stopped by a signal", marks=pytest.mark.long),
        ("gil", "hold_interpreter_lock ("),
    ],
)
def test_a_rank_that_hangs_is_named_ended_and_started_again(
    workshop: Workshop, uninterrupted: Any, action: str, seen: str
) -> None:
    ended = workshop.train("run", *LONG, *QUICK, faults=f"1:train:7:{action}")
    assert ended.code == 0, ended
    assert_same_run(workshop.folder / "run", uninterrupted)
    (hang,) = events(workshop, "hang")
    assert "the ranks hang: " in hang["why"]
    assert seen in hang["why"]
    assert "task 1" in hang["why"]
    folder = workshop.folder / "run" / "logs" / "0" / hang["folder"]
    report = json.loads((folder / "report.json").read_text())
    assert sorted(view["task"] for view in report["views"]) == [0, 1]
    assert (folder / "machine.json").exists()
    assert hang["why"] in ended.err


def test_without_acting_a_hang_is_only_said(workshop: Workshop) -> None:
    job = workshop.start("run", *LONG, *ALONE, *QUICK, "resilience.act=false", faults="0:train:7:hold")
    path = workshop.folder / "run" / "events.jsonl"
    wait_for(lambda: path.exists() and '"hang"' in path.read_text(), job)
    workshop.go()
    assert job.ended().code == 0
    (hang,) = events(workshop, "hang")
    assert hang["action"] == "left alone: resilience.act=false"
    assert events(workshop, "restart") == []


def test_an_exception_that_would_come_again_is_not_tried_again(workshop: Workshop) -> None:
    ended = workshop.train("run", *LONG, faults="0:train:3:raise 1:train:3:raise")
    assert ended.code == 1
    assert "starting again" not in ended.err
    assert events(workshop, "restart") == []


@pytest.mark.long
def test_an_exception_after_a_checkpoint_is_tried_again(workshop: Workshop, uninterrupted: Any) -> None:
    ended = workshop.train("run", *LONG, faults="1:train:7:raise")
    assert ended.code == 0, ended
    assert "RuntimeError: a fault of the user's model" in ended.err
    assert "starting again from step 4" in ended.err
    assert_same_run(workshop.folder / "run", uninterrupted)


def test_restarts_without_progress_come_to_an_end(workshop: Workshop) -> None:
    faults = "0:train:1:kill 0:train:2:kill"
    ended = workshop.train("run", *LONG, *ALONE, "resilience.restarts=1", faults=faults)
    assert ended.code != 0
    assert ended.err.count("starting again from the beginning") == 1
    assert len(events(workshop, "restart")) == 1


def test_off_ends_a_run_at_its_first_fault_as_does_a_run_that_saves_nothing(workshop: Workshop) -> None:
    ended = workshop.train("run", *LONG, *ALONE, "resilience=off", faults="0:train:7:kill")
    assert ended.code != 0
    assert len(read_metrics(workshop.folder / "run" / "metrics.jsonl")) < 12
    again = workshop.train("run2", *LONG, *ALONE, "checkpoint.every=0", faults="0:train:8:kill")
    assert again.code != 0
    assert "starting again" not in again.err


def test_a_notice_of_the_machine_saves_and_stops(workshop: Workshop) -> None:
    file = workshop.folder / "notice"
    job = workshop.start("run", *LONG, *ALONE, f"resilience.notice.file={file}", faults="0:train:7:listen")
    workshop.wait_for_fault("0:train:7:listen", job)
    file.write_text("instance i-1 ends at 12:00\n")
    ended = job.ended()
    assert ended.code == EXIT_REQUEUE, ended
    (notice,) = events(workshop, "notice")
    assert notice["why"].endswith(" is about to be taken away: instance i-1 ends at 12:00")
    assert re.search(r"stopped at step [78], saved", ended.out)


def test_a_save_for_which_no_time_is_left_is_not_begun(workshop: Workshop) -> None:
    file = workshop.folder / "notice"
    # In the foreground: how long a save takes is known once one has ended, and on a busy machine that may be later.
    words = (f"resilience.notice.file={file}", "resilience.grace_seconds=0.001", "checkpoint.background=false")
    job = workshop.start("run", *LONG, *ALONE, *words, faults="0:train:7:listen")
    workshop.wait_for_fault("0:train:7:listen", job)
    file.write_text("instance i-1 ends at once\n")
    ended = job.ended()
    assert ended.code == EXIT_REQUEUE, ended
    assert re.search(r"stopped at step [78], NOT saved: the last save took \d+ s, and 0 s are left of", ended.out)
    assert ended.out.rstrip().splitlines()[-1].endswith("the run goes on from step 4")
    assert saved_steps(workshop.folder / "run") == [4]


@pytest.mark.long
def test_a_parameter_that_is_nan_sends_the_run_back_to_a_good_checkpoint(workshop: Workshop) -> None:
    settings = (*LONG, "checkpoint.every=2", "checkpoint.keep=9", "resilience.numbers.good_after=2")
    ended = workshop.train("run", *settings, faults="1:train:9:poison")
    assert ended.code == 0, ended
    run = workshop.folder / "run"
    (back,) = events(workshop, "rollback")
    assert (back["step"], back["to"], back["marked"]) == (11, 6, [8, 10])
    (restart,) = events(workshop, "restart")
    assert restart["cause"] == "numbers that were not finite"
    assert "starting again from step 6" in ended.err
    (skipped,) = json.loads((run / "skipped.json").read_text())
    assert (skipped["first_step"], skipped["last_step"], skipped["first_sample"]) == (9, 11, 32)
    clean = workshop.train("clean", *settings, f"resilience.numbers.skip_list={run / 'skipped.json'}")
    assert clean.code == 0, clean
    assert_same_run(run, workshop.folder / "clean")


def test_a_run_survives_what_chaos_orders(
    workshop: Workshop, uninterrupted: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    run, plan = workshop.folder / "run", workshop.folder / "faults.yaml"
    job = workshop.start("run", *LONG, "resilience.chaos=true", faults="0:train:1:hold")
    workshop.wait_for_fault("0:train:1:hold", job)
    plan.write_text("faults: [{kind: kill, rank: 1, step: 5}, {kind: nan, rank: 0, step: 7}]")
    assert main(["chaos", str(run), "--plan", str(plan)]) == 0
    assert capfd.readouterr().out.splitlines()[0] == "ordered: kill in rank 1 at step 5"
    workshop.go()
    ended = job.ended()
    assert ended.code == 0, ended
    assert [event["cause"] for event in events(workshop, "restart")] == ["a rank was killed"]
    (again,) = events(workshop, "transient")
    assert (again["step"], again["ranks"]) == (8, [0])
    assert events(workshop, "skipped") == []
    assert main(["status", str(run)]) == 0
    seen = capfd.readouterr().out
    assert "run: went on by itself after a fault, the last: a rank was killed" in seen
    assert_same_run(run, uninterrupted)
    assert main(["chaos", str(uninterrupted), "--plan", str(plan)]) == 2
    assert "not started with resilience.chaos=true" in capfd.readouterr().err


@pytest.mark.long
def test_a_gradient_that_differs_on_one_rank_is_noticed_and_its_checkpoint_distrusted(
    workshop: Workshop, uninterrupted: Any
) -> None:
    """The bit flips in step 8, after which there is a save."""
    run, plan = workshop.folder / "run", workshop.folder / "faults.yaml"
    job = workshop.start("run", *LONG, "resilience.chaos=true", faults="0:train:1:hold")
    workshop.wait_for_fault("0:train:1:hold", job)
    plan.write_text("faults: [{kind: flip_gradient, rank: 1, step: 7}]")
    assert main(["chaos", str(run), "--plan", str(plan)]) == 0
    workshop.go()
    ended = job.ended()
    assert ended.code == 0, ended
    assert [event["step"] for event in events(workshop, "disagree")] == [8]
    assert "starting again from step 4" in ended.err
    assert_same_run(run, uninterrupted)


@pytest.mark.long
def test_a_weight_that_differs_on_one_rank_is_noticed_and_its_checkpoints_distrusted(
    workshop: Workshop, uninterrupted: Any
) -> None:
    """The bit flips in step 6; there are saves after steps 4 and 8, and comparisons after 5 and 10."""
    run, plan = workshop.folder / "run", workshop.folder / "faults.yaml"
    settings = (*LONG, "resilience.chaos=true", "resilience.numbers.compare_every=5")
    job = workshop.start("run", *settings, faults="0:train:1:hold")
    workshop.wait_for_fault("0:train:1:hold", job)
    plan.write_text("faults: [{kind: flip_weight, rank: 1, step: 5}]")
    assert main(["chaos", str(run), "--plan", str(plan)]) == 0
    workshop.go()
    ended = job.ended()
    assert ended.code == 0, ended
    assert [(event["step"], event["marked"]) for event in events(workshop, "disagree")] == [(10, [8])]
    assert "starting again from step 4" in ended.err
    assert_same_run(run, uninterrupted)
