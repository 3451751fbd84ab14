"""Whole runs with the real packages of Weights & Biases and MLflow, offline: what each has of a run afterwards.

Takes over a minute: ten runs, and each of the two libraries takes seconds to start.
"""

from __future__ import annotations

import csv
import json
import os
import re
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from jobs import Ended, Workshop, wait_for

from hpc_train.training.records.run_records import read_metrics

CANARY = "5ec2e7" * 6 + "5ec2"  # as long as a key of W&B, which checks that
SECRETS = {"WANDB_API_KEY": CANARY, "MLFLOW_TRACKING_TOKEN": CANARY, "AWS_SECRET_ACCESS_KEY": CANARY}
ALL = ("loggers.use=[csv,wandb,mlflow]", "loggers.close_seconds=60", "checkpoint.every=4")
QUICK = ("launch.ranks=1", "train.steps=6", "checkpoint.every=0")


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Path:
    """A run of four steps that a second attempt has continued to the seventh, with secrets in the environment."""
    place = Workshop(tmp_path_factory.mktemp("twice"), store)
    for steps, ranks in ((4, 2), (7, 1)):
        words = ("loggers.tags=[small]", f"train.steps={steps}", f"launch.ranks={ranks}")
        ended = place.train("run", *ALL, *words, **SECRETS)
        assert ended.code == 0, ended
        assert "logger" not in ended.err, ended.err
    place.clean()
    return place.folder / "run"


def read_wandb_file(path: Path) -> Iterator[Any]:
    """Read the records of an offline run: protocol buffers in LevelDB's log format, after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def histories(path: Path) -> list[dict[str, Any]]:
    found = [record.history for record in read_wandb_file(path) if record.HasField("history")]
    return [{item.nested_key[0]: json.loads(item.value_json) for item in history.item} for history in found]


def losses(run: Path) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in read_metrics(run / "metrics.jsonl")]


def test_weights_and_biases_has_both_attempts_under_one_run_id(twice: Path) -> None:
    files = sorted((twice / "loggers/wandb").rglob("*.wandb"))
    assert len(files) == 2
    runs = [next(record.run for record in read_wandb_file(path) if record.HasField("run")) for path in files]
    assert {run.run_id for run in runs} == {(twice / "loggers/wandb/run_id").read_text().strip()}
    assert [(run.project, run.display_name, list(run.tags)) for run in runs] == [("hpc_train", "run", ["small"])] * 2
    rows = [row for path in files for row in histories(path)]
    assert [(row["step"], row["loss"]) for row in rows] == losses(twice)
    assert [row["attempt"] for row in rows] == [0] * 4 + [1] * 3
    config = {item.key: json.loads(item.value_json) for item in runs[1].config.update}
    assert config["train"]["steps"] == 7
    exits = [record.exit.exit_code for path in files for record in read_wandb_file(path) if record.HasField("exit")]
    assert exits == [0, 0]


def test_mlflow_has_both_attempts_in_one_run(twice: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(twice / "loggers/mlflow/mlruns").as_uri())
    experiment = client.get_experiment_by_name("hpc_train")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == (twice / "loggers/mlflow/run_id").read_text().strip()
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    history = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "loss")]
    assert history == losses(twice)
    assert run.data.params["train.global_batch"] == "4"
    assert run.data.tags["tag.small"] == "true"


def test_the_csv_file_has_each_step_once(twice: Path) -> None:
    rows = list(csv.DictReader((twice / "loggers/csv/metrics.csv").open()))
    assert [(int(row["step"]), float(row["loss"])) for row in rows] == losses(twice)


def test_no_secret_of_the_environment_is_in_any_file(twice: Path) -> None:
    files = [path for path in twice.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert [path for path in files if CANARY.encode() in path.read_bytes()] == []


@pytest.mark.long
def test_points_of_a_sweep_are_grouped(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    ended = workshop.train("study", "-m", *ALL, "train.steps=2", "train.seed=1,2", "launch.ranks=1")
    assert ended.code == 0, ended
    sweep = workshop.folder / "study"
    points = {path.name for path in (sweep / "points").iterdir()}
    client = MlflowClient(tracking_uri=(sweep / "loggers/mlflow/mlruns").as_uri())
    experiments = [one for one in client.search_experiments() if one.name == "hpc_train"]
    runs = client.search_runs([experiment.experiment_id for experiment in experiments])
    assert len(experiments) == 1
    assert {(run.info.run_name, run.data.tags["sweep"]) for run in runs} == {(point, "study") for point in points}
    files = list(sweep.rglob("*.wandb"))
    started = [next(record.run for record in read_wandb_file(path) if record.HasField("run")) for path in files]
    assert {(run.display_name, run.run_group) for run in started} == {(point, "study") for point in points}
    assert len({run.run_id for run in started}) == 2


OWN = """
import os, sys, time
from pathlib import Path

class Own:
    def __init__(self, run):
        (run.folder / "modules").write_text("\\n".join(sys.modules))
        self.how, self.file = run.settings["how"], run.folder / "steps"

    def add(self, record):
        if record["step"] == 3:
            if self.how == "fails":
                raise ValueError("the server\\nhas no room")
            if self.how == "leaks":
                key = os.environ["WANDB_API_KEY"]
                os.system(f"echo of a child: {key}")
                raise ConnectionError(f"https://me:{key[::-1]}@example.org does not take {key}")
            if self.how == "spins":
                list(iter(int, 1))  # holds the interpreter
        with self.file.open("a") as file:
            print(record["step"], record["loss"], file=file)

    def close(self, failed=False):
        if self.how == "lingers":
            time.sleep(10_000)
