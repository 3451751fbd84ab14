"""Every setting that is text and can reach a batch script, with shell in it: it is refused in a line, or never run."""

from __future__ import annotations

import copy
import os
import stat
import subprocess
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from drawn import draw_every
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_train.config.compose import compose
from hpc_train.config.plain_config import config_from_dict, config_to_dict
from hpc_train.errors import UserError
from hpc_train.launch.slurm.request import make_request
from hpc_train.launch.slurm.sbatch import render_script
from hpc_train.launch.snapshot.code_snapshot import snapshot_code
from hpc_train.launch.submit import default_to_slurm
from hpc_train.training.run_directory import locate_run_directory

GROUPS = ("cluster", "launch", "container", "checkpoint", "data", "model")
SHELL_BY_PURPOSE = "launch.setup"
BASES = {
    "none": ["data.path=/data/text.h5"],
    "apptainer": ["data.path=/data/text.h5", "container=apptainer", "container.image=docker://x"],
    "pyxis": ["data.path=/data/text.h5", "container=pyxis", "container.image=docker://x"],
}
PAYLOADS = (
    *("; touch executed;", "$(touch executed)", "`touch executed`", "${x:=$(touch executed)}", "| touch executed"),
    *("&& touch executed #", "' ; touch executed ; '", '" ; touch executed ; "', "'\"'\"'; touch executed"),
    *("\\'; touch executed; \\'", "$'; touch executed'", "<(touch executed)", "$((x[$(touch executed)]))", "a b"),
    *(
        "\n touch executed\n",
        "\r touch executed",
        "\\\ntouch executed\n",
        "a[$(touch executed)]",
        "*",
        "--wrap=x",
        "%j",
    ),
    *("%", "'", '"', "$", "`", "\\", "!", "~", ",", ":", "{a,b}", "=", "é 漢", "\u2028touch executed", "\x1b]0;x\x07"),
)
STUB = """#!/bin/bash
[ "$(basename "$0")" != srun ] || touch "$HPC_TRAIN_RENDEZVOUS/done"
"""


def text_settings(kind: Any, path: str) -> Iterator[tuple[str, str]]:
    """(setting, how it holds text: str, list or dict) of a schema; those with a list of legal words left out."""
    types = typing.get_type_hints(kind)
    for item in fields(kind):
        here, wanted = f"{path}.{item.name}", types[item.name]
        allowed = item.metadata.get("range")
        if is_dataclass(wanted):
            yield from text_settings(wanted, here)
        elif allowed is not None and allowed.choices:
            continue
        elif wanted in (str, str | None):
            yield here, "str"
        elif wanted in (list[str], dict[str, str]):
            yield here, "list" if wanted == list[str] else "dict"


@pytest.fixture(scope="module")
def plain() -> dict[str, dict[str, Any]]:
    return {name: config_to_dict(compose(default_to_slurm(words))) for name, words in BASES.items()}


def all_settings() -> list[tuple[str, str]]:
    config = compose(default_to_slurm(["data.path=/data/text.h5"]))
    found = [pair for group in GROUPS for pair in text_settings(type(getattr(config, group)), group)]
    kinds = {f"{group}.kind" for group in GROUPS}  # which schema it is, in place of text
    return [("run_dir", "str"), *(pair for pair in found if pair[0] not in {SHELL_BY_PURPOSE, *kinds})]


SETTINGS = all_settings()


def with_value(container: dict[str, Any], where: tuple[str, str], value: str) -> dict[str, Any]:
    """The same with this value there, among others where there may be several."""
    made = copy.deepcopy(container)
    *parents, last = where[0].split(".")
    node = made
    for name in parents:
        node = node[name]
    value = value.replace("${", "\\${")  # an interpolation elsewhere
    node[last] = {"str": value, "list": ["/x", value], "dict": {"comment": value, value: "x"}, "lines": [value]}[
        where[1]
    ]
    return made


def run_it(container: dict[str, Any], place: Path, frozen: bool) -> str | None:
    """Render the script and let bash run it among stubs; the one line, if it is refused."""
    try:
        config = config_from_dict(container)
        folder = locate_run_directory(config)
        snapped = snapshot_code(config, folder.path, print) if frozen else None
        script = render_script(folder, make_request(config, folder, snapped))
    except UserError as refused:
        return str(refused)
    assert subprocess.run(["bash", "-n"], input=script.encode(), capture_output=True, check=False).returncode == 0
    comments = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert script.splitlines()[3 : 3 + len(comments)] == comments, "options stand in one block, a line each"
    if folder.path.is_relative_to(place):
        (folder.path / "logs").mkdir(parents=True, exist_ok=True)
    env = {
        **{"PATH": f"{place.parent}/stubs:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"},
        **{"SLURM_JOB_NAME": "x", "HOME": str(place)},
    }
    subprocess.run(["bash"], input=script.encode(), cwd=place, env=env, capture_output=True, check=False)
    return None


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("hostile")
    (top / "stubs").mkdir()
    for name in ("srun", "scontrol", "scancel", "squeue", "sinfo", "apptainer", "sbatch"):
        (top / "stubs" / name).write_text(STUB)
        (top / "stubs" / name).chmod(stat.S_IRWXU)
    return top


def assert_harmless(plain: dict[str, Any], stubs: Path, where: tuple[str, str], value: str, base: str) -> str | None:
    place = stubs / f"{len(list(stubs.iterdir()))}"
    place.mkdir()
    container = plain[base] | {"run_dir": str(place / "run")}
    if where[0] == "run_dir":
        value = f"{place}/{value}"
    before = Path.cwd()
    os.chdir(place)
    try:
        frozen = where[0] in ("run_dir", "launch.snapshot_dir")  # it takes longer, and they alone are in its name
        refused = run_it(with_value(container, where, value), place, frozen)
    finally:
        os.chdir(before)
    assert not list(place.rglob("executed")), f"{where[0]}={value!r}"
    assert refused is None or refused.isprintable(), refused
    return refused


def test_the_settings_that_matter_are_among_them() -> None:
    names = dict(SETTINGS)
    for name in ("launch.name", "launch.account", "launch.extra", "launch.export", "launch.snapshot_dir", "run_dir"):
        assert name in names
    for name in ("cluster.modules", "cluster.module_path", "container.image", "container.python", "container.read"):
        assert name in names
    assert len(names) > 35


@pytest.mark.parametrize("where", draw_every(SETTINGS, 3))
def test_shell_in_a_setting_is_never_run(where: tuple[str, str], plain: dict[str, Any], stubs: Path) -> None:
    value = "a'$(touch executed)'\"$(touch executed)\"`touch executed`;touch executed"
    base = "apptainer" if where[0].startswith("container") else "none"
    assert_harmless(plain, stubs, where, value, base)


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    where=st.sampled_from(SETTINGS),
    value=st.lists(st.one_of(st.sampled_from(PAYLOADS), st.sampled_from("ax/ -=.")), min_size=1, max_size=4),
    base=st.sampled_from(sorted(BASES)),
)
def test_whatever_is_in_a_setting_is_quoted_or_refused_in_a_line(
    plain: dict[str, Any], stubs: Path, where: tuple[str, str], value: list[str], base: str
) -> None:
    assert_harmless(plain, stubs, where, "".join(value), base)


def test_the_test_would_see_what_is_run(plain: dict[str, Any], stubs: Path) -> None:
    """launch.setup is shell by purpose."""
    with pytest.raises(AssertionError, match=r"launch\.setup="):
        assert_harmless(plain, stubs, (SHELL_BY_PURPOSE, "lines"), "touch executed", "none")
