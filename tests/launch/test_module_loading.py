"""cluster.modules in a batch script, run by bash with the real Lmod; on Slurm it is tested in tests/slurm."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from hpc_train.config.compose import compose
from hpc_train.errors import UserError
from hpc_train.launch.slurm.request import make_request
from hpc_train.launch.slurm.sbatch import render_script
from hpc_train.launch.submit import default_to_slurm
from hpc_train.training.run_directory import RunDirectory

LMOD = Path("/usr/share/lmod/lmod/init/bash")
STUB = """#!/bin/bash
[ "$(basename "$0")" = srun ] || exit 0
case " $* " in *" --job-name=listener "*) exit 0 ;; esac  # of stop signals, also before modules are loaded
printf '%s\\n' "$OWN" "$LIBRARY" "$LOADEDMODULES" >"$RUN/ran"
touch "$RUN/logs/0/done"
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site's modulefiles: `library` takes `own` away; `broken` fails; `old` and `new` are of one family."""
    if not LMOD.exists():
        reason = "Lmod is not installed: apt-get install lmod"
        pytest.fail(reason) if os.environ.get("CI") == "true" or os.geteuid() == 0 else pytest.skip(reason)
    files = {
        "own/1.0.lua": 'setenv("OWN", "1.0")',
        "own/2.0.lua": 'setenv("OWN", "2.0")',
        "library/3.lua": 'pushenv("LIBRARY", "three")',
        "rival/1.lua": 'unload("own")',
        "broken/1.lua": 'LmodError("its \\"licence\\" server\\nis away")',
    }
    for name, text in files.items():
        path = tmp_path / "site modules" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "site modules"


def run_script(site: Path, place: Path, *overrides: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The batch script as bash runs it, where `module` is unknown and Slurm's commands only leave word."""
    run, stubs = place / "run", place / "stubs"
    (run / "logs").mkdir(parents=True)
    stubs.mkdir()
    for name in ("srun", "scontrol", "scancel", "squeue", "sinfo"):
        (stubs / name).write_text(STUB)
        (stubs / name).chmod(stat.S_IRWXU)
    folder = RunDirectory(run, run / "checkpoints")
    script = render_script(folder, make_request(compose(default_to_slurm([*overrides])), folder))
    variables = {"PATH": f"{stubs}:/usr/bin:/bin", "RUN": str(run), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n"}
    return subprocess.run(
        ["bash", "--noprofile", "--norc"],
        input=script,
        env=variables | env,
        capture_output=True,
        text=True,
        check=False,
    )


def settings(site: Path, *modules: str) -> list[str]:
    return [f"cluster.module_path=['{site}']", f"cluster.modules=[{','.join(modules)}]"]


def test_modules_are_loaded_where_module_is_unknown_and_are_recorded(site: Path, tmp_path: Path) -> None:
    done = run_script(site, tmp_path, *settings(site, "own/1.0", "library"))
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "run/ran").read_text().split() == ["1.0", "three", "own/1.0:library/3"]
    assert (tmp_path / "run/logs/0/modules.txt").read_text().split() == ["own/1.0", "library/3"]


@pytest.mark.parametrize(
    ("modules", "why"),
    [
        (("library", "nothing/9"), "cluster.modules: nothing/9 cannot be loaded: "),
        (("library/7",), "cluster.modules: library/7 cannot be loaded: "),
        (("broken",), "cluster.modules: broken cannot be loaded: "),
        (("own/1.0", "rival"), "cluster.modules: own/1.0: a later one of the list has unloaded it"),
        (("own/1.0", "own/2.0"), "cluster.modules: own/1.0: a later one of the list has unloaded it"),
    ],
)
def test_a_module_that_is_missing_ends_the_attempt(
    site: Path, tmp_path: Path, modules: tuple[str, ...], why: str
) -> None:
    done = run_script(site, tmp_path, *settings(site, *modules))
    assert done.returncode == 93
    assert not (tmp_path / "run/ran").exists()
    result = json.loads((tmp_path / "run/logs/0/result.json").read_text())
    assert result["exit_code"] == 93
    assert result["why"].startswith(why)
    assert f"hpc-train: {result['why']}" in done.stdout.splitlines()
    if modules == ("broken",):
        assert "its licence server is away" in result["why"]


def test_a_folder_or_an_installation_that_is_missing_is_said(site: Path, tmp_path: Path) -> None:
    done = run_script(site, tmp_path, f"cluster.module_path=[{tmp_path}/nowhere]")
    assert done.returncode == 93
    assert f"cluster.module_path: {tmp_path}/nowhere is not there on" in done.stdout


def test_what_the_submitting_shell_had_loaded_stays_or_is_purged(site: Path, tmp_path: Path) -> None:
    shell = f". {LMOD}; module use '{site}'; module load own/2.0; env -0"
    output = subprocess.run(
        ["bash", "-c", shell], env={"PATH": "/usr/bin:/bin"}, capture_output=True, check=True
    ).stdout
    loaded = dict(item.split("=", 1) for item in output.decode().split("\0") if "=" in item)
    loaded = {name: value for name, value in loaded.items() if name not in ("PATH", "_", "SHLVL", "PWD")}
    for purge, expected in ((False, ["2.0", "three"]), (True, ["three"])):
        place = tmp_path / str(purge)
        done = run_script(site, place, *settings(site, "library"), f"cluster.module_purge={purge}", **loaded)
        assert done.returncode == 0, done.stdout
        assert (place / "run/ran").read_text().split()[:-1] == expected


@pytest.mark.parametrize("name", ["-v", "a b", "$(touch x)", "a;b", "", "a\\'b"])
def test_what_is_no_name_of_a_module_is_refused(name: str, tmp_path: Path) -> None:
    folder = RunDirectory(tmp_path, tmp_path / "checkpoints")
    with pytest.raises(UserError) as refused:
        make_request(compose(default_to_slurm([f"cluster.modules=['{name}']"])), folder)
    assert "cluster.modules" in str(refused.value)
    for path in ("modules", "/a:b"):
        with pytest.raises(UserError, match="is not the absolute path of a folder of modulefiles"):
            make_request(compose(default_to_slurm([f"cluster.module_path=['{path}']"])), folder)