"""


@pytest.fixture
def package(tmp_path: Path) -> dict[str, str]:
    """The environment in which an installed package offers a logger that is named own."""
    folder = tmp_path / "site"
    info = folder / "their_loggers-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "their_loggers.py").write_text(OWN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their_loggers\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hpc_train.loggers]\nown = their_loggers:Own\n")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


def train_with_own(workshop: Workshop, package: dict[str, str], how: str) -> Ended:
    words = ("loggers.use=[own]", f"+loggers.args.how={how}", "loggers.close_seconds=3", *QUICK)
    ended = workshop.train("run", *words, **package)
    assert ended.code == 0, ended
    assert [step for step, _ in losses(workshop.folder / "run")] == [1, 2, 3, 4, 5, 6]
    return ended


def test_a_logger_of_an_installed_package_gets_every_step_and_loads_nothing_else(
    workshop: Workshop, package: dict[str, str]
) -> None:
    assert "logger" not in train_with_own(workshop, package, "works").err
    folder = workshop.folder / "run/loggers/own"
    written = [line.split() for line in (folder / "steps").read_text().splitlines()]
    assert [(int(step), float(loss)) for step, loss in written] == losses(workshop.folder / "run")
    modules = {name.partition(".")[0] for name in (folder / "modules").read_text().splitlines()}
    assert modules & {"torch", "wandb", "mlflow", "tensorboard", "h5py"} == set()


@pytest.mark.parametrize(
    ("how", "warning"),
    [
        ("fails", r"logger own: ValueError: the server has no room; training goes on without it"),
        ("spins", r"logger own: not done 3 s after the end of the run \(loggers.close_seconds\), and killed"),
        pytest.param(
            "lingers",
            r"logger own: not done 3 s after the end of the run \(loggers.close_seconds\), and killed",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_logger_that_fails_or_blocks_stops_nothing(
    workshop: Workshop, package: dict[str, str], how: str, warning: str
) -> None:
    ended = train_with_own(workshop, package, how)
    assert len(re.findall(warning, ended.err)) == 1, ended.err
    assert ended.err.count("logger own") == 1, ended.err
    assert processes_with(package["PYTHONPATH"]) == []


def test_what_a_logger_prints_is_without_secrets(workshop: Workshop, package: dict[str, str]) -> None:
    ended = train_with_own(workshop, package | SECRETS, "leaks")
    message = "ConnectionError: https://***@example.org does not take ***"
    assert ended.err.count(f"logger own: {message}; training goes on without it") == 1, ended.err
    run = workshop.folder / "run"
    assert (run / "logs/0/logger-own.log").read_text().splitlines() == ["of a child: ***", message]
    written = b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file()) + ended.err.encode()
    assert CANARY.encode() not in written
    assert CANARY[::-1].encode() not in written


@pytest.fixture
def silent_server() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_servers_that_do_not_answer_cost_the_end_of_a_run_no_more_than_agreed(
    workshop: Workshop, silent_server: str
) -> None:
    where = {"WANDB_BASE_URL": silent_server, "MLFLOW_TRACKING_URI": silent_server, **SECRETS}
    words = ("loggers.use=[wandb,mlflow]", "loggers.wandb.mode=online", "loggers.close_seconds=2")
    ended = workshop.train("run", *words, *QUICK, **where)
    assert ended.code == 0, ended
    for name in ("wandb", "mlflow"):
        assert ended.err.count(f"logger {name}: not done 2 s after the end of the run") == 1, ended.err
    assert [step for step, _ in losses(workshop.folder / "run")] == [1, 2, 3, 4, 5, 6]
    assert CANARY not in ended.err
    assert CANARY.encode() not in b"".join(path.read_bytes() for path in workshop.folder.rglob("*") if path.is_file())
    wait_for(lambda: not processes_with(silent_server))  # also none of W&B's own


def test_a_missing_key_is_one_warning(workshop: Workshop) -> None:
    words = ("loggers.use=[wandb]", "loggers.wandb.mode=online", "loggers.close_seconds=60", *QUICK)
    home = workshop.folder / "home"
    home.mkdir()
    ended = workshop.train("run", *words, HOME=str(home))
    assert ended.code == 0, ended
    assert len(re.findall(r"logger wandb: .*(?i:api key|log in|login).*; training goes on without it", ended.err)) == 1
    assert [path for path in home.rglob("*") if path.is_file() and "netrc" in path.name] == []


def processes_with(text: str) -> list[str]:
    """The live processes in whose environment this text is."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(entry.name) != os.getpid() and text.encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_text().replace("\0", " "))
    return found


def test_a_logger_that_is_not_offered_is_one_line(workshop: Workshop) -> None:
    ended = workshop.train("run", "loggers.use=[wandbb]", "train.steps=1")
    assert (ended.code, ended.err.splitlines()) == (
        2,
        ["hpc-train: loggers.use=wandbb: no such logger; did you mean 'wandb'?"],
    )
    assert not (workshop.folder / "run").exists()


def test_a_library_that_is_not_installed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from hpc_train.errors import UserError
    from hpc_train.training.loggers.interface import check_loggers

    monkeypatch.setitem(sys.modules, "wandb", None)  # as Python marks a module that cannot be imported
    with pytest.raises(UserError, match=r"loggers\.use=wandb: wandb is not installed; pip install wandb, or leave it"):
        check_loggers(["csv", "wandb"])
