"""A logger's process ends with rank 0, however that ends, and rank 0 never waits for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpc_train.training.loggers import logger_process
from hpc_train.training.loggers.interface import LoggedRun, make_run_id, read_run_id, write_run_id
from hpc_train.training.loggers.logger_process import LoggerProcess

KILLED = """
import os, sys
from pathlib import Path
from hpc_train.training.loggers.interface import LoggedRun
from hpc_train.training.loggers.logger_process import LoggerProcess

folder = Path(sys.argv[1])
run = LoggedRun("run", folder, settings={"tracking_uri": None, "experiment": "tests"})
logger = LoggerProcess("mlflow", run, folder / "output", close_seconds=30)
for step in (1, 2, 3):
    logger.add({"step": step, "loss": step / 4})
os.kill(os.getpid(), 9)
"""


def test_a_run_whose_rank_0_is_killed_has_failed_and_keeps_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    from mlflow.tracking import MlflowClient

    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())

    def ended() -> bool:
        run_id = read_run_id(tmp_path)
        return run_id is not None and client.get_run(run_id).info.status == "FAILED"

    deadline = time.monotonic() + 60
    while not ended() and time.monotonic() < deadline:
        time.sleep(0.1)
    history = client.get_metric_history(read_run_id(tmp_path), "loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.25), (2, 0.5), (3, 0.75)]


PACKAGE = """
import os, time

class Own:
    def __init__(self, run):
        self.run = run
        if run.settings["how"] == "blocks":
            time.sleep(10_000)
        if run.settings["how"] == "ends":
            os._exit(7)

    def add(self, record):
        with (self.run.folder / "steps").open("a") as file:
            print(record["step"], file=file)

    def close(self, failed=False):
        (self.run.folder / "failed").write_text(str(failed))
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the processes' path with an installed package that offers the logger own; a folder for the logger."""
    site, folder = tmp_path / "site", tmp_path / "own"
    info = site / "their_loggers-1.0.dist-info"
    info.mkdir(parents=True)
    folder.mkdir()
    (site / "their_loggers.py").write_text(PACKAGE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their_loggers\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hpc_train.loggers]\nown = their_loggers:Own\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])))
    return folder


def start(folder: Path, how: str, close_seconds: float) -> LoggerProcess:
    run = LoggedRun("run", folder, settings={"how": how})
    return LoggerProcess("own", run, folder / "output", close_seconds)


@pytest.mark.parametrize("failed", [True, False])
def test_all_records_arrive_in_order_however_many_there_are(
    package: Path, failed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logger = start(package, "works", 60)
    monkeypatch.setattr(logger_process, "_SECONDS_AFTER_AN_ERROR", 60.0)
    for step in range(20_000):  # many times what the pipe holds
        logger.add({"step": step, "loss": 0.123456789, "words": "x" * 50})
    logger.close(failed)
    assert (package / "steps").read_text().splitlines() == [str(step) for step in range(20_000)]
    assert (package / "failed").read_text() == str(failed)
    assert caplog.text == ""


def test_what_a_blocked_logger_does_not_take_is_bounded_and_said_once(
    package: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logger_process, "_MAX_WAITING_BYTES", 100_000)
    logger = start(package, "blocks", 0.5)
    for step in range(10_000):
        logger.add({"step": step, "words": "x" * 100})
    assert len(logger._waiting) < 101_000
    logger.close()
    assert caplog.text.count("does not keep up, or blocks; it misses steps from now on") == 1
    assert caplog.text.count("and killed") == 1
    assert len(caplog.records) == 2


def test_an_error_does_not_wait_long_for_a_logger(package: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = start(package, "blocks", 100_000)
    logger.add({"step": 1})
    logger.close(failed=True)  # the test would time out
    (record,) = caplog.records
    assert "not done 2 s after the end of the run (which failed), and killed" in record.getMessage()


def test_a_logger_whose_process_ends_is_given_up_once(package: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = start(package, "ends", 5)
    deadline = time.monotonic() + 60
    while not caplog.records and time.monotonic() < deadline:
        logger.add({"step": 1})
        time.sleep(0.01)
    logger.add({"step": 2})
    logger.close()
    (record,) = caplog.records
    assert "logger own: ended with 7; training goes on without it" in record.getMessage()


def test_a_logger_that_cannot_start_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = LoggerProcess("own", LoggedRun("run", tmp_path), tmp_path / "missing" / "output", 5)
    logger.add({"step": 1})
    logger.close()
    (record,) = caplog.records
    assert "No such file or directory" in record.getMessage()


@pytest.mark.parametrize("text", ["", "../../etc", "a b", "x" * 65, "a\nb", "\x00"])
def test_a_damaged_run_id_counts_as_none(tmp_path: Path, text: str) -> None:
    assert read_run_id(tmp_path) is None
    (tmp_path / "run_id").write_text(text)
    assert read_run_id(tmp_path) is None


def test_a_run_id_is_read_again(tmp_path: Path) -> None:
    run_id = make_run_id()
    write_run_id(tmp_path, run_id)
    assert read_run_id(tmp_path) == run_id
    assert make_run_id() != run_id
