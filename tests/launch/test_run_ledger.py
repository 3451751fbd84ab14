"""Where a run's time went: real runs with faults, against the times that their own files tell."""

from __future__ import annotations

import json
import subprocess
import time
from typing import Any

import pytest
from jobs import COMMAND, LONG, Workshop

SLOW = (*LONG, "train.steps=12")


def goodput(workshop: Workshop, *options: str) -> str:
    command = [COMMAND[0], "status", str(workshop.folder / "run"), "--goodput", *options]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_seconds_add_up_to_those_of_the_run_and_faults_are_in_their_classes(workshop: Workshop) -> None:
    began = time.time()
    ended = workshop.train("run", *SLOW, "resilience.hang.step_seconds=3", faults="1:train:7:stop 0:train:3:kill")
    took = time.time() - began
    assert ended.code == 0, ended
    (row,) = json.loads(goodput(workshop, "--json"))
    seconds: dict[str, Any] = row["node_seconds"]
    assert row["total"] == pytest.approx(sum(seconds.values()), abs=0.01)
    assert 0.5 * took < row["total"] < took + 1
    assert seconds["detect"] >= 2.5  # the stopped rank
    assert seconds["start"] > seconds["kept"] > 0
    assert seconds["lost"] > 0
    assert abs(seconds["other"]) < 0.005 * row["total"] + 0.05
    assert 0 < row["goodput"] < 1
    text = goodput(workshop)
    assert "goodput " in text
    assert "starting: imports, rendezvous, model" in text


def test_a_run_without_a_ledger_has_nothing_to_account_for(workshop: Workshop) -> None:
    run = workshop.folder / "run"
    (run / "logs").mkdir(parents=True)
    assert "nothing to account for yet" in goodput(workshop)
