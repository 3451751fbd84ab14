"""Final values are read from the end of a file, and a plot has the form that its axes ask for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_train.cli.run.results import plot_run, plot_sweep
from hpc_train.errors import UserError
from hpc_train.launch.state.progress import find_best_value, read_final_values
from hpc_train.report.sweep_results import PointResult, SweepResults, select_varied_keys, spans_decades


def lines(path: Path, count: int, every: int = 50) -> None:
    with path.open("w") as file:
        for step in range(1, count + 1):
            rare = {"validation_loss": 100.0 + step} if step % every == 0 else {}
            file.write(json.dumps({"step": step, "loss": 1.0 + abs(step - 70), "pad": "x" * 200, **rare}) + "\n")


@pytest.mark.parametrize("count", [1, 49, 50, 51, 149, 2000, 20000])
def test_the_last_values_are_found_from_the_end(count: int, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines(path, count)
    found = read_final_values(path)
    assert (found["step"], found["loss"]) == (count, 1.0 + abs(count - 70))
    assert found.get("validation_loss") == (100.0 + count // 50 * 50 if count >= 50 else None)
    with path.open("a") as file:
        file.write('{"step": 99999, "loss": 3')
    assert read_final_values(path) == found
    assert find_best_value(path, "loss") == 1.0 + max(0, 70 - count)
    assert find_best_value(path, "step") == 1


def test_a_run_without_a_step_has_no_values(tmp_path: Path) -> None:
    assert read_final_values(tmp_path / "nothing") == {}
    assert find_best_value(tmp_path / "nothing", "loss") is None
    (tmp_path / "empty").write_text("")
    assert read_final_values(tmp_path / "empty") == {}
    (tmp_path / "torn").write_text('{"step"')
    assert read_final_values(tmp_path / "torn") == {}


def results(*rows: tuple[dict[str, Any], float | None]) -> SweepResults:
    made = [
        PointResult(f"p{index}", "DONE", swept, {} if value is None else {"step": 1, "loss": value})
        for index, (swept, value) in enumerate(rows)
    ]
    return SweepResults(made, "loss")


def drawn(results: SweepResults, path: Path) -> str:
    plot_sweep(results, path / "x.svg")
    return (path / "x.svg").read_text()


def texts(svg: str) -> set[str]:
    """What is written in the picture: matplotlib puts it into comments beside the glyphs."""
    return {line.strip()[5:-4] for line in svg.splitlines() if line.strip().startswith("<!-- ")}


def test_one_axis_is_a_line_over_its_values(tmp_path: Path) -> None:
    svg = drawn(results(*(({"optim.lr": lr}, 2.0) for lr in (1e-4, 1e-3, 1e-2))), tmp_path)
    assert {"optim.lr", "loss (nats a token)"} <= texts(svg)
    assert any("10^{-3}" in text or "10^" in text for text in texts(svg)), "a logarithmic axis"
    svg = drawn(results(({"model": "small"}, 3.0), ({"model": "large"}, 2.0)), tmp_path)
    assert {"model", "small", "large"} <= texts(svg)


def test_of_two_axes_the_second_are_lines_and_more_are_ranked(tmp_path: Path) -> None:
    two = results(*(({"optim.lr": lr, "train.seed": seed}, lr + seed) for lr in (1, 2, 3) for seed in (0, 1)))
    assert {"train.seed=0", "train.seed=1", "optim.lr"} <= texts(drawn(two, tmp_path))
    three = results(
        *(({"a.x": a, "b": b, "c": c}, 4 * a + 2 * b + c) for a in (0, 1) for b in (0, 1) for c in (0, 1)),
        ({"a.x": 9, "b": 9, "c": 9}, None),
    )
    written = texts(drawn(three, tmp_path))
    assert "x=1, b=0, c=1" in written
    assert "x=9, b=9, c=9" not in written, "it has no value"
    assert select_varied_keys(three.rows, three.keys) == ["a.x", "b", "c"]
    assert select_varied_keys(results(({"a": 1, "b": 2}, 1), ({"a": 1, "b": 3}, 1)).rows, ["a", "b"]) == ["b"]


def test_decades() -> None:
    assert spans_decades([1e-4, 1e-3])
    assert not spans_decades([1, 2, 9])
    assert not spans_decades([0, 1e9])


def test_no_value_and_no_place_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no point has a value of loss yet"):
        plot_sweep(results(({"a": 1}, None)), tmp_path / "x.png")
    with pytest.raises(UserError, match="--plot"):
        plot_sweep(results(({"a": 1}, 2.0)), tmp_path / "nowhere/x.png")


def test_one_run_is_drawn_over_its_steps(tmp_path: Path) -> None:
    steps = [{"step": step, "loss": 3.0 / step, "lr": 0.1} for step in range(1, 9)] + [{"step": 9, "loss": None}]
    steps[3]["validation_loss"] = 1.0
    plot_run(steps, None, "my run", tmp_path / "x.svg")
    assert {"my run", "step", "loss", "validation_loss"} <= texts((tmp_path / "x.svg").read_text())
    plot_run(steps, "lr", "my run", tmp_path / "y.svg")
    assert "loss" not in texts((tmp_path / "y.svg").read_text())
    with pytest.raises(UserError, match="the run has no step with a value of loss yet"):
        plot_run([], None, "my run", tmp_path / "z.svg")


def test_the_winner_is_the_lowest_loss_or_the_highest_speed() -> None:
    found = results(({"a": 1}, 3.0), ({"a": 2}, 2.0), ({"a": 3}, None))
    assert found.winner is found.rows[1]
    assert results(({"a": 1}, None)).winner is None
    fast = [PointResult(str(speed), "DONE", {}, {"tokens_per_second": speed}) for speed in (1.0, 9.0, 4.0)]
    assert SweepResults(fast, "tokens_per_second").winner is fast[1]
