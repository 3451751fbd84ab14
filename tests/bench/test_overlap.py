"""`bench overlap` measures over a link of its own and leaves nothing behind; how fast anything is is not asked here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rank_processes import assert_they_end

from hpc_train.bench.thin_link.overlap import OverlapMeasurement, OverlapOptions, run_overlap_command, summarise_overlap
from hpc_train.cli.main import main
from hpc_train.errors import EXIT_USER_ERROR, UserError

WORDS = ["bench", "overlap", "--tokens", "64", "--hidden", "64"]
COMMAND = [sys.executable, "-m", "hpc_train", *WORDS]
OPTIONS = OverlapOptions(rounds=3, steps=1, tokens=64, hidden=64, ratio=0.5, rate=None)


@pytest.mark.usefixtures("forked_ranks")
def test_json_says_what_was_sent_and_how_much_of_it_was_waited_for(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--rounds", "2", "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["options"] == {**vars(OPTIONS), "rounds": 2}
    assert result["link_bytes"] == 4 * 32 * 64 * 4, "half the positions, four times a step, float32"
    assert result["mbit_per_second"] > 0
    assert result["compute_seconds"] > 0
    for name in ("synchronous", "asynchronous"):
        way = result[name]
        assert way["sent_bytes"] > result["link_bytes"], f"{name}: everything crosses the link"
        assert way["exposed_seconds"] < way["step_seconds"]
        assert way["hidden"] == pytest.approx(1 - way["exposed_seconds"] / way["communication_seconds"])
    assert result["asynchronous"]["sent_bytes"] < 1.5 * result["link_bytes"], "nothing crosses it twice"


@pytest.mark.long
def test_the_table_names_both_ways_and_the_conditions() -> None:
    done = subprocess.run([*COMMAND, "--rounds", "2", "--rate", "500"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    for words in ("64 tokens, 64 -> 256 -> 64", "link 500 Mbit/s", "\nsynchronous", "\nasynchronous"):
        assert words in done.stdout


def test_the_exposed_wait_is_the_median_of_what_a_step_takes_beyond_compute_in_the_same_round() -> None:
    seconds = {
        "compute_alone": [1.0, 5.0, 1.0],
        "synchronous": [2.0, 6.5, 2.5],
        "asynchronous": [1.25, 5.5, 1.0],
        "collectives_alone": [2.0, 2.0, 9.0],
        "ring_alone": [1.0, 1.0, 1.0],
    }
    result = summarise_overlap(OPTIONS, OverlapMeasurement(100.0, 10, {"synchronous": 15, "asynchronous": 11}, seconds))
    assert result.compute_seconds == 1.0
    assert (result.synchronous.exposed_seconds, result.synchronous.hidden) == (1.5, 0.25)
    assert (result.asynchronous.exposed_seconds, result.asynchronous.hidden) == (0.25, 0.75)
    assert (result.synchronous.step_seconds, result.asynchronous.step_seconds) == (2.5, 1.25)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_it_no_rank_no_namespace_and_no_link_is_left(number: signal.Signals, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([*COMMAND, "--rounds", "1000000"], stdout=subprocess.DEVNULL, env=environment)
    try:
        ranks = _ranks_of(process)
        ours, *theirs = (_network(process_id) for process_id in ("self", *ranks))
        assert len({ours, *theirs}) == 3, "each rank has a network of its own"
        process.send_signal(number)
        process.wait(timeout=60)
    finally:
        process.kill()
    assert_they_end(ranks, seconds=60)
    networks = subprocess.run(["lsns", "--type", "net", "--output", "NS", "--noheadings"], capture_output=True)
    assert not set(theirs) & {int(name) for name in networks.stdout.split()}
    assert number == signal.SIGKILL or list(tmp_path.iterdir()) == []
    assert "link0" not in subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout


def _ranks_of(process: subprocess.Popen[bytes]) -> list[str]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while len(ranks := [pid for pid in children.read_text().split() if b"overlap_rank" in _command(pid)]) < 2:
        assert process.poll() is None
        time.sleep(0.02)
    return ranks


def _command(process_id: str) -> bytes:
    try:
        return Path(f"/proc/{process_id}/cmdline").read_bytes()
    except FileNotFoundError:  # `ip` has already ended
        return b""


def _network(process_id: str) -> int:
    return Path(f"/proc/{process_id}/ns/net").stat().st_ino


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rounds": 1}, "--rounds 1: must be at least 2"),
        ({"steps": 0}, "--steps 0"),
        ({"tokens": 63}, "--tokens 63: must be a multiple of the 2 ranks"),
        ({"hidden": 0}, "--hidden 0"),
        ({"rate": -1.0}, "--rate -1.0: must be above 0"),
        ({"ratio": float("nan")}, "--ratio nan"),
    ],
)
def test_wrong_input_is_refused_in_a_line(changes: dict[str, float], words: str) -> None:
    with pytest.raises(UserError, match=words):
        run_overlap_command(OverlapOptions(**{**vars(OPTIONS), **changes}), as_json=False)


def test_without_iproute2_a_line_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="needs `ip`, which is not here; install iproute2"):
        run_overlap_command(OPTIONS, as_json=False)


def test_who_may_not_make_a_namespace_is_told_what_would_work() -> None:
    powerless = ["setpriv", "--bounding-set", "-sys_admin", *COMMAND]
    done = subprocess.run(powerless, capture_output=True, text=True, timeout=240)
    assert done.returncode == EXIT_USER_ERROR
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "hpc-train: bench overlap: this process may not make a network namespace, which takes root; "
        "try `unshare --user --map-root-user --net hpc-train bench overlap`"
    ]
