"""The modulefiles on a real Lmod: loaded, unloaded without a trace, moved elsewhere, Lua and Tcl alike."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import hpc_train

MODULES = Path(__file__).resolve().parents[2] / "modules"
INIT = Path("/usr/share/lmod/lmod/init/bash")
OWN = ("LMOD", "__LMOD", "_ModuleTable", "_LMFILES", "LOADEDMODULES", "MODULE", "_", "SHLVL", "BASH_FUNC", "FPATH")
"""Prefixes of what Lmod keeps for itself."""


@pytest.fixture(params=["lua", "tcl"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An installation somewhere, with the modulefile of one language."""
    if not INIT.exists():
        reason = "Lmod is not installed: apt-get install lmod"
        pytest.fail(reason) if os.environ.get("CI") == "true" or os.geteuid() == 0 else pytest.skip(reason)
    place = tmp_path / ("some where" if request.param == "lua" else "somewhere")  # Lmod 8.6 reads no Tcl below a space
    copy = place / "modules/hpc_train"
    copy.mkdir(parents=True)
    ending = ".lua" if request.param == "lua" else ""
    shutil.copy(MODULES / f"hpc_train/{hpc_train.__version__}{ending}", copy)
    command(place / ".venv")
    return place


def command(prefix: Path) -> None:
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin/hpc-train").write_text("#!/bin/sh\necho here\n")
    (prefix / "bin/hpc-train").chmod(0o755)


def shell(root: Path, *lines: str, **env: str) -> subprocess.CompletedProcess[str]:
    """bash without anything of ours, where `module` is known and this tree is used."""
    script = [f". {INIT}", f"module use {str(root / 'modules')!r}", *lines]
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-c", "\n".join(script)],
        env={"PATH": "/usr/bin:/bin", "HOME": str(root), "MANPATH": "/usr/share/man"} | env,
        capture_output=True,
        text=True,
        check=False,
    )


def environments(root: Path, *lines: str, **env: str) -> list[dict[str, str]]:
    """The variables at each line `env`, without Lmod's own."""
    folder = root / "env"
    folder.mkdir(exist_ok=True)
    numbered = [f"env -0 >{str(folder)!r}/{index}" if line == "env" else line for index, line in enumerate(lines)]
    done = shell(root, *numbered, **env)
    assert done.returncode == 0, done.stderr
    found = [(folder / str(index)).read_text() for index, line in enumerate(lines) if line == "env"]
    pairs = [dict(item.split("=", 1) for item in text.split("\0") if "=" in item) for text in found]
    return [{name: value for name, value in pair.items() if not name.startswith(OWN)} for pair in pairs]


def test_it_adds_the_command_and_unloads_without_a_trace(root: Path) -> None:
    before, loaded, after = environments(root, "env", "module load hpc_train", "env", "module unload hpc_train", "env")
    changed = {name: value for name, value in loaded.items() if before.get(name) != value}
    assert changed == {"PATH": f"{root}/.venv/bin:/usr/bin:/bin", "HPC_TRAIN_ROOT": str(root)}
    assert after == before


def test_what_was_set_before_is_set_again(root: Path) -> None:
    load = ("env", "module load hpc_train", "module unload hpc_train", "env")
    before, after = environments(root, *load, HPC_TRAIN_ROOT="/before")
    if next((root / "modules/hpc_train").iterdir()).suffix == ".lua":
        assert after == before
    else:  # Lmod 8 cannot for Tcl files; Environment Modules can
        assert after == {name: value for name, value in before.items() if name != "HPC_TRAIN_ROOT"}


def test_it_is_found_where_it_was_moved_to_and_runs(root: Path) -> None:
    moved = root.with_name("moved")
    root.rename(moved)
    (moved / ".venv").rename(moved / "env")
    command(moved)
    done = shell(moved, "module load hpc_train && hpc-train && command -v hpc-train")
    assert done.stdout.splitlines() == ["here", f"{moved}/bin/hpc-train"]


def test_an_installation_that_is_not_there_is_an_error(root: Path) -> None:
    shutil.rmtree(root / ".venv")
    done = shell(root, 'module load hpc_train; echo "code $? $LOADEDMODULES"')
    assert done.stdout.strip() == "code 1"
    assert "no bin/hpc-train in" in done.stderr


def test_two_versions_are_never_loaded_together(root: Path) -> None:
    folder = root / "modules/hpc_train"
    mine = next(folder.iterdir())
    shutil.copy(mine, folder / mine.name.replace(hpc_train.__version__, "99.0"))
    done = shell(root, f"module load hpc_train/{hpc_train.__version__} hpc_train/99.0", "echo $LOADEDMODULES")
    assert len(done.stdout.strip().split(":")) == 1


def test_help_and_whatis_say_what_it_is(root: Path) -> None:
    told = shell(
        root, "module help hpc_train; module whatis hpc_train; module -t spider PyTorch; module -t avail"
    ).stderr
    told += shell(root, "module keyword PyTorch").stderr
    for part in (
        "hpc-train doctor",
        f"Version: {hpc_train.__version__}",
        "Slurm clusters",
        f"hpc_train/{hpc_train.__version__}",
    ):
        assert part in told


def test_both_languages_say_the_same() -> None:
    """Word for word, where they have the same words."""
    lua = (MODULES / f"hpc_train/{hpc_train.__version__}.lua").read_text()
    tcl = (MODULES / f"hpc_train/{hpc_train.__version__}").read_text()
    assert tcl.startswith("#%Module")
    help_text = lua.partition("help([[")[2].partition("]])")[0].strip()
    assert help_text in tcl
    for line in lua.splitlines():
        if line.startswith("whatis(") and "version" not in line:
            assert f"module-whatis {line[len('whatis(') : -1]}" in tcl
    assert "execute" not in lua
    assert "exec " not in tcl
