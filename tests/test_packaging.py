"""What is installed from the wheel is the whole project: every package, every conf file, the command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import hpc_train

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel and the source distribution, built as a release is.

    From a copy, because setuptools writes its egg-info beside the sources.
    """
    out, clone = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("clone") / "hpc_train"
    shutil.copytree(
        ROOT, clone, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs")
    )
    built = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(out), str(clone)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    return out


def wheel(dist: Path) -> Path:
    return next(dist.glob("*.whl"))


def test_wheel_has_every_module_and_conf_file(dist: Path) -> None:
    packed = set(zipfile.ZipFile(wheel(dist)).namelist())
    rooms = ("hpc_train", "hydra_plugins")
    modules = {str(path.relative_to(ROOT)) for room in rooms for path in (ROOT / room).rglob("*.py")}
    conf = {f"hpc_train/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    assert modules - packed == set()
    assert conf - packed == set()
    shell = {f"hpc_train/launch/slurm/{name}.sh" for name in ("job", "guard", "batch", "callables")}
    assert {"hpc_train/py.typed", *shell} <= packed


def test_source_distribution_builds_the_same_wheel(dist: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "conf/config.yaml", "hpc_train/cli/main.py"} <= names


def test_version_is_in_one_place(dist: Path) -> None:
    assert wheel(dist).name.startswith(f"hpc_train-{hpc_train.__version__}-")
    assert "version" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"]


def test_installed_wheel_composes_and_trains_outside_the_checkout(dist: Path, tmp_path: Path) -> None:
    """Installed into a folder of its own, first on the path; the dependencies are those of this environment."""
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel(dist))]
    subprocess.run(pip, check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    where = subprocess.run(
        [sys.executable, "-c", "import hpc_train; print(hpc_train.__file__)"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert where.stdout.strip() == str(site / "hpc_train/__init__.py")
    launchers = "from hydra.core.plugins import Plugins; Plugins.instance(); import sys; print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", launchers], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert "hydra_plugins.hpc_train_launchers.plugin" in found.stdout.split()
    tiny = ["model.layers=1", "model.hidden=32", "model.heads=2", "model.kv_heads=1", "train.sequence_length=32"]
    trained = subprocess.run(
        [str(site / "bin/hpc-train"), "train", "run_dir=run", "train.steps=2", "launch.ranks=1", *tiny],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert trained.returncode == 0, trained.stderr
    assert "done: 2 steps" in trained.stdout
