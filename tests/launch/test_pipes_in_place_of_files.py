"""A named pipe or a device where a file should be: one clear line at once, and never a wait."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_train.checkpoint.convert.model_config import load_run_config
from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.format.hdf5_index import INDEX_FILE, find_index_problem
from hpc_train.checkpoint.storage.lock import refuse_if_locked, take_lock
from hpc_train.cli.run.logs import LogSelection, logs_command
from hpc_train.config.compose import compose
from hpc_train.data.corpus.sources import SourceFile
from hpc_train.data.corpus.text_files import recognise_files
from hpc_train.errors import UserError
from hpc_train.launch.cancel.wait_and_kill import read_cancel_seconds
from hpc_train.launch.freeze import read_schedule_file
from hpc_train.launch.job_spec import read_spec
from hpc_train.launch.local.rank_pool import JsonTail
from hpc_train.launch.state.run_lookup import RunPoint
from hpc_train.parallel.pipeline.measurement import read_block_times
from hpc_train.planner.calibration.run_table import read_runs
from hpc_train.planner.reliability.failure_log import read_log
from hpc_train.schedules.order import read_order as read_schedule
from hpc_train.training.records.run_records import append_event
from hpc_train.training.records.warning_files import read_warnings
from hpc_train.training.run_directory import locate_run_directory, prepare_run_directory


@pytest.fixture(autouse=True)
def ended_if_it_waits() -> Iterator[None]:
    """The signal's default action ends a process that waits for the other end of a pipe."""
    signal.alarm(60)
    yield
    signal.alarm(0)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


Put = Callable[[Path], None]
both = pytest.mark.parametrize("put", [make_pipe, make_device])


@both
@pytest.mark.parametrize(
    "choice",
    [LogSelection(), LogSelection(tail=3), LogSelection(attempt=0)],
    ids=["all", "the last lines", "an attempt"],
)
@pytest.mark.parametrize("follow", [False, True])
def test_log_of_a_rank(tmp_path: Path, put: Put, choice: LogSelection, follow: bool) -> None:
    logs = tmp_path / "logs" / "0"
    logs.mkdir(parents=True)
    (tmp_path / "job.json").write_text("{}")
    put(logs / "task-0.log")
    (logs / "result.json").write_text('{"exit_code": 0}')
    with pytest.raises(UserError, match=r"task-0.log: it is a (named pipe|device), not a regular file"):
        logs_command(str(tmp_path), choice, follow=follow, error_only=False)


@pytest.mark.parametrize("tail", [None, 0, 1, 2, 3, 4, 100])
@pytest.mark.parametrize("text", ["", "a\n", "a\nb\nc\n", "a\nb\nc", "\n\n\n", "é" * 70000 + "\nlast\n"])
def test_last_lines_of_a_log(tmp_path: Path, text: str, tail: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    logs = tmp_path / "logs" / "0"
    logs.mkdir(parents=True)
    (tmp_path / "job.json").write_text("{}")
    (logs / "task-0.log").write_text(text)
    logs_command(str(tmp_path), LogSelection(tail=tail), follow=False, error_only=False)
    lines = text.splitlines(keepends=True)
    assert capsys.readouterr().out == "".join(lines if tail is None else lines[len(lines) - min(tail, len(lines)) :])


@both
def test_lock_of_checkpoints(tmp_path: Path, put: Put) -> None:
    put(tmp_path / "lock")
    with pytest.raises(UserError, match=r"lock: it is a (named pipe|device), not a regular file; remove it"):
        take_lock(tmp_path, {})
    refuse_if_locked(tmp_path, {})


@both
def test_lock_that_is_replaced_while_it_is_held(tmp_path: Path, put: Put) -> None:
    lock = take_lock(tmp_path, {})
    lock.path.unlink()
    put(lock.path)
    with pytest.raises(CheckpointError, match="no longer has the lock"):
        lock.check()
    lock.release()


READERS: dict[str, Callable[[Path], object]] = {
    "a table of measured runs": read_runs,
    "a log of failures": read_log,
    "a pipeline's order": read_schedule,
    "times of blocks": lambda path: read_block_times(path, []),
    "a job": read_spec,
    "config.yaml of a run": load_run_config,
    "a text to train on": lambda path: recognise_files([SourceFile(path, 0, 0)]),
    "a schedule that is frozen": lambda path: read_schedule_file(
        compose(["parallel.pp=2", f"parallel.pipeline.schedule={path.rename(path.with_suffix('.csv'))}"])
    ),
}


@both
@pytest.mark.parametrize("read", READERS.values(), ids=READERS.keys())
def test_file_that_a_user_names(tmp_path: Path, put: Put, read: Callable[[Path], object]) -> None:
    path = tmp_path / "given.txt"
    put(path)
    with pytest.raises(UserError) as raised:
        read(path)
    assert str(path.with_suffix("")) in str(raised.value)
    assert "\n" not in str(raised.value)


@both
def test_files_of_a_run_directory(tmp_path: Path, put: Put) -> None:
    for name in ("job.json", "events.jsonl", "config.yaml"):
        put(tmp_path / name)
    (tmp_path / "checkpoints" / "step-1").mkdir(parents=True)
    assert read_cancel_seconds(RunPoint("run", tmp_path)) > 0
    assert list(JsonTail(tmp_path / "events.jsonl").records()) == []
    config = compose([f"run_dir={tmp_path}"])
    with pytest.raises(UserError, match=r"config.yaml: it is a"):
        prepare_run_directory(locate_run_directory(config), config)


def test_event_for_a_pipe_that_nobody_reads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_pipe(tmp_path / "events.jsonl")
    append_event(tmp_path / "events.jsonl", "note", 0)
    assert "No such device or address; the event note is not recorded" in caplog.text


@both
def test_warnings_of_ranks(tmp_path: Path, put: Put) -> None:
    (tmp_path / "warnings").mkdir()
    put(tmp_path / "warnings" / "x.json")
    (tmp_path / "warnings" / "y.json").write_text("[" * 5000)
    assert read_warnings(tmp_path) == []


def test_index_of_a_step(tmp_path: Path) -> None:
    make_pipe(tmp_path / INDEX_FILE)
    problem = find_index_problem(tmp_path, None)  # type: ignore[arg-type]
    assert problem is not None
    assert "named pipe" in problem.what
