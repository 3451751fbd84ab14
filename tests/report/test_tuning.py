"""The search for faster settings: what it keeps, what it leaves alone, and that it stays within its budget."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from lab import BASE

from hpc_train.cli.main import main
from hpc_train.config.compose import compose
from hpc_train.report.tuning.changes import list_changes
from hpc_train.report.tuning.search import Tuning, format_command
from hpc_train.report.tuning.trials import Trial, is_faster, time_steps

START = ("parallel.tp=2", "parallel.strategy=zero1", "train.micro_batch=1", "train.global_batch=16")
"""Small micro-batches, in a layout that communicates more than another."""
NO_OVERLAP = (
    "parallel.strategy=zero3",
    "parallel.prefetch=0",
    "parallel.recompute.mode=full",
    "train.micro_batch=1",
    "train.global_batch=16",
)
"""Small micro-batches, and options that other layouts refuse."""
DEFAULTS = {
    "train.micro_batch": "1",
    "parallel.tp": "1",
    "parallel.pp": "1",
    "parallel.strategy": "ddp",
    "parallel.static_graph": "false",
    "parallel.prefetch": "1",
    "parallel.reshard_after_forward": "true",
    "parallel.recompute.mode": "none",
}


def split(overrides: Sequence[str]) -> dict[str, str]:
    return dict(override.split("=") for override in overrides)


def model_seconds(settings: Mapping[str, str]) -> float:
    """A made-up machine: larger micro-batches cost less, and each layout and each option has its price."""
    get = {**DEFAULTS, **settings}
    price = {"ddp": 0.0, "zero1": 0.01, "zero2": 0.02, "zero3": 0.05}[get["parallel.strategy"]]
    if get["parallel.strategy"] == "zero3":
        price += 0.05 * (int(get["parallel.prefetch"]) < 2) + 0.03 * (get["parallel.reshard_after_forward"] == "true")
    price += 0.03 * (get["parallel.recompute.mode"] == "full")
    price += 0.15 * (get["parallel.tp"] == "2") + 0.1 * (get["parallel.pp"] == "2")
    seconds = 0.1 + 0.2 / int(get["train.micro_batch"]) + price
    return seconds * (0.99 if get["parallel.static_graph"] == "true" else 1.0)


def search(
    minutes: float = 1000.0, noise: float = 0.001, verdict: str = "launch", start: Sequence[str] = START
) -> Tuning:
    def measure(settings: Mapping[str, str]) -> Trial:
        return Trial(dict(settings), model_seconds({**split(start), **settings}), noise, verdict, 1.0)

    tuning = Tuning(["data=stdlib", *start], measure, lambda trial, best: None, minutes, 2)
    tuning.run()
    return tuning


def best_of(tuning: Tuning) -> Trial:
    return [tuning.trials[0], *(trial for trial in tuning.trials if trial.kept)][-1]


def list_space() -> list[dict[str, str]]:
    """List what an exhaustive search on two ranks would run: nothing that a layout refuses, and no layout twice."""
    found = []
    for tp, pp, strategy in itertools.product("12", "12", ("ddp", "zero1", "zero2", "zero3")):
        if (tp, pp) == ("2", "2") or (strategy != "zero1" and (tp, pp) != ("1", "1")):
            continue  # zero2 and zero3 with one copy of the model are zero1
        gathers = strategy == "zero3"
        choices = {
            "train.micro_batch": ("1", "2", "4", "8", *(("16",) if tp == "2" else ())),
            "parallel.static_graph": ("false", "true") if strategy == "ddp" else ("false",),
            "parallel.prefetch": ("0", "1", "2") if gathers else ("1",),
            "parallel.reshard_after_forward": ("true", "false") if gathers else ("true",),
            "parallel.recompute.mode": ("none", "full"),
        }
        layout = {"parallel.tp": tp, "parallel.pp": pp, "parallel.strategy": strategy}
        found += [layout | dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    return [one for one in found if one["parallel.reshard_after_forward"] == "true" or one["parallel.prefetch"] == "1"]


@pytest.mark.parametrize(
    ("verdict", "start", "most_until_best"),
    [
        ("launch", START, 4),
        pytest.param("compute", START, 4, marks=pytest.mark.long),
        ("network", NO_OVERLAP, 6),
        pytest.param("network", START, 4, marks=pytest.mark.long),
    ],
)
def test_it_finds_the_best_of_all_in_a_fifth_of_the_runs(
    verdict: str, start: Sequence[str], most_until_best: int
) -> None:
    space = list_space()
    best = min(map(model_seconds, space))
    tuning = search(verdict=verdict, start=start)
    assert best_of(tuning).seconds <= 1.03 * best
    assert len(tuning.trials) <= len(space) / 5
    assert tuning.trials.index(best_of(tuning)) + 1 <= most_until_best


def test_a_layout_that_refuses_an_option_is_tried_without_it() -> None:
    best = Trial({}, 1.0, 0.0, "network", 1.0)
    changes = map(dict, list_changes(["data=stdlib", *NO_OVERLAP], best, 2))
    (ddp,) = [change for change in changes if change.get("parallel.strategy") == "ddp"]
    assert ddp["parallel.prefetch"] == "1"
    assert "parallel.recompute.mode" not in ddp


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
    command = format_command(["parallel.tp=2", "model=llama_tiny"], {"parallel.tp": "1"}, on_slurm=False)
    assert command == "hpc-train train model=llama_tiny parallel.tp=1"


def test_a_few_slow_steps_do_not_count(tmp_path: Path) -> None:
    seconds = [5.0, 5.0, 5.0, *[0.1, 0.11, 0.09] * 5, 3.0]
    lines = [json.dumps({"step": n, "step_seconds": value}) for n, value in enumerate(seconds, 1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    middle, noise = time_steps(tmp_path)
    assert middle == pytest.approx(0.1)
    assert noise < 0.01


@pytest.mark.timeout(600)
@pytest.mark.long
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
    trials = [json.loads(line) for line in (tmp_path / "tune/tune.jsonl").read_text().splitlines()]
    assert len(result["trials"]) == len(trials)
    # Two ranks for two minutes of all ranks; on a busy machine the first run may leave no time for another.
    assert len(trials) > 1 or 2 * trials[0]["minutes"] > 1
    assert main([*words, "--json"]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_a_layout_with_a_smaller_share_of_the_batch_says_the_micro_batch_that_it_uses() -> None:
    """Else the result would name one that no rank can have, and the same run would be made twice."""
    best = Trial({"parallel.tp": "2", "train.micro_batch": "16"}, 1.0, 0.0, "network", 1.0)
    changes = [dict(change) for change in list_changes(["train.global_batch=16", "train.micro_batch=1"], best, 2)]
    sizes = {
        change["parallel.strategy"]: change.get("train.micro_batch") for change in changes if "parallel.tp" in change
    }
    assert sizes["ddp"] == "8"
    after = Trial({"parallel.tp": "1", "train.micro_batch": "16"}, 1.0, 0.0, "launch", 1.0)
    again = [dict(change) for change in list_changes(["train.global_batch=16", "train.micro_batch=1"], after, 2)]
    assert {"train.micro_batch": "8"} not in again
    assert {"train.micro_batch": "4"} in again
