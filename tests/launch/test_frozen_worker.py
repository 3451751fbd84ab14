"""A rank runs the code that was submitted, or says in one line why it does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.config.compose import compose
from hpc_train.errors import UserError
from hpc_train.launch.freeze import freeze_run
from hpc_train.launch.job_spec import JobSpec, read_spec
from hpc_train.launch.snapshot import code_sources
from hpc_train.launch.snapshot.code_snapshot import snapshot_code
from hpc_train.launch.snapshot.import_guard import guard_imports
from hpc_train.launch.submit import default_to_slurm

MODEL = (
    "from torch import nn\nfrom hpc_train.models import register\nregister('mine')(lambda: nn.Embedding(256, 256))\n"
)


@pytest.fixture
def spec(tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> JobSpec:
    """Of a run whose code is stored."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "my_models.py").write_text(MODEL)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry and code_sources.is_installed(Path(entry))])
    run = tmp_path / "runs/run"
    custom = ["model=custom", "model.module=my_models", "model.name=mine", f"data.path={store}", f"run_dir={run}"]
    config = compose(default_to_slurm(custom))
    code = snapshot_code(config, run, print)
    assert code is not None
    code.store()
    return freeze_run(config, 1, print, code=code)


def test_the_spec_says_which_code_it_is(spec: JobSpec, tmp_path: Path) -> None:
    path = Path(spec.code)
    assert path.parent == tmp_path / f"runs/.hpc_train-code-{os.getuid()}"
    assert [set(row) for row in spec.sources] == [{"root", "commit", "dirty", "files"}] * 2
    assert read_spec(Path(spec.run_dir) / "job.json") == spec


def test_another_version_is_refused(spec: JobSpec) -> None:
    with pytest.raises(UserError, match=r"was submitted with hpc_train 9\.9, and here is 0\.1\.0 \(.*submit the run"):
        guard_imports(replace(spec, hpc_train="9.9", code=""), True)
    guard_imports(replace(spec, code=""), True)


def test_code_that_is_not_what_was_stored_is_refused(spec: JobSpec) -> None:
    path = Path(spec.code)
    with pytest.raises(UserError, match=r"hpc_train was imported from .*, and not from "):
        guard_imports(spec, True)
    victim = next(path.glob("1/my_models.py"))
    victim.chmod(0o600)
    victim.write_text(MODEL.replace("256", "255"))
    with pytest.raises(UserError, match=r": the snapshot of the code was changed; submit the run again"):
        guard_imports(spec, True)
    path.chmod(0o770)
    with pytest.raises(UserError, match=r"is not your own folder \(owner \d+, mode 770\)"):
        guard_imports(spec, False)
    with pytest.raises(UserError, match=r": the snapshot of the code is not there \(any more\)"):
        guard_imports(replace(spec, code=f"{path}0"), False)


def test_ranks_that_find_other_code_first_end_with_the_reason(spec: JobSpec) -> None:
    """As when launch.setup sets PYTHONPATH anew."""
    run = Path(spec.run_dir)
    (run / "logs/0").mkdir()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "hpc_train.launch.rank_entrypoint", str(run)],
        env={**os.environ, "PYTHONPATH": str(code_sources.PACKAGE_FOLDER.parent)},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2
    assert (
        f"hpc-train: hpc_train was imported from {code_sources.PACKAGE_FOLDER}"
        in (run / "logs/0/task-0.log").read_text()
    )
    assert "was imported from" in json.loads((run / "logs/0/task-0.failure.json").read_text())["message"]


def test_nothing_is_imported_from_where_the_code_was(spec: JobSpec, tmp_path: Path) -> None:
    """Not through what an editable install puts on the path, and not what is new there since."""
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (project / "late.py").write_text("")
    (project / "my_models.py").write_text("raise SystemExit('edited')")
    (elsewhere / "other.py").write_text("")
    program = f"""
import sys
from pathlib import Path
from hpc_train.errors import UserError
from hpc_train.launch.snapshot.import_guard import guard_imports as enter
from hpc_train.launch.job_spec import read_spec
enter(read_spec(Path({str(Path(spec.run_dir) / "job.json")!r})), True)
sys.path += [{str(project)!r}, {str(elsewhere)!r}]
import my_models, other, colorsys, yaml
print(my_models.__file__)
try:
    import late
except UserError as error:
    print(error)
"""
    path = os.pathsep.join(os.path.normpath(f"{spec.code}/{tree}") for tree in (0, 1))
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-P", "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    where, refused = done.stdout.splitlines()
    assert where == f"{spec.code}/1/my_models.py"
    assert refused.startswith(f"import late: {project}/late.py is not in the snapshot of the code")
