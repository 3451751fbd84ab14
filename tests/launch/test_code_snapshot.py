"""What of a project is in the snapshot of its code, under which name, and that nobody can change it there."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path

import pytest
from hydra.core.plugins import Plugins

from hpc_train.config.compose import compose
from hpc_train.errors import UserError
from hpc_train.launch.snapshot import code_sources, snapshot_files
from hpc_train.launch.snapshot.code_snapshot import Snapshot, snapshot_code
from hpc_train.launch.submit import default_to_slurm

CUSTOM = ("model=custom", "model.module=my_models", "model.name=mine")
Take = Callable[..., Snapshot]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a user's model; nothing else of theirs is on the path."""
    folder = tmp_path / "project"
    write(folder, "my_models.py", "import helper\n")
    write(folder, "helper.py", "VERSION = 1\n")
    monkeypatch.chdir(folder)
    Plugins.instance()  # its scan happens once per process: with the whole path
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry and code_sources.is_installed(Path(entry))])
    return folder


@pytest.fixture
def repository(project: Path) -> Path:
    """The same as a git repository with one commit."""
    git(project, "init", "-q")
    git(project, "add", ".")
    commit(project)
    return project


@pytest.fixture
def take(tmp_path: Path) -> Take:
    """A snapshot for a run in runs/."""

    def taken(*overrides: str) -> Snapshot:
        made = snapshot_code(compose(default_to_slurm([*CUSTOM, *overrides])), tmp_path / "runs/run", print)
        assert made is not None
        return made

    return taken


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    done = subprocess.run(["git", "-C", str(folder), *who, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(folder: Path) -> str:
    git(folder, "commit", "-q", "--allow-empty", "-m", "x")
    return git(folder, "rev-parse", "HEAD")


def write(folder: Path, name: str, text: str = "") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def theirs(taken: Snapshot) -> set[str]:
    """Paths of the user's files; the tree before is that of hpc_train, the last one that of the current folder."""
    tree = f"{len(taken.sources) - 1}/"
    return {entry.path.removeprefix(tree) for entry in taken.entries if entry.path.startswith(tree)}


def stored(taken: Snapshot) -> Iterator[Path]:
    yield from taken.path.rglob("*")


def test_a_repository_gives_what_is_tracked_and_what_is_new_but_not_ignored(repository: Path, take: Take) -> None:
    write(repository, ".gitignore", "*.tmp\nignored/\n")
    write(repository, "helper.py", "VERSION = 2\n")
    write(repository, "data/tracked.csv", "1\n")
    git(repository, "add", "data")
    commit(repository)
    write(repository, "gone.py")
    git(repository, "add", "gone.py")
    (repository / "gone.py").unlink()
    for name in ("new.py", "pkg/deep/new.yaml", "ignored/a.py", "a.tmp", "new.h5", "venv/lib/x.py", "envs/pyvenv.cfg"):
        write(repository, name)
    for name in ("envs/lib/y.py", "runs/a/job.json", "runs/a/config.yaml", "runs/a/logs/z.py", "__pycache__/x.py"):
        write(repository, name)
    for name in ("sweeps/s/points.jsonl", "sweeps/s/ledger.jsonl", "sweeps/s/points/p.py"):
        write(repository, name)
    taken = take()
    expected = {"my_models.py", "helper.py", ".gitignore", "data/tracked.csv", "new.py", "pkg/deep/new.yaml"}
    assert theirs(taken) == expected
    taken.store()
    tree = taken.path / str(len(taken.sources) - 1)
    assert (tree / "helper.py").read_text() == "VERSION = 2\n"
    assert taken.python_path == (str(taken.path / "0"), str(tree))


def test_repositories_inside_of_a_repository_come_along(repository: Path, take: Take) -> None:
    write(repository, "library/inner.py")
    git(repository / "library", "init", "-q")
    write(repository, "library/.gitignore", "left.py\n")
    write(repository, "library/left.py")
    assert {"library/inner.py", "library/.gitignore"} <= theirs(take())
    assert "library/left.py" not in theirs(take())


def test_commit_and_whether_it_was_changed_since_are_told(repository: Path, take: Take) -> None:
    head = commit(repository)
    row = take().sources[-1]
    assert row == {"root": str(repository), "commit": head, "dirty": False, "files": 2}
    write(repository, "new.py")
    assert take().sources[-1]["dirty"] is True


def test_without_git_it_is_the_python_and_yaml_files_below(project: Path, take: Take) -> None:
    for name in ("pkg/a.py", "conf/b.yaml", "c.yml", "corpus.txt", "x.h5", ".venv/d.py", "env/pyvenv.cfg", "env/e.py"):
        write(project, name)
    taken = take()
    assert theirs(taken) == {"my_models.py", "helper.py", "pkg/a.py", "conf/b.yaml", "c.yml"}
    assert taken.sources[-1] == {"root": str(project), "commit": None, "dirty": None, "files": 5}


def test_links_inside_stay_links_and_none_leads_out(
    repository: Path, take: Take, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "secret.py", "KEY = 'of somebody'\n")
    write(tmp_path, "elsewhere/module.py")
    write(repository, "pkg/a.py", "A = 1\n")
    (repository / "inside").symlink_to(repository / "pkg")
    (repository / "pkg/b.py").symlink_to("a.py")
    (repository / "leak.py").symlink_to(tmp_path / "secret.py")
    (repository / "leaks").symlink_to("../elsewhere")
    taken = take()
    assert theirs(taken) == {"my_models.py", "helper.py", "pkg/a.py", "inside", "pkg/b.py"}
    assert "links left out, as they lead out of" in capsys.readouterr().out
    taken.store()
    tree = Path(taken.python_path[-1])
    assert str((tree / "inside").readlink()) == "pkg"
    assert (tree / "inside/b.py").resolve() == tree / "pkg/a.py"


def test_the_name_is_of_the_contents_alone(repository: Path, take: Take) -> None:
    first = take()
    os.utime(repository / "helper.py", (0, 0))
    write(repository.parent / "runs", "x")
    assert take().hash == first.hash
    commit(repository)
    assert take().hash == first.hash
    (repository / "helper.py").chmod(0o755)
    other = take()
    write(repository, "helper.py", "VERSION = 3\n")
    (repository / "helper.py").rename(repository / "helpers.py")
    assert len({first.hash, other.hash, take().hash}) == 3


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_it_is_stored_once_read_only_for_its_owner(repository: Path, take: Take, umask: int) -> None:
    write(repository, "tool.sh").chmod(0o755)
    taken, before = take(), os.umask(umask & 0o077)
    try:
        assert taken.store() > 0
    finally:
        os.umask(before)
    inodes = {path: path.stat().st_ino for path in stored(taken)}
    assert take().store() == 0
    assert {path: path.stat().st_ino for path in stored(taken)} == inodes
    modes = {stat.S_IMODE(path.stat().st_mode) for path in stored(taken) if path.is_file() and path.suffix != ".sh"}
    assert modes == {0o400}
    assert stat.S_IMODE((Path(taken.python_path[-1]) / "tool.sh").stat().st_mode) == 0o500
    folders = {path.name == "__pycache__": path.stat().st_mode & 0o777 for path in stored(taken) if path.is_dir()}
    assert folders == {False: 0o500, True: 0o700}
    assert stat.S_IMODE(taken.path.parent.stat().st_mode) == 0o700


def test_two_submissions_at_once_store_one(repository: Path, take: Take) -> None:
    taken = take()
    workers = [get_context("fork").Process(target=taken.store) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert list(taken.path.parent.iterdir()) == [taken.path]
    assert snapshot_files.hash_folder(taken.path) == taken.hash


def test_what_was_changed_in_the_store_is_stored_again(repository: Path, take: Take) -> None:
    taken = take()
    taken.store()
    changed = Path(taken.python_path[-1]) / "helper.py"
    changed.chmod(0o600)
    changed.write_text("VERSION = 'of somebody else'\n")
    assert take().store() > 0
    assert changed.read_text() == "VERSION = 1\n"


def test_a_refused_submission_takes_back_what_it_stored_and_no_more(repository: Path, take: Take) -> None:
    taken = take()
    written = taken.store()
    taken.discard(written)
    assert not taken.path.parent.exists()
    written = taken.store()
    assert take().store() == 0, "another one relies on it"
    taken.discard(written)
    assert snapshot_files.hash_folder(taken.path) == taken.hash


def test_a_store_that_others_can_write_to_is_refused(repository: Path, take: Take) -> None:
    taken = take()
    taken.path.parent.mkdir(parents=True)
    taken.path.parent.chmod(0o777)
    with pytest.raises(UserError, match=r"is not your own folder \(owner \d+, mode 777\)"):
        taken.store()


def test_too_much_code_names_its_largest_files(repository: Path, take: Take) -> None:
    write(repository, "weights.txt", "0" * (3 << 20))
    with pytest.raises(UserError, match=r"snapshot_max_mib=2: the code is 3.0 MiB; .*weights.txt \(3.0 MiB\)"):
        take("launch.snapshot_max_mib=2")
    assert "weights.txt" not in theirs(take("launch.snapshot_max_mib=2", "launch.snapshot_exclude=[weights.*]"))
    assert "weights.txt" in theirs(take())


def test_a_module_that_git_ignores_is_missed_at_once(repository: Path, take: Take) -> None:
    write(repository, ".gitignore", "own/\n")
    write(repository, "own/__init__.py")
    write(repository, "own/net.py")
    with pytest.raises(UserError, match=r"model.module=own.net: .*/own is not in the snapshot .*snapshot_include"):
        take("model.module=own.net")
    assert {"own/__init__.py", "own/net.py"} <= theirs(take("model.module=own.net", "launch.snapshot_include=[own]"))
    with pytest.raises(UserError, match=r"snapshot_include: .*nowhere: No such file"):
        take("launch.snapshot_include=[nowhere]")
    with pytest.raises(UserError, match=r"snapshot_include: /etc: lies outside of the code"):
        take("launch.snapshot_include=[/etc]")


def test_folders_on_the_path_are_frozen_and_not_looked_into_again(
    repository: Path, take: Take, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "lib/src/shared/__init__.py")
    # Not syspath_prepend: its undo would write the filtered path of `project` over the whole one.
    monkeypatch.setattr(sys, "path", [str(tmp_path / "lib/src"), *sys.path])
    (repository / "sub").mkdir()
    write(repository, "sub/my_models.py")
    monkeypatch.chdir(repository / "sub")
    taken = take()
    assert [Path(row["root"]) for row in taken.sources[1:]] == [tmp_path / "lib/src", repository]
    assert taken.python_path[1:] == (str(taken.path / "1"), str(taken.path / "2/sub"))
    before = f"{tmp_path}/lib/src:/opt/site:{repository}/sub:"
    assert taken.without_sources(before) == "/opt/site"


def test_a_run_without_a_component_of_the_user_freezes_hpc_train_alone(project: Path, tmp_path: Path) -> None:
    taken = snapshot_code(compose(default_to_slurm([])), tmp_path / "runs/run", print)
    assert taken is not None
    assert [row["root"] for row in taken.sources] == [str(code_sources.PACKAGE_FOLDER)]
    paths = {entry.path for entry in taken.entries}
    assert {
        "0/hpc_train/launch/rank_entrypoint.py",
        "0/hpc_train/conf/config.yaml",
        "0/hpc_train/conf/__init__.py",
    } <= paths


def test_points_that_name_the_same_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding the entry points of all installed packages takes 10 ms, and a sweep may have 1,000 points."""
    groups: list[str] = []
    monkeypatch.setattr(code_sources, "entry_points", lambda group: groups.append(group) or [])
    names = ("adamw", "adafactor")
    configs = [compose(["data=stdlib", f"train.seed={seed}", f"optim={name}"]) for seed in (1, 2) for name in names]
    assert code_sources.list_user_modules(configs) == []
    assert sorted(groups) == ["hpc_train.optimizers"] * 2 + ["hpc_train.schedules"]


def test_an_installed_wheel_is_not_copied(tmp_path: Path) -> None:
    """Its version is what a job is compared with."""
    write(tmp_path, "hpc_train/__init__.py", (code_sources.PACKAGE_FOLDER / "__init__.py").read_text())
    for name in ("launch", "config", "models", "errors.py", "compat.py", "parallel", "training", "api.py"):
        (tmp_path / "hpc_train" / name).symlink_to(code_sources.PACKAGE_FOLDER / name)
    program = "from hpc_train.launch.snapshot import code_sources as sources; print(sources.find_own_checkout())"
    for expected, made in ((str(tmp_path / "hpc_train"), None), ("None", "hpc_train-0.1.0.dist-info/RECORD")):
        if made:
            write(tmp_path, made)
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == expected


def test_off_is_loud(project: Path, tmp_path: Path) -> None:
    remarks: list[str] = []
    config = compose(default_to_slurm([*CUSTOM, "launch.snapshot=off"]))
    assert snapshot_code(config, tmp_path / "run", remarks.append) is None
    assert remarks == ["launch.snapshot=off: what you edit from now on changes the job that waits"]


def test_a_store_whose_name_python_cannot_search_is_refused(project: Path, take: Take, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"PYTHONPATH cannot hold '/a:b'; choose a launch.snapshot_dir"):
        take("launch.snapshot_dir='/a:b'")
    assert take(f"launch.snapshot_dir={tmp_path}/code").path.parent == tmp_path / "code"


def test_paths_are_those_of_the_snapshot(repository: Path, take: Take) -> None:
    taken = take()
    taken.store()
    assert json.loads((taken.path / "paths.json").read_text()) == ["0", "1"]
