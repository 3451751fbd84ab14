"""`hpc-train new` writes a project that trains, whose own test passes, and nothing where it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_train.cli.main import main
from hpc_train.errors import EXIT_USER_ERROR


def _run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_the_project_passes_its_test_and_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "two-rings"]) == 0
    project = tmp_path / "two-rings"
    assert not any("my_project" in file.read_text() for file in project.rglob("*") if file.is_file())
    tested = _run(project, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert tested.returncode == 0, tested.stdout
    assert "2 passed" in tested.stdout
    command = (sys.executable, "-m", "hpc_train.cli.main", "train", "--config-dir", "conf", "experiment=two_rings")
    trained = _run(project, *command, "train.steps=4", "launch.ranks=2", "run_dir=runs/one", "parallel=fsdp")
    assert trained.returncode == 0, trained.stderr
    assert "two_rings: 2,274 parameters" in trained.stdout
    assert "accuracy 0." in trained.stdout


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("3d", "3d: cannot be the name of a Python package; use letters, digits and _, such as my_model"),
        ("class", "class: cannot be the name of a Python package; use letters, digits and _, such as my_model"),
        ("__init__", "__init__: cannot be the name of a Python package; use letters, digits and _, such as my_model"),
        ("json", "json: Python, an installed package or this project has that name; choose another one"),
        ("numpy", "numpy: Python, an installed package or this project has that name; choose another one"),
        ("~nobody_here/mine", "a path begins with ~ and a name that is no user here; write it from / on"),
        ("/proc/mine", "/proc/mine: cannot be made (No such file or directory); choose a folder that can be written"),
        ("there", "there: is there already; give another name, or move it away"),
        ("nowhere/mine", "nowhere/mine: there is no folder nowhere; make it first"),
    ],
)
def test_what_cannot_be_made_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, says: str
) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["new", name]) == EXIT_USER_ERROR
    assert capsys.readouterr().err == f"hpc-train: {says}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
