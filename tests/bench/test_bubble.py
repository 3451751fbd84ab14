"""That the bench runs what it simulates is asserted by its own ranks: they compare what they did with the order."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.bench.bubble import (
    BubbleOptions,
    BubbleResult,
    ScheduleResult,
    choose_schedules,
    format_bubbles,
    run_bubble_command,
)
from hpc_train.bench.bubble_rank import make_sleep_times
from hpc_train.cli.main import main
from hpc_train.config.parallel import SCHEDULES
from hpc_train.errors import UserError
from hpc_train.schedules.generate import generate_order

FILE = "0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3\n1F0,1I0,1F1,1I1,1W0,1F2,1B2,1W1,1F3,1B3\n"


@pytest.mark.usefixtures("forked_ranks")
def test_all_schedules_and_a_file_run_in_their_orders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.csv").write_text(FILE)
    names = [*SCHEDULES, "own.csv"]
    options = ["--micro-batches", "4", "--rounds", "2", "--milliseconds", "4", "--json"]
    chosen = [word for name in names for word in ("--schedule", name)]
    assert main(["bench", "bubble", "--ranks", "2", *options, *chosen]) == 0
    result = json.loads(capfd.readouterr().out)
    by_name = {schedule["name"]: schedule for schedule in result["schedules"]}
    assert list(by_name) == names
    assert result["refused"] == {}
    expected = {"naive": 1 / 2, "gpipe": 1 / 5, "1f1b": 1 / 5, "interleaved_1f1b": 1 / 9, "looped_bfs": 1 / 9}
    for name, bubble in expected.items():
        assert by_name[name]["simulated_bubble"] == pytest.approx(bubble)
    for schedule in by_name.values():
        low, high = schedule["quartiles"]
        assert 0 < low <= schedule["measured_bubble"] <= high < 1
        assert schedule["measured_seconds"] >= schedule["simulated_seconds"]
        assert schedule["difference"] == pytest.approx(schedule["measured_bubble"] / schedule["simulated_bubble"] - 1)
        assert len(schedule["measured_ranks"]) == len(schedule["simulated_ranks"]) == len(schedule["live"]) == 2
    assert list(tmp_path.iterdir()) == [tmp_path / "own.csv"]


def test_a_stage_sleeps_its_share_and_the_first_has_no_gradient_of_its_inputs() -> None:
    assert make_sleep_times(generate_order("1f1b", 2, 2), 3.0) == make_sleep_times(generate_order("naive", 2, 2), 3.0)
    each = make_sleep_times(generate_order("zbv", 2, 4), 3.0)
    assert each.forward == (1.5, 1.5, 1.5, 1.5)
    assert (each.inputs, each.weights) == ((0.0, 1.5, 1.5, 1.5), (3.0, 1.5, 1.5, 1.5))


def options(**changed: object) -> BubbleOptions:
    usual = BubbleOptions(SCHEDULES, ranks=4, micro_batches=8, rounds=1, milliseconds=1.0)
    return replace(usual, **changed)  # type: ignore[arg-type]


def test_a_schedule_that_cannot_do_the_numbers_is_left_out_and_said() -> None:
    chosen, refused = choose_schedules(options(micro_batches=6))
    assert list(refused) == ["dualpipev"]
    assert set(chosen) | set(refused) == set(SCHEDULES)
    assert "at least 8" in refused["dualpipev"]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"ranks": 1}, "--ranks 1: must be at least 2"),
        ({"micro_batches": 0}, "--micro-batches 0"),
        ({"rounds": 0}, "--rounds 0"),
        ({"milliseconds": 0.0}, "--milliseconds 0: must be above 0"),
        ({"milliseconds": float("nan")}, "--milliseconds nan"),
        ({"schedules": ("1f2b",)}, "no such schedule"),
        ({"schedules": ("none.csv",)}, "none.csv: No such file"),
        ({"schedules": ("dualpipev",), "micro_batches": 3}, "at least 8"),
    ],
)
def test_what_cannot_be_measured_is_one_line(changed: dict[str, object], words: str) -> None:
    with pytest.raises(UserError) as caught:
        run_bubble_command(options(**changed), False)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("0F0,0B0\n", "has 1 lines, one per rank, but --ranks 2"),
        ("0F0,0B0\n1F0,1I0\n", "rank 1: 1W0 is missing"),
        ("0B0,0F0\n1F0,1B0\n", "deadlock"),
        ("0F1,0F0,0B0,0B1\n1F1,1F0,1B0,1B1\n", "the last stage has to take its micro-batches in order"),
    ],
)
def test_a_file_that_cannot_run_is_refused_before_any_rank_is_started(lines: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(lines)
    micro_batches = 2 if "F1" in lines else 1
    with pytest.raises(UserError) as caught:
        run_bubble_command(options(schedules=(str(path),), ranks=2, micro_batches=micro_batches), False)
    assert str(caught.value).startswith(str(path))
    assert words in str(caught.value)


def test_inside_another_launcher_the_numbers_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="one of 3 processes on 1 nodes, but --ranks 4"):
        run_bubble_command(options(), False)


def test_the_table_says_which_are_not_as_their_orders_say() -> None:
    def row(name: str, measured: float) -> ScheduleResult:
        off, share = measured / 0.2 - 1, (0.2, 0.2)
        return ScheduleResult(name, 2, 0.2, measured, (measured, measured), off, 1.0, 1.1, share, share, (2, 1))

    shown = format_bubbles(
        BubbleResult(options(), [row("gpipe", 0.21), row("1f1b", 0.25)], {"zbv": "too few"}, 2, 0.5, True)
    )
    assert "gpipe      2     20.00%   21.00% (21.00% - 21.00%)       +5.0%" in shown
    assert "left out: too few" in shown
    assert shown.endswith("The bubble differs by more than 10% from the simulated one: 1f1b.")
    shown = format_bubbles(BubbleResult(options(), [row("gpipe", 0.21)], {}, 2, 0.5, False))
    assert shown.endswith("The bubble of every schedule is within 10% of the simulated one.")
