"""From a run to a dashboard: the metrics file of a node, a real node_exporter, a real Prometheus and its promtool.

Takes about half a minute: a run is watched while it trains, and Prometheus asks once per second.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from jobs import Workshop, wait_for

from hpc_train.training.records.node_metrics import format_metrics

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = json.loads((ROOT / "slurm/grafana-dashboard.json").read_text())
NAMES = ("step", "steps", "loss", "validation_loss", "grad_norm", "learning_rate", "tokens_per_second", "step_seconds")
NAMES += ("data_seconds", "mfu_ratio", "goodput_ratio", "restarts", "updated_timestamp_seconds")
HOSTILE = 'a "run" \\ of {braces} = 漢字 \x1b[31m'


def program(name: str) -> str:
    found = shutil.which(name)
    assert found, f"{name} is not installed: apt-get install prometheus prometheus-node-exporter"
    return found


def every_metric(name: str = HOSTILE, **values: float) -> str:
    """The text of a file with every metric, of a run whose name is hostile."""
    labels = {"run": name, "run_id": "0123456789ab"}
    return format_metrics(dict.fromkeys(NAMES, 0.5) | values, labels, {"node": "other", "directory": HOSTILE})


def test_promtool_finds_nothing_wrong_with_the_file() -> None:
    text = every_metric("two\nlines", loss=math.nan, grad_norm=math.inf, learning_rate=1e-300)
    checked = subprocess.run(
        [program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
    assert 'hpc_train_grad_norm{run="two\\nlines",run_id="0123456789ab"} +Inf\n' in text


def test_promtool_notices_a_file_that_is_wrong() -> None:
    text = every_metric().replace('run_id="', "run_id=", 1)
    checked = subprocess.run([program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True)
    assert checked.returncode != 0


def free_port() -> int:
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def running(*command: str) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


@contextmanager
def serving(read: Callable[[], str]) -> Iterator[int]:
    """Serve a text as OpenMetrics, so that Prometheus reads it with its strict parser; gives the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/openmetrics-text; version=1.0.0; charset=utf-8")
            self.end_headers()
            self.wfile.write(read().encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Prometheus:
    """A server that asks a node_exporter for the files of a folder, and a server of our own for OpenMetrics."""

    def __init__(self, address: str) -> None:
        self.address = address

    def ask(self, path: str, **words: str) -> Any:
        with urllib.request.urlopen(f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(words)}") as answer:
            body = json.load(answer)
        assert body["status"] == "success", body
        return body["data"]

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.address}/-/ready"):
                return True
        except urllib.error.URLError:
            return False

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples that an expression gives now."""
        found: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return found

    def value(self, expression: str) -> float | None:
        """The value of the one sample of an expression; None if there is none."""
        found = self.query(expression)
        assert len(found) < 2, found
        return float(found[0]["value"][1]) if found else None


@pytest.fixture
def collected(tmp_path: Path) -> Path:
    folder = tmp_path / "collected"
    folder.mkdir()
    return folder


@pytest.fixture
def prometheus(tmp_path: Path, collected: Path) -> Iterator[Prometheus]:
    nodes, own = free_port(), free_port()
    with serving(every_metric) as strict:
        jobs = {"node": nodes, "strict": strict}
        config = {
            "global": {"scrape_interval": "1s"},
            "scrape_configs": [
                {"job_name": name, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
                for name, port in jobs.items()
            ],
        }
        (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        exporter = (
            program("prometheus-node-exporter"),
            "--collector.disable-defaults",
            "--collector.textfile",
            f"--collector.textfile.directory={collected}",
            f"--web.listen-address=127.0.0.1:{nodes}",
        )
        server = (
            program("prometheus"),
            f"--config.file={tmp_path}/prometheus.yml",
            f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address=127.0.0.1:{own}",
        )
        with running(*exporter), running(*server):
            server_of_test = Prometheus(f"127.0.0.1:{own}")
            wait_for(server_of_test.is_ready)
            yield server_of_test


def expressions() -> list[str]:
    """Every query of the dashboard, with all runs chosen."""
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return [query.replace("$run", ".*") for query in queries]


def test_a_run_is_seen_by_prometheus_and_on_the_dashboard(
    workshop: Workshop, collected: Path, prometheus: Prometheus
) -> None:
    (collected / "other.prom").write_text(every_metric())  # another run of the node
    words = ("train.steps=100000", "train.eval_every=20", "train.eval_batches=1", "data.validation_fraction=0.2")
    metrics = ("loggers.name=watched", "loggers.textfile_dir=$PLACE", "loggers.textfile_seconds=0.1")
    job = workshop.start("run", *words, *metrics, "checkpoint.every=0", PLACE=str(collected))
    wait_for(lambda: prometheus.query('hpc_train_validation_loss{run="watched"}'), job)

    (path,) = collected.glob("hpc_train-*.prom")
    assert path.stat().st_mode & 0o777 == 0o644
    checked = subprocess.run([program("promtool"), "check", "metrics"], stdin=path.open(), capture_output=True)
    assert (checked.returncode, checked.stdout) == (0, b"")

    assert prometheus.value("node_textfile_scrape_error") == 0
    wait_for(lambda: prometheus.value('up{job="strict"}') == 1)
    assert prometheus.value('hpc_train_steps{run="watched"}') == 100000
    assert prometheus.value('hpc_train_restarts{run="watched"}') == 0
    assert 0 < (prometheus.value('hpc_train_goodput_ratio{run="watched"}') or 0) < 1
    (info,) = prometheus.query('hpc_train_run_info{run="watched"}')
    assert info["metric"]["directory"] == str(workshop.folder / "run")
    hostile = {sample["metric"]["run"] for sample in prometheus.query('hpc_train_loss{run_id="0123456789ab"}')}
    assert hostile == {HOSTILE}

    for expression in expressions():
        runs = {sample["metric"]["run"] for sample in prometheus.query(expression)}
        assert HOSTILE in runs, expression
        assert "watched" in runs or "mfu" in expression, expression  # no peak of this processor is known

    job.popen.send_signal(signal.SIGINT)
    assert job.ended().code == 93
    assert [path.name for path in collected.iterdir()] == ["other.prom"]
    wait_for(lambda: prometheus.query('hpc_train_loss{run="watched"}') == [])


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    queries = " ".join([*expressions(), json.dumps(DASHBOARD["templating"])])
    assert set(re.findall(r"hpc_train_(\w+)", queries)) == {*NAMES, "run_info"}
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = [(place["x"] + x, place["y"] + y) for place in places for x in range(place["w"]) for y in range(place["h"])]
    assert len(cells) == len(set(cells)), "panels overlap"
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)


def test_a_folder_that_cannot_be_written_is_a_warning_once(workshop: Workshop, collected: Path) -> None:
    words = (f"loggers.textfile_dir={collected}/missing", "loggers.textfile_seconds=0", "train.steps=5")
    ended = workshop.train("run", *words, "checkpoint.every=0")
    assert ended.code == 0, ended
    assert ended.err.count("Prometheus sees no metrics of this node") == 1, ended.err
    assert "No such file or directory" in ended.err
