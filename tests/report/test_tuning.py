"""The search for faster settings: what it keeps, what it leaves alone, and that it stays within its budget."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from lab import BASE

from hpc_train.cli.main import main
from hpc_train.config.compose import compose
from hpc_train.report.tuning import Trial, Tuning, format_command, is_faster, list_changes, time_steps

START = ("parallel.tp=2", "parallel.strategy=zero1", "train.micro_batch=1", "train.global_batch=16")


def model_seconds(settings: Mapping[str, str]) -> float:
    """A made-up machine: larger micro-batches cost less, and each layout has its price."""
    get = {"train.micro_batch": "1", "parallel.tp": "2", "parallel.strategy": "zero1", "parallel.pp": "1", **settings}
    micro = int(get["train.micro_batch"])
    price = {"ddp": 0.0, "zero1": 0.01, "zero2": 0.02, "zero3": 0.05}[get["parallel.strategy"]]
    seconds = 0.1 + 0.2 / micro + price + 0.15 * (get["parallel.tp"] == "2") + 0.1 * (get["parallel.pp"] == "2")
    return seconds * (0.99 if get.get("parallel.static_graph") == "true" else 1.0)


def search(minutes: float = 1000.0, noise: float = 0.001, verdict: str = "launch") -> Tuning:
    def measure(settings: Mapping[str, str]) -> Trial:
        return Trial(dict(settings), model_seconds(settings), noise, verdict, 1.0)

    tuning = Tuning(["data=stdlib", *START], measure, lambda trial, best: None, minutes, 2)
    tuning.run()
    return tuning


def best_of(tuning: Tuning) -> Trial:
    return [tuning.trials[0], *(trial for trial in tuning.trials if trial.kept)][-1]


@pytest.mark.parametrize("verdict", ["launch", "network", "compute"])
def test_it_finds_the_best_of_all_in_a_fifth_of_the_runs(verdict: str) -> None:
    layouts = [("1", "1", s) for s in ("ddp", "zero1", "zero2", "zero3")]
    layouts += [(tp, pp, s) for tp, pp in (("2", "1"), ("1", "2")) for s in ("zero1", "zero2", "zero3")]
    space = [
        {
            "train.micro_batch": str(m),
            "parallel.tp": tp,
            "parallel.pp": pp,
            "parallel.strategy": s,
            "parallel.static_graph": g,
        }
        for m, (tp, pp, s), g in itertools.product((1, 2, 4, 8), layouts, ("true", "false"))
    ]
    best = min(map(model_seconds, space))
    tuning = search(verdict=verdict)
    assert best_of(tuning).seconds <= 1.03 * best
    assert len(tuning.trials) <= len(space) / 5
    runs_until_best = tuning.trials.index(best_of(tuning)) + 1
    assert runs_until_best <= 4


def test_nothing_is_kept_inside_the_noise() -> None:
    tuning = search(noise=1.0)
    assert not any(trial.kept for trial in tuning.trials)


def test_it_stays_within_its_budget() -> None:
    tuning = search(minutes=8.0)
    assert tuning.spent <= 8.0
    assert len(tuning.trials) == 4


def test_a_change_that_fails_is_not_kept() -> None:
    best = Trial({}, 1.0, 0.01, "launch", 1.0)
    assert not is_faster(Trial({"a": "b"}, math.inf, 0.0, "failed", 1.0, "no memory"), best)
    assert is_faster(Trial({"a": "b"}, 0.9, 0.01, "compute", 1.0), best)
    assert not is_faster(Trial({"a": "b"}, 0.985, 0.0, "compute", 1.0), best)


def test_what_is_learned_stays_the_same() -> None:
    changes = list(list_changes(["data=stdlib", *START], Trial({}, 1.0, 0.0, "launch", 1.0), 2))
    keys = {key for change in changes for key, _ in change}
    assert keys
    assert not [key for key in keys if key.startswith(("optim", "data", "precision", "model")) or "global_batch" in key]
    for change in changes:
        compose([*START, *(f"{key}={value}" for key, value in change)])


def test_the_command_has_each_setting_once() -> None:
    command = format_command(["parallel.tp=2", "model=llama_tiny"], {"parallel.tp": "1"})
    assert command == "hpc-train train model=llama_tiny parallel.tp=1"


def test_a_few_slow_steps_do_not_count(tmp_path: Path) -> None:
    seconds = [5.0, 5.0, 5.0, *[0.1, 0.11, 0.09] * 5, 3.0]
    lines = [json.dumps({"step": n, "step_seconds": value}) for n, value in enumerate(seconds, 1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    middle, noise = time_steps(tmp_path)
    assert middle == pytest.approx(0.1)
    assert noise < 0.01


@pytest.mark.timeout(600)
def test_a_bad_start_is_mended(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = [*(one for one in BASE if not one.startswith("train.steps")), f"data.path={store}", "launch.ranks=2"]
    words = [
        "tune",
        *base,
        "train.micro_batch=1",
        "--steps",
        "12",
        "--minutes",
        "2",
        "--folder",
        str(tmp_path / "tune"),
    ]
    assert main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["seconds"] <= result["trials"][0]["seconds"]
    assert len(result["trials"]) == len((tmp_path / "tune/tune.jsonl").read_text().splitlines()) > 1
    assert main([*words, "--json"]) == 2
    assert "is not empty" in capsys.readouterr().err
