"""The ledger finds the classes of simulated runs whose truth is known, and every node-second is in one class."""

from __future__ import annotations

import json
import random
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hpc_train.resilience.heartbeat import Heartbeat, Phase
from hpc_train.resilience.ledger import (
    ACTIVITIES,
    CLASSES,
    LedgerFile,
    LedgerLine,
    Period,
    account_run,
    format_ledger,
    parse_ledger,
)


class SimulatedRun:
    """A run with faults, drawn by a seed, and the truth about its node-seconds."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.truth = dict.fromkeys(CLASSES, 0.0)
        self.periods: list[Period] = []
        self.submitted = self.now = 1000.0
        self.job = ""
        self.saved = 0
        self.pending: list[tuple[int, float]] = []
        """(step, node-seconds) of steps that are not known to be kept yet."""
        for number in range(self.draw.randint(1, 6)):
            self.wait_for_ranks(number)
            self.run_ranks()
        self.settle()

    def pass_time(self, name: str, seconds: float, nodes: int) -> None:
        self.truth[name] += seconds * nodes
        self.now += seconds

    def settle(self) -> None:
        """Steps up to the newest saved one are kept, those after it are lost."""
        for step, seconds in self.pending:
            self.truth["kept" if step <= self.saved else "lost"] += seconds
        self.pending.clear()

    def wait_for_ranks(self, number: int) -> None:
        self.nodes, self.spares = self.draw.choice([(1, 0), (4, 0), (4, 1)])
        again = number > 0 and self.draw.random() < 0.5
        self.attempt = number
        self.job = self.job if again else str(number)
        self.pass_time("restart" if again else "queue", self.draw.uniform(0, 50), self.nodes + self.spares)
        self.settle()

    def spend(self, activity: str, seconds: float) -> None:
        """Let the ranks do something that the ledger's lines tell."""
        self.seconds[activity] += seconds
        if activity == "step":
            self.now += seconds
            self.pending.append((self.step, seconds * self.nodes))
        else:
            self.pass_time(activity, seconds, self.nodes)

    def note(self, ended: bool = False) -> None:
        seconds = dict(self.seconds)
        self.lines.append(LedgerLine(self.attempt, self.now, self.step, seconds, self.nodes, ended))

    def run_ranks(self) -> None:
        draw, began, resumed = self.draw, self.now, self.saved
        self.seconds, self.step = dict.fromkeys(ACTIVITIES.values(), 0.0), resumed
        self.lines: list[LedgerLine] = []
        self.pass_time("start", draw.uniform(0, 3), self.nodes)  # the batch script
        self.spend("start", draw.uniform(1, 5))
        self.spend("load", draw.uniform(0, 2))
        self.note()
        for _ in range(draw.randint(0, 60)):
            self.make_step()
        noticed = self.fail() if draw.random() < 0.7 else self.stop()
        self.truth["spare"] += (self.now - began) * self.spares
        self.periods.append(
            Period(self.attempt, self.job, began, self.now, self.nodes, self.spares, noticed, resumed, self.lines)
        )

    def make_step(self) -> None:
        self.step += 1
        self.spend("data", self.draw.uniform(0, 0.1))
        self.spend("step", self.draw.uniform(0.5, 1.5))
        if self.step % 10 == 0:
            self.spend("save", self.draw.uniform(0, 1))
            self.saved = self.step
        if self.step % 25 == 0:
            self.spend("evaluate", 2.0)
        self.note()

    def fail(self) -> float:
        self.pass_time("detect", self.draw.uniform(0.5, 12), self.nodes)
        noticed = self.now
        self.pass_time("drain", self.draw.uniform(0, 5), self.nodes)
        return noticed

    def stop(self) -> float | None:
        self.spend("save", 1.0)
        self.saved = self.step
        self.spend("drain", self.draw.uniform(0, 2))
        self.note(ended=True)
        return None


@pytest.mark.parametrize("seed", range(60))
def test_classes_are_those_of_the_simulated_run(seed: int) -> None:
    run = SimulatedRun(seed)
    ledger = account_run(run.periods, run.submitted, run.saved)
    total = sum(run.truth.values())
    assert ledger.total == pytest.approx(total, rel=1e-9)
    for name in CLASSES:
        # Lines lie at every step here, so that nothing has to be interpolated.
        assert ledger.seconds[name] == pytest.approx(run.truth[name], abs=1e-6 * total), name


