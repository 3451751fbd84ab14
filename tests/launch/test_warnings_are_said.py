"""What a rank warns of reaches the terminal of the command that started it, once, and `hpc-train status`."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from jobs import COMMAND, FAULTY, Ended, Workshop

SAID = "hpc-train: warning: "


def list_warnings(ended: Ended) -> list[str]:
    """The warnings on stderr; each is one line, and none is among the progress on stdout."""
    assert SAID not in ended.out
    return [line.removeprefix(SAID) for line in ended.err.splitlines() if line.startswith(SAID)]


def status(run: Path, *options: str) -> str:
    return subprocess.run([COMMAND[0], "status", run, *options], check=True, capture_output=True, text=True).stdout


def damage(step: Path) -> None:
    """Change every byte of the second half of the largest shard file of a checkpoint step."""
    path = max((step / "shards").rglob("*.h5"), key=lambda file: file.stat().st_size)
    content = bytearray(path.read_bytes())
    half = len(content) // 2
    content[half:] = bytes(byte ^ 0xFF for byte in content[half:])
    path.write_bytes(content)


def list_unusable(run: Path) -> list[tuple[int, int, str]]:
    """The attempt, the step and the reason of each checkpoint that a start could not use."""
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [
        (event["attempt"], event["step"], event["why"]) for event in events if event["event"] == "unusable_checkpoint"
    ]


def test_a_damaged_or_lost_step_that_is_skipped_is_said_once(workshop: Workshop) -> None:
    run = workshop.folder / "run"
    settings = (*FAULTY, "train.steps=4", "checkpoint.every=2", "launch.ranks=1")
    assert workshop.train("run", *settings).code == 0
    damage(run / "checkpoints" / "step-4")

    again = workshop.train("run", *settings)
    assert again.code == 0, again
    (line,) = [line for line in list_warnings(again) if "is damaged: " in line]
    assert line.startswith("checkpoint step 4 in ")
    assert line.endswith("; it is skipped")
    assert "resumed at step 2 of 4" in again.out

    (row,) = json.loads(status(run, "--json"))
    assert f"warning: {line}" in row["warnings"]
    assert f"warning: {line}" in status(run)
    assert list_unusable(run) == [(1, 4, line.removesuffix("; it is skipped"))]

    shutil.rmtree(run / "checkpoints" / "step-4")
    again = workshop.train("run", *settings)
    assert again.code == 0, again
    (line,) = [line for line in list_warnings(again) if "any more" in line]
    assert line == f"checkpoint step 4 is not in {run}/checkpoints any more; the run goes on from step 2"
    assert f"warning: {line}" in status(run)
    assert list_unusable(run)[1:] == [(2, 4, line.removesuffix("; the run goes on from step 2"))]


def test_what_all_ranks_warn_of_is_said_once_and_what_one_rank_does_too(workshop: Workshop) -> None:
    settings = (*FAULTY, "train.steps=2", "checkpoint.every=1", "checkpoint.stage_dir=/dev/shm")
    ended = workshop.train("run", *settings, faults="1:train:2:warn")
    assert ended.code == 0, ended
    assert sorted(line for line in list_warnings(ended) if "waited" not in line) == [
        "checkpoint.stage_dir=/dev/shm is not used: it is in memory, where a copy gains nothing; give a directory on "
        "a disk of the node",
        "rank 1 has seen something",
    ]
    folder = workshop.folder / "run" / "logs" / "0" / "warnings"
    assert folder.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())


def test_a_torch_newer_than_the_tested_ones_is_said_once_and_trains(workshop: Workshop) -> None:
    model = ("model=custom", "model.module=newer_torch_model", "model.name=newer_torch")
    ended = workshop.train("run", *model, "train.steps=2", "checkpoint.every=0")
    assert ended.code == 0, ended
    (line,) = list_warnings(ended)
    assert line.startswith("torch 99.1.0 is newer than ")


@pytest.mark.long
def test_a_block_that_falls_back_from_compilation_is_said_once(workshop: Workshop) -> None:
    model = ("model=custom", "model.module=breaking_model", "model.name=breaking")
    ended = workshop.train("run", *model, "parallel.compile=true", "train.steps=2", "checkpoint.every=0")
    assert ended.code == 0, ended
    (line,) = list_warnings(ended)
    assert line.startswith("parallel.compile=true: a part of Block runs uncompiled: ")
