"""The page in a real browser: what it shows is what report.json holds, and it asks nobody for anything."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import waits, write_run

from hpc_train.cli.main import main
from hpc_train.cli.output import TERMINAL
from hpc_train.launch.local import rank_pool
from hpc_train.report.pages.charts import downsample, draw_parallel, encode_png
from hpc_train.report.pages.page import choose_phases
from hpc_train.training.records.run_records import read_metrics
from hpc_train.training.run_directory import RunDirectory

HOSTILE = "<script>alert(1)</script>\"&'\x1b[31m"
CANARY = "canary-3f9a"


def write_whole_run(run: Path, ranks: int = 4, steps: int = 40, name: str = "node") -> None:
    """A run directory with all that a report reads, but for a configuration."""
    write_run(
        run, ranks, range(1, steps + 1), lambda rank, step: {"backward": 0.12} if rank == 1 else {"waits": waits(0.06)}
    )
    entries = [{"rank": rank, "process": rank, "host": f"{name}{rank // 2}", "cpus": "0"} for rank in range(ranks)]
    (run / "rankmap.json").write_text(json.dumps({"mesh": {"pp": 1}, "ranks": entries}))
    lines = [
        {"step": step, "loss": 5 / step, "grad_norm": 1.0, "lr": 1e-3, "tokens": 100, "tokens_per_second": 1e4}
        for step in range(1, steps + 1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = [{"event": "start", "time": 1e9, "attempt": 0, "step": 0, "steps": steps}]
    events += [{"event": "checkpoint", "time": 1e9 + step, "attempt": 0, "step": step} for step in (10, 20)]
    events.append({"event": "failure", "time": 1e9 + 50, "attempt": 0, "why": HOSTILE})
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def browse(page: Path) -> tuple[str, str]:
    """Open a page in a browser without any network; returns its elements and what the browser said."""
    words = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={page.parent / 'browser'}",
        "--dump-dom",
        page.as_uri(),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_whole_run(tmp_path / "run")
    return tmp_path / "run"


def test_the_browser_shows_what_the_data_says(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shutil.which("chromium"), "Debian's chromium is part of TEST_PACKAGES"
    assert main(["report", str(run)]) == 0
    printed = capsys.readouterr().out
    data = json.loads((run / "report.json").read_text())
    assert data["verdict"]["class"] == "straggler"
    assert data["verdict"]["ranks"] == [1]
    elements, said = browse(run / "report.html")
    title = re.search(r'<h1 id="verdict">(.*?)</h1>', elements)
    assert title is not None
    assert title[1] in printed
    assert "CONSOLE" not in said
    count = sum(elements.count(tag) for tag in ("<path", "<rect", "<image"))
    assert count == sum(data["charts"].values())
    assert set(data["charts"]) >= {"curve_loss", "efficiency", "heat_map", "memory_resident"}
    assert "http" not in re.sub(r"http-equiv", "", (run / "report.html").read_text())


def test_factors_in_the_data_multiply(run: Path) -> None:
    assert main(["report", str(run)]) == 0
    efficiency = json.loads((run / "report.json").read_text())["efficiency"]
    factors = [
        efficiency[name] for name in ("checkpoint", "input", "bubble", "load_balance", "transfer", "serialisation")
    ]
    assert np.prod(factors) == pytest.approx(efficiency["product"], rel=0.01)


class _Scripts(HTMLParser):
    """Collects what could run or load anything."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "iframe", "object", "link", "form") or any(
            name.startswith("on") for name, _ in attributes
        ):
            self.found.append((tag, attributes))


