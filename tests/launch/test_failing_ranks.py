"""One failing rank ends its job at once, is named with its own reason, and leaves no process behind."""

from __future__ import annotations

import re

import pytest
from jobs import FAULTY, Workshop, processes

from hpc_train.errors import EXIT_USER_ERROR
from hpc_train.training.records.run_records import read_metrics

ENDLESS = (*FAULTY, "train.steps=100000", "checkpoint.every=0")


def test_a_rank_that_raises_is_shown_and_one_that_hangs_is_killed(workshop: Workshop) -> None:
    ended = workshop.train("run", *ENDLESS, faults="1:train:3:raise 0:train:3:hold")
    assert ended.code == 1
    first, *frames, last = ended.err.splitlines()
    assert first.startswith("hpc-train: task 1 on ")
    assert first.endswith(" failed first: RuntimeError: a fault of the user's model")
    assert re.fullmatch(r"  .*faulty_model.py:\d+, in act: raise RuntimeError\(.*\)", frames[0])
    assert all("faulty_model.py" in frame for frame in frames), "the user's own lines, and no others"
    assert last == f"  the whole traceback: {workshop.folder / 'run/logs/0/task-1.log'}"
    assert len(ended.err.splitlines()) <= 10
    assert processes(workshop.folder) == []
    assert [record["step"] for record in read_metrics(workshop.folder / "run/metrics.jsonl")] == [1, 2]
    logs = workshop.folder / "run/logs/0"
    log = (logs / "task-1.log").read_text()
    assert log.count("Traceback") == 1
    assert "a fault of the user's model" in log
    assert "faulty: 8,448 parameters" in (logs / "task-0.log").read_text()


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_rank_that_is_killed_is_named_and_not_its_peer(workshop: Workshop, rank: int) -> None:
    ended = workshop.train("run", *ENDLESS, faults=f"{rank}:train:3:kill")
    log = workshop.folder / f"run/logs/0/task-{rank}.log"
    assert ended.code != 0
    assert ended.err == f"hpc-train: task {rank} was killed by SIGKILL; its log: {log}\n"
    assert processes(workshop.folder) == []


def test_a_rank_that_leaves_without_a_word_is_named_and_not_its_peer(workshop: Workshop) -> None:
    ended = workshop.train("run", *ENDLESS, faults="1:train:3:exit")
    log = workshop.folder / "run/logs/0/task-1.log"
    assert ended.code != 0
    assert ended.err == f"hpc-train: task 1 exited with code 3 without a word; its log: {log}\n"
    assert processes(workshop.folder) == []


def test_a_mistake_of_the_user_that_only_ranks_can_see_is_one_line(workshop: Workshop) -> None:
    ended = workshop.train("run", *ENDLESS, faults="0:train:1:refuse 1:train:1:refuse")
    assert ended.code == EXIT_USER_ERROR
    assert ended.err == "hpc-train: model.args.size=0: the user's model needs at least 1\n"


def test_a_module_that_does_not_exist_is_one_line(workshop: Workshop) -> None:
    ended = workshop.train("run", "model=custom", "model.module=nowhere", "model.name=faulty", "launch.ranks=1")
    assert ended.code == EXIT_USER_ERROR
    assert ended.err.startswith("hpc-train: model.module=nowhere: cannot be imported")
    assert len(ended.err.splitlines()) == 1
    assert not (workshop.folder / "run").exists(), "nothing was trained"
