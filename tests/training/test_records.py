"""metrics.jsonl holds each step once, whatever ended the run before; lines of events.jsonl never mix."""

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from hpc_train.config.compose import compose
from hpc_train.errors import UserError
from hpc_train.training.records.reporter import Reporter
from hpc_train.training.records.run_records import LineFile, MetricsFile, append_event, read_metrics
from hpc_train.training.run_directory import RunDirectory


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


@pytest.mark.parametrize("torn", ['{"step": 4, "lo', '{"st', '{"step": 4', "\0\0\0\0", "3", "null", "", "[" * 100_000])
def test_a_torn_last_line_is_dropped(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 4))
    with path.open("a") as file:
        file.write(torn)
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3]
    _write(path, range(4, 6), resumed_at=3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 5]


def test_a_line_of_no_text_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'\xff\xfe\n{"step": 1}\n')
    _write(path, range(2, 3), resumed_at=1)
    assert [record["step"] for record in read_metrics(path)] == [1, 2]


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "tensorboard"])
def test_what_is_no_file_in_their_place_is_one_line(tmp_path: Path, name: str) -> None:
    directory = RunDirectory(tmp_path, tmp_path / "checkpoints")
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=rf"{name}: .*; move it away"):
        Reporter.start(compose([]), directory, 0, steps=1, resumed_at=0, rank=0)


def test_lines_wait_while_there_is_no_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipe = tmp_path / "pipe"  # one that is full refuses writes as a full disk does, and can be emptied again
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    file = LineFile(pipe)
    lines = [f"{number} {'x' * 100}\n" for number in range(1500)]
    for line in lines[:1000]:
        file.append(line)
    assert "wait in memory" in caplog.text
    received = os.read(reader, 1 << 20)
    assert len(received) < sum(map(len, lines[:1000]))
    for line in lines[1000:1010]:
        file.append(line)
    received += os.read(reader, 1 << 20)
    for line in lines[1010:]:
        file.append(line)
        received += os.read(reader, 1 << 20)
    file.close()
    assert received.decode() == "".join(lines)
    assert "what waited is written now" in caplog.text
    assert "could not be written" not in caplog.text
    os.close(reader)


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
    strict = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
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
