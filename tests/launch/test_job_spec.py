"""A job spec is run only if it is whole and nobody but its owner could have written it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_train.config.compose import compose
from hpc_train.errors import UserError
from hpc_train.launch.freeze import freeze_run
from hpc_train.launch.job_spec import read_spec


@pytest.fixture
def job(tmp_path: Path) -> Path:
    freeze_run(compose([f"run_dir={tmp_path / 'run'}", "optim.lr=0.25", "launch.ranks=2"]), ranks=2, report=print)
    return tmp_path / "run/job.json"


def test_what_was_frozen_is_what_is_read(job: Path) -> None:
    spec = read_spec(job)
    assert (spec.run_dir, spec.ranks, spec.degrees["dp_replicate"]) == (str(job.parent), 2, 2)
    assert spec.run_config().optim.lr == 0.25
    assert spec.folder().path == job.parent


@pytest.mark.parametrize("mode", [0o660, 0o602, 0o777])
def test_a_spec_that_others_can_write_is_refused(job: Path, mode: int) -> None:
    job.chmod(mode)
    with pytest.raises(UserError, match=rf"job.json: is not yours alone \(owner \d+, mode {mode:o}\), so that others"):
        read_spec(job)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"run_dir": "x"}', b"\xff\xfe"], ids=repr)
def test_a_damaged_spec_is_one_line(job: Path, content: bytes) -> None:
    job.write_bytes(content)
    with pytest.raises(UserError, match=r"job.json: is not a job spec; submit the run again"):
        read_spec(job)


@pytest.mark.parametrize(
    "config", [{}, {"model": 1}, {"optim": {"lr": "fast"}}, {"launch": None}, {"nonsense": 1}], ids=str
)
def test_a_damaged_config_in_it_is_one_line(job: Path, config: dict[str, Any]) -> None:
    content = json.loads(job.read_text())
    content["config"] = content["config"] | config if config else {}
    job.write_text(json.dumps(content))
    with pytest.raises(UserError) as wrong:
        read_spec(job).run_config()
    assert len(str(wrong.value).splitlines()) == 1


def test_a_spec_of_another_version_is_refused(job: Path) -> None:
    job.write_text(json.dumps(json.loads(job.read_text()) | {"spec_version": 99}))
    with pytest.raises(UserError, match=r"version 99, this hpc_train reads 1"):
        read_spec(job)


def test_a_missing_spec_says_what_to_look_at(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"job.json: No such file or directory; is the run directory on a file system"):
        read_spec(tmp_path / "job.json")
