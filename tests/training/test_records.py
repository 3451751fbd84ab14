"""metrics.jsonl holds each step once, whatever ended the run before; lines of events.jsonl never mix."""

import json
import multiprocessing
from pathlib import Path

import pytest

from hpc_train.training.run_records import MetricsFile, append_event, read_metrics


def _write(path: Path, steps: range, resumed_at: int = 0) -> None:
    metrics = MetricsFile(path, resumed_at)
    for step in steps:
        metrics.write({"step": step, "loss": step / 2})
    metrics.close()


def test_a_resume_drops_the_steps_that_are_done_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 8))
    _write(path, range(5, 10), resumed_at=4)
    assert [record["step"] for record in read_metrics(path)] == list(range(1, 10))


@pytest.mark.parametrize("torn", ['{"step": 4, "lo', '{"st', '{"step": 4', "\0\0\0\0", "3", "null", ""])
def test_a_torn_last_line_is_dropped(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 4))
    with path.open("a") as file:
        file.write(torn)
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3]
    _write(path, range(4, 6), resumed_at=3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 5]


def test_starting_over_empties_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 4))
    _write(path, range(1, 2))
    assert [record["step"] for record in read_metrics(path)] == [1]


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, 0)
    metrics.write({"step": 1})
    assert [record["step"] for record in read_metrics(path)] == [1]
    metrics.close()


def test_what_is_not_finite_becomes_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, 0)
    metrics.write({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "lr": -float("inf"), "mfu": None})
    metrics.close()
    strict = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert strict == {"step": 1, "loss": None, "grad_norm": None, "lr": None, "mfu": None}


def test_no_file_is_no_records(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def _many_events(path: Path, writer: int) -> None:
    for number in range(200):
        append_event(path, "note", attempt=writer, number=number, text="x" * 300)


def test_events_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_many_events, args=(path, writer)) for writer in range(4)]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted((event["attempt"], event["number"]) for event in events) == [
        (w, n) for w in range(4) for n in range(200)
    ]
    assert {event["event"] for event in events} == {"note"}
    assert path.stat().st_mode & 0o777 == 0o600
