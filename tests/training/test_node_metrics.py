"""The metrics file of a node: goodput over all attempts, atomic writes, and a folder that does not answer."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from hpc_train.config.compose import compose
from hpc_train.interfaces import Task
from hpc_train.resilience.heartbeat import Heartbeat, Phase
from hpc_train.resilience.ledger import LedgerLine, account_run
from hpc_train.training.records.node_metrics import MetricsTextFile, NodeMetrics, read_earlier_periods
from hpc_train.training.run_directory import RunDirectory

TASK = Task(process=0, processes=2, local=0, node=0, nodes=1, launcher="single", host="here")


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path, tmp_path / "checkpoints")


def write_lines(directory: RunDirectory, *lines: LedgerLine) -> None:
    with (directory.path / "goodput.jsonl").open("a") as file:
        for line in lines:
            file.write(json.dumps(line.__dict__) + "\n")


def write_events(directory: RunDirectory, *events: dict[str, object]) -> None:
    directory.events.write_text("".join(json.dumps(event) + "\n" for event in events))


def read_values(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"^hpc_train_(\w+){.*} (\S+)$", text, re.MULTILINE)}


def test_steps_that_are_made_again_do_not_count_as_goodput(directory: RunDirectory) -> None:
    # Attempt 0: 10 s of start, 100 steps in 100 s. It died, and its ranks started again 20 s later, at step 50.
    lines = [
        LedgerLine(0, 1000.0 + 10 + step, step, {"start": 10.0, "step": float(step)}) for step in range(0, 101, 10)
    ]
    write_lines(directory, *lines)
    write_events(
        directory,
        {"event": "start", "attempt": 0, "step": 0},
        {"event": "restart", "attempt": 0, "action": "restarted"},
        {"event": "resume", "attempt": 1, "step": 50},
    )
    write_lines(directory, LedgerLine(1, 1000.0 + 110 + 20 + 60, 100, {"start": 10.0, "step": 50.0}))
    periods, job = read_earlier_periods(directory, 2)
    assert (periods[0].job, periods[1].job, job) == ("attempt 0", "attempt 0", "attempt 2")
    ledger = account_run(periods, periods[0].began, 100)
    assert ledger.seconds["kept"] == pytest.approx(100)
    assert ledger.seconds["lost"] == pytest.approx(50)
    assert ledger.seconds["restart"] == pytest.approx(20)
    assert ledger.total == pytest.approx(190)


def test_the_wait_for_another_job_is_not_counted(directory: RunDirectory) -> None:
    write_lines(directory, LedgerLine(0, 1110.0, 100, {"start": 10.0, "step": 100.0}))
    write_lines(directory, LedgerLine(1, 9110.0, 200, {"start": 10.0, "step": 100.0}))
    write_events(
        directory,
        {"event": "start", "attempt": 0, "step": 0},
        {"event": "restart", "attempt": 0, "action": "requeued"},
        {"event": "resume", "attempt": 1, "step": 100},
    )
    periods, _ = read_earlier_periods(directory, 2)
    assert account_run(periods, periods[0].began, 200).goodput == pytest.approx(200 / 220)


def test_a_long_attempt_is_thinned_without_changing_what_it_says(directory: RunDirectory) -> None:
    write_lines(directory, *(LedgerLine(0, 1000.0 + step, step, {"step": float(step)}) for step in range(1, 20_001)))
    (period,), _ = read_earlier_periods(directory, 1)
    assert len(period.lines) < 150
    ledger = account_run([period], period.began, 12_345)
    assert ledger.seconds["kept"] == pytest.approx(12_345)


def test_damaged_files_of_earlier_attempts_are_left_out(directory: RunDirectory) -> None:
    write_lines(directory, LedgerLine(0, 1110.0, 100, {"step": 100.0}))
    (directory.path / "goodput.jsonl").open("a").write('{"attempt": 0, "ti\n[]\n')
    directory.events.write_text('{"event": "resume", "attempt": "x", "step": null}\n{"event": "re\n')
    periods, _ = read_earlier_periods(directory, 1)
    assert [(period.attempt, period.resumed) for period in periods] == [(0, None)]


def wait_for_file(folder: Path, found: bool = True) -> list[Path]:
    deadline = time.monotonic() + 30
    while bool(files := list(folder.glob("*.prom"))) != found and time.monotonic() < deadline:
        time.sleep(0.01)
    assert bool(files) == found
    return files


def test_the_file_has_the_newest_step_and_goes_with_the_run(directory: RunDirectory, tmp_path: Path) -> None:
    folder = tmp_path / "collected"
    folder.mkdir()
    config = compose([f"loggers.textfile_dir={folder}", "loggers.textfile_seconds=0", "loggers.name=mine"])
    metrics = NodeMetrics(config, directory, 3, 100, 0, TASK)
    heartbeat = Heartbeat()
    heartbeat.enter(Phase.STEP, 7)
    metrics.update({"step": 7, "loss": 1.5, "validation_loss": 2.5, "mfu": None}, heartbeat)
    (path,) = wait_for_file(folder)
    values = read_values(path.read_text())
    assert {name: values[name] for name in ("step", "steps", "loss", "restarts", "validation_loss")} == {
        "step": 7,
        "steps": 100,
        "loss": 1.5,
        "restarts": 3,
        "validation_loss": 2.5,
    }
    assert "mfu_ratio" not in values
    assert 0 <= values["goodput_ratio"] <= 1

    metrics.update({"step": 8, "loss": float("nan"), "mfu": 0.4}, heartbeat)
    deadline = time.monotonic() + 30
    while read_values(path.read_text())["step"] != 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    values = read_values(path.read_text())
    assert (values["mfu_ratio"], values["validation_loss"]) == (0.4, 2.5)  # the newest that there is
    assert values["loss"] != values["loss"]
    metrics.close()
    assert list(folder.iterdir()) == []


def test_a_write_does_not_follow_a_link_that_somebody_has_put_there(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    path = tmp_path / "collected" / "run.prom"
    path.parent.mkdir()
    path.symlink_to(victim)
    file = MetricsTextFile(path)
    file.write("new")
    deadline = time.monotonic() + 30
    while path.is_symlink() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (path.read_text(), victim.read_text()) == ("new", "mine")
    file.close()
    assert list(path.parent.iterdir()) == []
