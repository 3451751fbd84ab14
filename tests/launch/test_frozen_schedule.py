"""A pipeline's order from a file: what was submitted is what runs, whatever becomes of the file."""

from __future__ import annotations

import stat

import pytest
from jobs import TINY, Workshop

from hpc_train.cli.output import TERMINAL
from hpc_train.config.compose import compose
from hpc_train.launch.freeze import freeze_run
from hpc_train.launch.job_spec import read_spec
from hpc_train.launch.local.rank_pool import follow_ranks, start_ranks
from hpc_train.runtime.stop_request import StopRequest
from hpc_train.training.records.run_records import read_metrics
from hpc_train.training.run_directory import make_attempt

ORDER = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
"""Two micro-batches over two ranks."""


def test_a_schedule_is_copied_when_the_run_is_frozen(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workshop.folder)
    given, run_dir = workshop.folder / "own.csv", workshop.folder / "run"
    given.write_text(ORDER)
    words = ("parallel=pp", "parallel.pipeline.schedule=own.csv", "train.steps=2", "checkpoint.every=0")
    text = ("data=text", f"data.path={workshop.store}")
    config = compose((*TINY, *text, *words, f"run_dir={run_dir}"))
    folder = freeze_run(config, 2, print).folder()
    given.write_text("not the order that was submitted\n")
    assert folder.schedule.read_text() == ORDER
    assert stat.S_IMODE(folder.schedule.stat().st_mode) == 0o600
    assert read_spec(folder.job).run_config().parallel.pipeline.schedule == str(folder.schedule)
    assert f"schedule: {folder.schedule}" in folder.config.read_text()
    attempt = make_attempt(folder)
    assert follow_ranks(start_ranks(folder, attempt, 2, 1), folder, attempt, 1, StopRequest(), TERMINAL) == 0
    assert [record["step"] for record in read_metrics(folder.metrics)] == [1, 2]


def test_a_run_goes_on_with_its_own_copy(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workshop.folder)
    given, run_dir = workshop.folder / "own.csv", workshop.folder / "run"
    given.write_text(ORDER)
    words = (*TINY, "data=text", f"data.path={workshop.store}", f"run_dir={run_dir}", "parallel=pp")
    first = freeze_run(compose((*words, "parallel.pipeline.schedule=own.csv")), 2, print)
    given.unlink()
    again = freeze_run(compose((*words, f"parallel.pipeline.schedule={run_dir}/schedule.csv")), 2, print)
    assert again.config == first.config
    assert (run_dir / "schedule.csv").read_text() == ORDER
