"""LoopRecorder: `status`, `report` and `metrics` of a loop of one's own, over attempts that end well and badly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hpc_train
from hpc_train.cli.main import main
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.report.step_table import read_step_table
from hpc_train.resilience.heartbeat import Phase, find_folder, read_beats
from hpc_train.testing import run_ranks


class Wrapped(torch.optim.Optimizer):
    """An optimizer around another that has no hooks of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.state = optimizer, optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups


def train(world: World, directory: Path, first: int, last: int, fail: bool = False) -> list[Any]:
    """Steps first + 1 to last of a run of 30; returns what a watcher of the node sees in the last."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    beats: list[Any] = []
    wrapped = Wrapped(optimizer)  # as Accelerate hands it out
    with hpc_train.LoopRecorder(
        directory, model=model, optimizer=wrapped, steps=30, world=world, first_step=first
    ) as recorder:
        for step in range(first, last):
            with recorder.step(step + 1, tokens=8) as line:
                loss = model(torch.ones(2, 4)).square().mean()
                loss.backward()
                optimizer.step()
                line["loss"] = loss.item()
            if step == 5:
                with recorder.phase("save"):
                    beats = [(beat.task, beat.phase, beat.step) for beat in read_beats(_newest_logs(directory))]
        with (
            pytest.raises(UserError, match="no phase 'sleep'; there are evaluate, load, save"),
            recorder.phase("sleep"),
        ):
            pass
        if fail:
            dist.barrier()  # the first rank to raise ends the others, and rank 0 may be a step behind
            raise FileNotFoundError("no more data")
    return beats


def _newest_logs(directory: Path) -> Path:
    return max((directory / "logs").iterdir(), key=lambda logs: int(logs.name))


def test_a_loop_is_seen_as_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    with pytest.raises(AssertionError, match="no more data"):
        run_ranks(train, 2, run, 0, 12, True)
    status = hpc_train.Run(run).status()
    assert (status.state, status.step, status.steps) == ("FAILED", 12, 30)
    seen = run_ranks(train, 2, run, 5, 30)
    assert (0, Phase.SAVE, 6) in seen[0]
    assert {task for task, _, _ in seen[0]} == {0, 1}
    assert not find_folder(run / "logs/1").exists()
    lines = hpc_train.Run(run).metrics()
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert {line["lr"] for line in lines} == {0.5}
    assert all(line["tokens"] == 8 and line["step_seconds"] >= line["data_seconds"] >= 0 for line in lines)
    assert [event["event"] for event in hpc_train.Run(run).events()] == ["start", "resume", "end"]
    assert hpc_train.Run(run).status().state == "DONE"
    table = read_step_table(run)
    assert table is not None
    assert (run.stat().st_mode & 0o777) == 0o700
    command = [sys.executable, "-m", "hpc_train", "report", "--json", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert report["verdict"]["class"] != ""
    assert report["notes"] == [], "a loop of one's own has no config.yaml to read"
    assert main(["report", "--try", str(run)]) == 2
    assert "whose settings are not recorded" in capsys.readouterr().err
    assert (run / "goodput.jsonl").exists()


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    recorder = hpc_train.LoopRecorder(tmp_path / "file" / "run", model=nn.Linear(1, 1), steps=1)
    with pytest.raises(UserError, match="Not a directory; choose a directory that can be written"):
        recorder.__enter__()
