"""No value of a user, whatever is in it, is run by the batch script: bash reads real scripts under stubs that tell."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from drawn import draw_every
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_train.config.compose import compose
from hpc_train.config.plain_config import config_from_dict, config_to_dict
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.launch.slurm.request import make_request
from hpc_train.launch.slurm.sbatch import render_script
from hpc_train.launch.submit import default_to_slurm
from hpc_train.training.run_directory import RunDirectory

HOSTILE = (
    *("; touch executed", "$(touch executed)", "`touch executed`", "${x:=$(touch executed)}", "| touch executed"),
    *("&& touch executed", "> executed", "' ; touch executed ; '", '" ; touch executed ; "', "'\"'\"'; touch executed"),
    *(
        "\\'; touch executed; \\'",
        "$'; touch executed'",
        "a b",
        "*",
        "~",
        "!!",
        "#",
        "--wrap=touch executed",
        "%j",
        "\\",
    ),
    *("'", '"', "$", "`", "<(touch executed)", "$((x[$(touch executed)]))", "{a,b}", "é ü 漢", "=", "-x"),
)
REFUSED = (
    "a\nb",
    "a\rb",
    "a\0b",
    "a\x1bb",
    "a\x85b",
    "a\u2028b",
    "a\x7fb",
    "a\u202eb",
    "x\n#SBATCH --uid=0\ntouch executed",
)
FIELDS = ("name", "partition", "account", "qos", "constraint", "reservation", "exclude", "comment")
STUB = """#!/bin/bash
case " $* " in *" --job-name=listener "*) exit 0 ;; esac  # of stop signals, in the background
printf '%s\\n' "$(basename "$0")" "$@" >>"$STUBS/said"
[ "$(basename "$0")" != srun ] || touch "$HPC_TRAIN_RENDEZVOUS/done"
"""


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return config_to_dict(compose(default_to_slurm([])))


def config_with(plain: dict[str, Any], value: str, fields: Sequence[str] = FIELDS) -> RunConfig:
    """The config with this value in all of `fields`; what the command line makes of words is not what is tested."""
    value = value.replace("${", "\\${")  # an interpolation elsewhere
    launch = {**plain["launch"], **{field: value for field in fields if field != "comment"}}
    if "comment" in fields:
        launch["extra"] = {"comment": value}
    return config_from_dict({**plain, "launch": launch})


def script_of(config: RunConfig, run: Path) -> str:
    folder = RunDirectory(run, run / "checkpoints")
    return render_script(folder, make_request(config, folder))


def assert_harmless(script: str, run: Path, place: Path) -> None:
    """bash accepts it, runs nothing but the stubs, and they are given nothing that is not theirs."""
    checked = subprocess.run(["bash", "-n"], input=script.encode(), capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr
    comments = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert script.splitlines()[: len(comments) + 3][3:] == comments, "options stand in one block, a line each"
    stubs = place / "stubs"
    stubs.mkdir(exist_ok=True)
    for name in ("srun", "scontrol", "scancel", "squeue", "sinfo"):
        (stubs / name).write_text(STUB)
        (stubs / name).chmod(stat.S_IRWXU)
    env = {
        "PATH": f"{stubs}:{os.environ['PATH']}",
        "STUBS": str(stubs),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n1",
    }
    done = subprocess.run(["bash"], input=script.encode(), cwd=place, env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == b""
    assert not list(place.rglob("executed"))
    assert [line for line in (stubs / "said").read_text().splitlines() if line in ("srun", "scancel", "scontrol")] == [
        "srun"
    ]
    assert json.loads((run / "logs/0/result.json").read_text())["exit_code"] == 0
    assert json.loads((run / "logs/0/attempt.json").read_text())["job_id"] == "7"


@pytest.mark.parametrize("value", draw_every(HOSTILE, 3))
def test_what_is_in_names_and_paths_is_not_run(value: str, plain: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / value.replace("/", "_")
    (run / "logs").mkdir(parents=True)
    assert_harmless(script_of(config_with(plain, value), run), run, tmp_path)


@pytest.mark.parametrize("value", REFUSED, ids=ascii)
def test_control_characters_are_refused(value: str, plain: dict[str, Any]) -> None:
    for field in FIELDS if value == REFUSED[0] else FIELDS[:1]:
        with pytest.raises(UserError, match="control character") as refused:
            script_of(config_with(plain, value, [field]), Path("/scratch/run"))
        assert str(refused.value).isprintable()
    with pytest.raises(UserError, match=r"run_dir: .* has a control character"):
        script_of(config_with(plain, "x"), Path(f"/scratch/{value}"))


def test_control_characters_are_refused_in_set_up_lines(plain: dict[str, Any]) -> None:
    launch = {**plain["launch"], "setup": ["true", "true\u2028false"]}
    with pytest.raises(UserError, match=r"launch\.setup\[1\]: .* has a control character"):
        script_of(config_from_dict({**plain, "launch": launch}), Path("/scratch/run"))


@pytest.mark.parametrize("option", ["het-group", "hetjob", "array", "wrap", "export", "dependency"])
def test_options_that_would_make_another_job_of_it_are_refused(option: str) -> None:
    with pytest.raises(UserError, match=rf"launch\.extra\.{option}: cannot be set; "):
        script_of(compose(default_to_slurm([f"+launch.extra.{option}=x"])), Path("/scratch/run"))


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(alphabet=st.sampled_from("'\"\\$`;|&<>(){}[]!#*?~ %=-\tabz\n\0é"), min_size=1, max_size=30))
def test_any_text_is_quoted_or_refused(
    plain: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, value: str
) -> None:
    place = tmp_path_factory.mktemp("any")
    run = place / "run"
    (run / "logs").mkdir(parents=True)
    try:
        script = script_of(config_with(plain, value), run)
    except UserError:
        assert not value.isprintable()
        return
    assert_harmless(script, run, place)
