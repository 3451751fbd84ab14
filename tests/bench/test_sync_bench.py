"""`bench sync` trains both sides over a link of its own; how fast anything is is not asked here."""

from __future__ import annotations

import json

import pytest

from hpc_train.bench.thin_link.sync import SyncMeasurement, SyncOptions, run_sync_command, summarise_sync
from hpc_train.cli.main import main
from hpc_train.errors import UserError

SMALL = ("model.hidden=64", "model.layers=1", "model.feed_forward=128", "train.sequence_length=16")
OPTIONS = SyncOptions([], rounds=3, steps=1, every=4, rate=100.0)


@pytest.mark.usefixtures("forked_ranks")
def test_bytes_over_the_link_are_those_of_the_formula(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--rounds", "1", "--steps", "1", "--every", "4", "--rate", "400", "--json"]
    assert main(["bench", "sync", *SMALL, "parallel.sync.compression=int8", *arguments]) == 0
    measured = json.loads(capfd.readouterr().out)["measured"]
    for side, room in (("ddp", 1.1), ("loose", 1.6)):  # headers, and of the loose side the sums of every step
        assert measured["formula_bytes"][side] < measured["sent_bytes"][side] < room * measured["formula_bytes"][side]
    assert measured["sent_bytes"]["loose"] < measured["sent_bytes"]["ddp"] / 8


def test_the_speedup_is_the_median_of_the_rounds() -> None:
    seconds = {"ddp": [2.0, 8.0, 3.0], "loose": [1.0, 1.0, 1.0]}
    result = summarise_sync(OPTIONS, SyncMeasurement(10, 100, seconds, {}, {}))
    assert result.speedup == 3.0
    assert result.tokens_per_second == {"ddp": pytest.approx(100 / 3), "loose": 100.0}


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(UserError, match=r"--every 0: must be at least 1"):
        run_sync_command(SyncOptions([], 1, 1, 0, 100.0), as_json=False)
    with pytest.raises(UserError, match=r"--rate -1: must be above 0"):
        run_sync_command(SyncOptions([], 1, 1, 1, -1), as_json=False)
