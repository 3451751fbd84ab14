"""A run of three copies goes on when one of them is killed, in the same processes, to its last checkpoint."""

from __future__ import annotations

import json

import pytest
from jobs import FAULTY, Workshop, numbers, processes, saved_steps

LOOSE = (*FAULTY, "launch.ranks=3", "train.global_batch=6", "train.steps=12", "checkpoint.every=4")
SYNC = ("parallel.sync.every=4", "parallel.sync.lost_after_seconds=60")


def test_a_run_goes_on_without_a_copy_that_is_killed(workshop: Workshop) -> None:
    ended = workshop.train("run", *LOOSE, *SYNC, faults="2:train:6:kill")
    run = workshop.folder / "run"
    assert ended.code == 0, ended
    assert ended.err.count("copy 2 of the model (rank 2) is lost: its process has ended; 2 go on") == 1
    records = numbers(run)
    assert [record[0] for record in records] == list(range(1, 13))
    assert [record[4] for record in records] == [96] * 5 + [64] * 7, "tokens: its third of each batch is not trained"
    assert records[-1][1] < records[0][1]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert {event["attempt"] for event in events} == {0}
    (lost,) = [event for event in events if event["event"] == "lost_copy"]
    assert (lost["step"], lost["copy"], lost["ranks"], lost["copies_left"]) == (6, 2, [2], 2)
    assert lost["untrained_samples_per_step"] == 2
    assert saved_steps(run)[-1] == 12
    assert processes(workshop.folder) == []


@pytest.mark.long
def test_a_lost_copy_is_there_again_when_the_run_is_started_again(workshop: Workshop) -> None:
    first = workshop.train("run", *LOOSE, *SYNC, faults="1:train:6:kill")
    assert first.code == 0, first
    again = workshop.train("run", *LOOSE, *SYNC, "train.steps=16")
    assert again.code == 0, again
    assert [record[4] for record in numbers(workshop.folder / "run")] == [96] * 5 + [64] * 7 + [96] * 4
