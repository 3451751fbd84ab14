"""How scaling is computed from measured steps, and one measurement of real ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from hpc_train.bench import scaling
from hpc_train.bench.scaling import compute_efficiency, find_end, measure_scaling, parse_sizes, plot_scaling
from hpc_train.cli.main import main
from hpc_train.errors import UserError
from hpc_train.report.tuning.trials import Trial


def amdahl(settings: Mapping[str, str]) -> Trial:
    """A tenth of the work of a step of 16 sequences cannot be spread."""
    ranks, batch = int(settings.get("launch.ranks", 1)), int(settings.get("train.global_batch", 16))
    return Trial(dict(settings), batch / 16 * (0.1 + 0.9 / ranks), 0.001, "network", 0.1)


def test_efficiencies_are_those_of_the_formulas() -> None:
    points = measure_scaling(["data=stdlib"], "ranks", [1, 2, 4], amdahl)
    for point, size in zip(points, (1, 2, 4), strict=True):
        assert point.strong.value == pytest.approx(1 / (size * (0.1 + 0.9 / size)))
        assert point.weak.value == pytest.approx(1 / (size * (0.1 + 0.9 / size)))
        assert point.strong.low <= point.strong.value <= point.strong.high
        assert point.planned is None
    assert find_end(points) == 4


def test_more_stops_paying_where_it_brings_less_than_half() -> None:
    def measure(settings: Mapping[str, str]) -> Trial:
        ranks = int(settings["launch.ranks"])
        return Trial(dict(settings), {1: 1.0, 2: 0.55, 4: 0.5, 8: 0.2}[ranks], 0.0, "network", 0.1)

    assert find_end(measure_scaling(["data=stdlib"], "ranks", [1, 2, 4, 8], measure)) == 2


def test_the_interval_has_both_errors() -> None:
    one, other = Trial({}, 1.0, 0.03, "", 0.0), Trial({}, 0.5, 0.02, "", 0.0)
    found = compute_efficiency(one, other, 2.0)
    assert found.high - found.value == pytest.approx(2 * math.hypot(0.03, 0.04))


@pytest.mark.parametrize("text", ["ranks", "ranks=", "ranks=1", "ranks=0,1", "gpus=1,2", "ranks=1,x", "ranks=2,2"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="give"):
        parse_sizes(text)


def test_a_plot_is_written(tmp_path: Path) -> None:
    points = measure_scaling(["data=stdlib"], "ranks", [1, 2], amdahl)
    plot_scaling(points, "ranks", tmp_path / "a.svg")
    assert "efficiency" in (tmp_path / "a.svg").read_text()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_real_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny: list[str]) -> None:
    words = ["bench", "scaling", "ranks=1,2", *[one for one in tiny if not one.startswith("launch.ranks")]]
    assert main([*words, "--steps", "8", "--folder", str(tmp_path / "scaling"), "--json"]) == 0
    assert_is_json_of_one_and_two(capsys.readouterr().out)


def assert_is_json_of_one_and_two(text: str) -> None:
    result = json.loads(text)
    assert [point["size"] for point in result["points"]] == [1, 2]
    assert result["points"][0]["strong"]["value"] == 1.0


def test_the_command_prints_json_once_and_refuses_what_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def measure_computed(overrides: object, folder: Path, steps: int) -> object:
        (folder / "trial").touch()
        asked.append(steps)
        return amdahl

    monkeypatch.setattr(scaling, "measure_locally", measure_computed)
    words = ["bench", "scaling", "ranks=1,2", "data=stdlib"]
    assert main([*words, "--steps", "8", "--folder", str(tmp_path / "scaling"), "--json"]) == 0
    assert_is_json_of_one_and_two(capsys.readouterr().out)
    assert asked == [8]
    assert main([*words, "--folder", str(tmp_path / "scaling")]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main(["bench", "scaling", "nodes=1,2", "--folder", str(tmp_path / "x")]) == 2
    assert "launch=slurm" in capsys.readouterr().err
