import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from forked_programs import popen_by_fork
from rank_processes import assert_they_end

from hpc_train.bench import local_ranks
from hpc_train.bench.step.step import run_step_command
from hpc_train.cli.main import main
from hpc_train.errors import EXIT_USER_ERROR, UserError

WORDS = ["bench", "step", "--rounds", "2", "--steps", "1"]
COMMAND = [sys.executable, "-m", "hpc_train", *WORDS]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=240)


def assert_json_has_every_field(result: dict[str, Any], ranks: int) -> None:
    """Of the sides that are measured where none is asked for, which all begin with the same loss."""
    assert (result["ranks"], result["tokens_per_step"], result["rounds"], result["steps"]) == (ranks, 8 * 32, 2, 1)
    assert [side["name"] for side in result["sides"]] == [
        "hpc_train",
        "hpc_train_unrecorded",
        "hand_written",
        "hand_written_tuned",
    ]
    assert result["contract"] == "hand_written"
    ours = result["sides"][0]
    for side in result["sides"]:
        assert side["first_loss"] == pytest.approx(ours["first_loss"], rel=1e-6)
        assert side["tokens_per_second"] == pytest.approx(8 * 32 / side["seconds"])
        assert side["cpu_seconds"] > 0
    for name, ratio in result["ratios"].items():
        theirs = next(side for side in result["sides"] if side["name"] == name)
        assert ratio["wall"] == pytest.approx(theirs["seconds"] / ours["seconds"])
        assert ratio["low"] <= ratio["wall"] <= ratio["high"]
    assert {"import torch", "join", "data", "model and engine", "first step"} <= set(result["startup_seconds"])


@pytest.mark.long
def test_two_ranks(tiny: list[str]) -> None:
    done = bench(*tiny, "--json")
    assert done.returncode == 0, done.stderr
    assert_json_has_every_field(json.loads(done.stdout), 2)


def test_inside_a_launcher_it_joins_as_a_rank_and_accumulates_gradients_alike(
    tiny: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
    command = [*COMMAND, *tiny, "train.micro_batch=3", "--json"]
    assert popen_by_fork(command, env=environment).wait() == 0
    assert_json_has_every_field(json.loads(capfd.readouterr().out), 1)


@pytest.mark.usefixtures("forked_ranks")
def test_peers_are_measured_in_the_same_run_as_every_strategy(
    tiny: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, *tiny, "--peers", "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["ranks"] == 2
    sides = {side["name"]: side for side in result["sides"]}
    assert {"torch_ddp", "torch_fully_shard", "ddp", "zero1", "zero2", "zero3"} <= sides.keys()
    first = [side["first_loss"] for side in result["sides"]]
    assert first == pytest.approx([first[0]] * len(first), rel=1e-5)
    pairs = {pair["ours"]: pair for pair in result["pairs"]}
    assert (pairs["ddp"]["peer"], pairs["zero3"]["peer"]) == ("torch_ddp", "torch_fully_shard")
    faster = sides["torch_ddp"]["seconds"] / sides["ddp"]["seconds"]
    assert pairs["ddp"]["ratio"]["wall"] == pytest.approx(faster)
    assert result["over_base"]["ddp"] == pytest.approx(faster)


@pytest.mark.usefixtures("forked_ranks")
def test_the_table_names_the_sides_the_contract_and_the_start_up(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*WORDS, *tiny]) == 0
    printed = capfd.readouterr().out
    for words in ("hpc_train", "hand_written_tuned", "A step of hand_written takes", "Start-up of rank 0"):
        assert words in printed
    assert list(tmp_path.iterdir()) == []


def test_what_only_the_ranks_can_see_is_told_once_in_one_line(tiny: list[str], tmp_path: Path) -> None:
    done = bench(*tiny, f"data.path={tmp_path}/none.h5")
    assert done.returncode == EXIT_USER_ERROR
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "none.h5" in done.stderr


@pytest.mark.parametrize(
    ("overrides", "rounds", "steps", "words"),
    [
        ([], 1, 5, "--rounds 1"),
        ([], 2, 0, "--steps 0"),
        (["launch=slurm"], 2, 1, "srun hpc-train bench step"),
        (["train.global_batch=3"], 2, 1, "train.global_batch=3"),
    ],
)
def test_wrong_input_is_refused_before_any_rank_starts(
    overrides: list[str], rounds: int, steps: int, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        run_step_command(overrides, rounds, steps, as_json=False)


def test_a_stopped_bench_leaves_no_rank_behind(tiny: list[str]) -> None:
    process = subprocess.Popen([*COMMAND, *tiny, "--rounds", "100000"], stdout=subprocess.DEVNULL)
    try:
        ranks = ranks_of(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    finally:
        process.kill()
    assert_they_end(ranks, seconds=30)


def test_a_stop_while_a_rank_is_being_started_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start_and_be_stopped(*_: object, **__: object) -> subprocess.Popen[bytes]:
        started.append(popen(["sleep", "60"]))
        os.kill(os.getpid(), signal.SIGTERM)  # this process is asked to stop before it has the process in hand
        return started[-1]

    monkeypatch.setattr(local_ranks.subprocess, "Popen", start_and_be_stopped)
    with pytest.raises(SystemExit) as stopped:
        local_ranks.run_local_ranks(["--help"], 2, 1)
    assert stopped.value.code == 128 + signal.SIGTERM
    assert [process.poll() for process in started] == [-signal.SIGKILL]


def ranks_of(process: subprocess.Popen[bytes]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while len(pids := children.read_text().split()) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    return [int(pid) for pid in pids]