def test_hostile_names_are_text(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_whole_run(run, name="<img src=x onerror=alert(1)>")
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    parser = _Scripts()
    parser.feed(page)
    assert parser.found == []
    assert "<img" not in page
    assert "&lt;script&gt;" in page
    assert "default-src 'none'" in page


def test_secrets_stay_out(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", CANARY)
    assert main(["report", str(run)]) == 0
    assert CANARY not in (run / "report.html").read_text() + (run / "report.json").read_text()


def test_json_writes_no_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"]["class"] == "straggler"
    assert not (run / "report.html").exists()


def test_a_run_that_cannot_be_written_to_takes_another_folder(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "report.json").mkdir()
    assert main(["report", str(run)]) == 2
    assert "--out" in capsys.readouterr().err
    assert main(["report", str(run), "--out", str(tmp_path / "elsewhere")]) == 0
    assert (tmp_path / "elsewhere/report.html").exists()


def test_an_empty_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    assert main(["report", str(tmp_path)]) == 0
    assert "not enough data" in capsys.readouterr().out


def test_damaged_files_are_left_out(run: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl"):
        with (run / name).open("ab") as file:
            file.write(b"\xff\xfe\n" + b"[" * 100_000 + b'\n{"step": 1e999, "loss": "x"}\n{"step"')
    (run / "rankmap.json").write_bytes(b"\x00{")
    (run / "config.yaml").write_text("a: [")
    assert main(["report", str(run)]) == 0
    data = json.loads((run / "report.json").read_text())
    assert data["notes"]
    assert len(read_metrics(run / "metrics.jsonl")) >= 40


def test_two_runs_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", 2, range(1, 41))
    write_run(tmp_path / "b", 2, range(1, 41), lambda rank, step: {"waits": waits(0.05)})
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "most of it is transfer, +50 ms" in capsys.readouterr().out
    data = json.loads((tmp_path / "b/comparison.json").read_text())
    assert data["parts"][0]["name"] == "transfer"
    assert sum(part["after"] - part["before"] for part in data["parts"]) == pytest.approx(
        data["moved_seconds"], abs=1e-5
    )


def test_a_large_run_has_a_small_page(tmp_path: Path) -> None:
    write_whole_run(tmp_path / "run", ranks=64, steps=1000)
    assert main(["report", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run/report.html").stat().st_size < 300_000


def test_of_many_ranks_the_named_and_the_busiest_are_shown() -> None:
    phases = [{"rank": rank, "forward": 1.0, "backward": rank / 100} for rank in range(40)]
    shown = [row["rank"] for row in choose_phases(phases, (3,))]
    assert shown == [3, *range(39, 24, -1)]
    assert choose_phases(phases[:16], (3,)) == phases[:16]


def test_the_progress_line_says_what_holds_a_run_back(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_pool, "_FIRST_LOOK_SECONDS", -1.0)
    (run / "metrics.jsonl").write_text("")
    follower = rank_pool.ProgressFollower(RunDirectory(run, run / "checkpoints"), 0, 1, TERMINAL)
    follower.show()
    step = {"step": 1, "loss": 2.0, "lr": 0.1, "tokens_per_second": 10.0, "step_seconds": 1.0}
    (run / "metrics.jsonl").write_text(json.dumps(step) + "\n")
    follower.show()
    follower.close()
    assert "10 tokens/s  straggler 3" in capsys.readouterr().out


def test_top_draws_a_run_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(run)]) == 0
    printed = capsys.readouterr().out
    assert "straggler" in printed
    rows = {line.split()[1]: line.split()[2] for line in printed.splitlines() if line.startswith("rank ")}
    assert rows.keys() == {"0", "1", "2", "3"}
    assert set(rows["1"]) == {"█"}, "slow, also without colours"
    assert set(rows["0"] + rows["2"] + rows["3"]) == {"▃"}
    assert main(["top", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"]["ranks"] == [1]


def test_status_says_the_verdict(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(run)]) == 0
    assert "straggler" in capsys.readouterr().out


def test_no_spike_is_lost_when_a_curve_is_thinned() -> None:
    values = [1.0] * 10_000
    values[4321], values[7777] = 50.0, -50.0
    shown = [y for _, y in downsample(range(10_000), values)]
    assert {50.0, -50.0} <= set(shown)
    assert len(shown) <= 400


def test_an_image_has_the_pixels_that_were_given() -> None:
    import io

    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 255, (5, 7, 3), np.uint8)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(encode_png(pixels)))), pixels)


def test_parallel_coordinates_have_a_line_a_point() -> None:
    svg = draw_parallel("x", [("lr", [1e-3, 1e-2, None]), ("model", ["a", "b", "a"]), ("loss", [1.0, 2.0, 3.0])], 0)
    assert svg.count('class="way') == 3
    assert svg.count('class="way best"') == 1