@pytest.mark.parametrize("seconds", [86400.0, -86400.0])
def test_a_clock_that_is_a_day_wrong_only_moves_time_between_start_and_end(seconds: float) -> None:
    """Rank 0 has written the lines on another node than that of the batch script."""
    for seed in range(20):
        run = SimulatedRun(seed)
        right = account_run(run.periods, run.submitted, run.saved)
        periods = [
            replace(period, lines=[replace(line, time=line.time + seconds) for line in period.lines])
            for period in run.periods
        ]
        wrong = account_run(periods, run.submitted, run.saved)
        assert min(wrong.seconds.values()) > -1e-6
        assert wrong.total == pytest.approx(right.total)
        for name in set(CLASSES) - {"start", "drain", "detect", "other"}:
            assert wrong.seconds[name] == pytest.approx(right.seconds[name]), name


def test_lines_some_seconds_apart_shift_little() -> None:
    run = SimulatedRun(3)
    coarse = [replace(period, lines=period.lines[::3]) for period in run.periods]
    ledger = account_run(coarse, run.submitted, run.saved)
    total = sum(run.truth.values())
    assert ledger.total == pytest.approx(total, rel=1e-9)
    assert abs(ledger.seconds["kept"] - run.truth["kept"]) < 0.06 * total


def test_ranks_that_never_came_to_training_only_started() -> None:
    ledger = account_run([Period(0, "1", 10.0, 40.0, nodes=2, noticed=30.0)], submitted=5.0, saved=0)
    assert [ledger.seconds[name] for name in ("queue", "start", "drain")] == [10, 40, 20]
    assert ledger.goodput == 0


def test_lines_hold_what_a_process_spent_its_time_on(tmp_path: Path) -> None:
    path = tmp_path / "goodput.jsonl"
    heartbeat = Heartbeat()
    heartbeat.enter(Phase.FIRST_STEP)
    time.sleep(0.2)
    heartbeat.enter(Phase.SAVE)
    file = LedgerFile(path, attempt=2, nodes=4)
    file.write(heartbeat, 5)
    file.write(heartbeat, 6)  # less than 5 s later, and nothing that has to be written
    file.write(heartbeat, 7, due=True)
    file.write(heartbeat, 8, ended=True)
    lines = parse_ledger(path.read_text() + '{"attempt": 1}\n{"attempt": 2, "rest')
    assert [(line.step, line.ended) for line in lines] == [(5, False), (7, False), (8, True)]
    assert 0.2 <= lines[0].seconds["step"] < 5
    assert lines[0].seconds["start"] > 0
    assert path.stat().st_mode & 0o777 == 0o600
    assert file.failure is None


def test_a_file_that_cannot_be_written_is_said_and_stops_nothing(tmp_path: Path) -> None:
    file = LedgerFile(tmp_path / "missing" / "goodput.jsonl", 0, 1)
    file.write(Heartbeat(), 1)
    assert file.failure == "goodput.jsonl: No such file or directory"


SOUND = asdict(LedgerLine(0, 1.0, 1, {"step": 1.0}))


@pytest.mark.parametrize(
    "change",
    [
        {"attempt": -1},
        {"step": 1.5},
        {"time": "now"},
        {"time": 1e300},
        {"nodes": True},
        {"seconds": []},
        {"seconds": {"lunch": 1.0}},
        {"seconds": {"step": -1}},
        {"seconds": {"step": float("nan")}},
    ],
)
def test_damaged_lines_are_left_out(change: dict[str, object]) -> None:
    assert len(parse_ledger(json.dumps(SOUND))) == 1
    assert parse_ledger(json.dumps({**SOUND, **change})) == []


def test_text_names_the_largest_class_first() -> None:
    run = SimulatedRun(1)
    ledger = account_run(run.periods, run.submitted, run.saved)
    text = format_ledger(ledger)
    assert text[0].startswith(f"goodput {ledger.goodput:.1%} of ")
    assert CLASSES[max(ledger.seconds, key=lambda name: ledger.seconds[name])] in text[1]
    assert format_ledger(account_run([], 0.0, 0)) == ["nothing to account for yet"]
