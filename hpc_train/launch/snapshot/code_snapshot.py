"""Snapshot the code of a job at submission, so that later edits do not affect the job.

A snapshot holds all code of a run except installed packages. It is named by the hash of its contents and stored once.
users.jsonl in the store has a line per submission, and a snapshot that no run needs any more is removed.
"""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpc_train.config.launch import LaunchConfig
from hpc_train.config.run import RunConfig
from hpc_train.config.run_file import POINTS_FILE
from hpc_train.errors import UserError
from hpc_train.launch.command_output import Report
from hpc_train.launch.snapshot import code_sources
from hpc_train.launch.snapshot import snapshot_files as files
from hpc_train.launch.snapshot.snapshot_files import SnapshotEntry
from hpc_train.launch.sweep import sweep_directory
from hpc_train.regular_files import read_text
from hpc_train.units import join_first

_MIB = 1 << 20
PATHS_FILE = "paths.json"
"""File in a snapshot: its folders for PYTHONPATH, in order."""


@dataclass(frozen=True)
class SourceTree:
    """A folder whose code is in the snapshot."""

    root: Path
    entries: tuple[SnapshotEntry, ...]
    commit: str | None = None
    dirty: bool | None = None
    """Whether it differed from the commit; None without git."""

    def row(self) -> dict[str, Any]:
        """Return what a job spec and an event say of this tree."""
        return {"root": str(self.root), "commit": self.commit, "dirty": self.dirty, "files": len(self.entries)}


@dataclass(frozen=True)
class Snapshot:
    """The code of a run at its submission. Making this object writes nothing; `store` does."""

    hash: str
    path: Path
    """Its folder in the store, which may not exist yet; named by the hash."""
    python_path: tuple[str, ...]
    """Folders that Python searches first, in `path`."""
    sources: tuple[dict[str, Any], ...]
    """Root, commit, dirty and number of files of each tree."""
    replaced: frozenset[Path] = frozenset()
    """Folders that Python searched and that are in the snapshot now."""
    entries: tuple[SnapshotEntry, ...] = field(repr=False, default=())

    def store(self) -> int:
        """Write the snapshot unless it exists; return the token for `discard`. Raises UserError if that fails."""
        return files.store_snapshot(self.path, self.entries)

    @contextmanager
    def stored_for(self, run: Path) -> Iterator[None]:
        """Store the snapshot for a run or sweep directory; an exception inside removes it again."""
        stored = 0
        try:
            add_reference(self.path, run)
            stored = self.store()
            yield
        except BaseException:
            self.discard(stored)
            drop_reference(self.path.parent, run)
            raise

    def discard(self, stored: int) -> None:
        """Undo `store`: a snapshot that was there before stays, and so does one that another submission relies on."""
        files.discard_snapshot(self.path, stored)

    def without_sources(self, python_path: str) -> str:
        """Return a PYTHONPATH without the folders whose modules are in the snapshot: jobs must not look there."""
        folders = [folder for folder in python_path.split(os.pathsep) if folder]
        return os.pathsep.join(folder for folder in folders if Path(folder).resolve() not in self.replaced)


def snapshot_code(config: RunConfig, run: Path, report: Report, *others: RunConfig) -> Snapshot | None:
    """Read the code of this run, and of others that run with it; None where launch.snapshot=off.

    run: the run or sweep directory; without launch.snapshot_dir the store lies beside it. report: gets remarks about
    what is left out.
    Raises UserError, one line, for code that cannot be read, is too much, or would be left out though it is needed.
    """
    if config.launch.snapshot == "off":
        report("launch.snapshot=off: what you edit from now on changes the job that waits")
        return None
    modules = code_sources.list_user_modules((config, *others))
    # Each tree is in a folder of the snapshot that is called by its number; 0 is this package, unless it is installed.
    trees, python_path, folders = (
        _list_own_tree(),
        ["0"] if code_sources.find_own_checkout() else [],
        [code_sources.PACKAGE_FOLDER.parent],
    )
    if modules or config.launch.snapshot_include:
        folders += code_sources.list_import_folders(modules)
        user_trees = _list_user_trees(folders[1:], config.launch, report)
        python_path += _make_python_path(folders[1:], user_trees, len(trees))
        trees += user_trees
        _check_modules(modules, user_trees)
        _check_included(user_trees, config.launch)
        _check_size(user_trees, config.launch.snapshot_max_mib)
    entries = [
        replace(entry, path=f"{index}/{entry.path}") for index, tree in enumerate(trees) for entry in tree.entries
    ]
    entries.append(SnapshotEntry(PATHS_FILE, json.dumps(python_path).encode()))
    name = files.hash_entries(entries)
    path = _choose_snapshot_path(config.launch, run) / name
    python = tuple(os.path.normpath(path / part) for part in python_path)
    rows = tuple(tree.row() for tree in trees)
    return Snapshot(name, path, python, rows, frozenset(folders) if trees else frozenset(), tuple(entries))


def _choose_snapshot_path(launch: LaunchConfig, run: Path) -> Path:
    """Return the folder of all snapshots. Several users may have runs in one folder: each has a store of their own."""
    chosen = launch.snapshot_dir
    place = Path(chosen).expanduser().absolute() if chosen else run.parent / f".hpc_train-code-{os.getuid()}"
    if ":" in str(place) or not str(place).isprintable():
        raise UserError(f"launch.snapshot: PYTHONPATH cannot hold {str(place)!r}; choose a launch.snapshot_dir")
    return place


def _list_own_tree() -> list[SourceTree]:
    """Read this package, with conf/ where its wheel has it; [] if it is installed: then its version is enough."""
    package = code_sources.find_own_checkout()
    if package is None:
        return []
    conf = code_sources.find_shipped_conf()
    paths = [*_list_paths_below(package, "hpc_train"), *_list_paths_below(conf, "hpc_train/conf")]
    entries = {entry.path: entry for entry in paths if entry.kind != "link"}
    repository = code_sources.find_repository(package)
    commit = (repository.commit, repository.dirty) if repository else (None, None)
    return [SourceTree(package, tuple(entries.values()), *commit)]


def _list_paths_below(folder: Path, name: str) -> list[SnapshotEntry]:
    read = (files.read_entry(folder, path) for path in files.walk_tree(folder, files.CODE_SUFFIXES))
    return [replace(entry, path=os.path.normpath(f"{name}/{entry.path}")) for entry in read if entry]


def _list_user_trees(folders: Sequence[Path], launch: LaunchConfig, report: Report) -> list[SourceTree]:
    """Read the repositories of these folders, and the folders that are in none."""
    repositories = {folder: code_sources.find_repository(folder) for folder in folders}
    roots = dict.fromkeys(repository.root if repository else folder for folder, repository in repositories.items())
    plain = [
        root
        for root in roots
        if not any(repository and repository.root == root for repository in repositories.values())
    ]
    # A folder inside another one is in its tree already.
    inner = [root for root in plain if any(root != other and root.is_relative_to(other) for other in plain)]
    of_root = {repository.root: repository for repository in repositories.values() if repository}
    return [_make_tree(root, of_root.get(root), launch, report) for root in roots if root not in inner]


def _make_tree(
    root: Path, repository: code_sources.Repository | None, launch: LaunchConfig, report: Report
) -> SourceTree:
    paths = _list_paths_of_git(root) if repository else list(files.walk_tree(root, files.SCRIPT_SUFFIXES))
    paths = [
        path for path in paths if not files.matches_pattern(path, launch.snapshot_exclude)
    ] + _select_included_paths(root, launch)
    # Before anything is read: a data set that lies in the tree by mistake may be larger than the memory.
    _check_number(root, paths)
    _check_bytes({str(root / path): files.read_size(root, path) for path in paths}, launch.snapshot_max_mib)
    entries_by_path = {path: files.read_entry(root, path) for path in paths}
    if left_out := [path for path in paths if entries_by_path[path] is None and (root / path).is_symlink()]:
        report(f"launch.snapshot: links left out, as they lead out of {root}: {join_first(left_out, 3)}")
    entries = tuple(entry for entry in entries_by_path.values() if entry)
    return SourceTree(
        root, entries, repository.commit if repository else None, repository.dirty if repository else None
    )


def _list_paths_of_git(root: Path) -> list[str]:
    """List all tracked files, whatever they are; of the other files, those that look like code."""
    # Untracked files may be what the user has just written, or a data set: the name decides.
    elsewhere = files.make_exclusion_check(root)
    return [
        file.path
        for file in code_sources.list_files(root)
        if file.tracked or not (files.is_data(file.path) or elsewhere(file.path))
    ]


def _select_included_paths(root: Path, launch: LaunchConfig) -> list[str]:
    """List the files of launch.snapshot_include that lie in this tree."""
    paths: list[str] = []
    for name in launch.snapshot_include:
        path = Path(name).expanduser().resolve()
        if path.is_relative_to(root):
            below = str(path.relative_to(root))
            paths += (
                [os.path.normpath(f"{below}/{file}") for file in files.walk_tree(path, None)]
                if path.is_dir()
                else [below]
            )
    return paths


def _make_python_path(folders: Sequence[Path], trees: Sequence[SourceTree], first: int) -> list[str]:
    """Return where the modules of these folders are in the snapshot, whose trees are numbered from `first`."""
    parts = []
    for folder in folders:
        tree = _find_tree(folder, trees)
        below = str(folder.relative_to(tree.root)) if tree else ""
        if tree and any(below == "." or entry.path.startswith(f"{below}/") for entry in tree.entries):
            parts.append(os.path.normpath(f"{first + trees.index(tree)}/{below}"))
    return list(dict.fromkeys(parts))


def _find_tree(path: Path, trees: Sequence[SourceTree]) -> SourceTree | None:
    """Return the innermost tree around a path."""
    around = [tree for tree in trees if path.is_relative_to(tree.root)]
    # Repositories may lie in one another, as submodules do: the innermost has the file.
    return max(around, key=lambda tree: len(tree.root.parts), default=None)


def _check_modules(modules: Sequence[str], trees: Sequence[SourceTree]) -> None:
    """Refuse a module that git ignores: the job would miss it, only hours later."""
    for name in modules:
        place = code_sources.locate_module(name)
        if place is None or code_sources.is_installed(place):
            continue
        tree = _find_tree(place, trees)
        below = str(place.relative_to(tree.root)) if tree else ""
        if tree is None or not any(f"{entry.path}/".startswith(f"{below}/") for entry in tree.entries):
            raise UserError(
                f"model.module={name}: {place} is not in the snapshot of the code (git ignores it, or "
                "launch.snapshot_exclude names it); name it in launch.snapshot_include"
            )


def _check_included(trees: Sequence[SourceTree], launch: LaunchConfig) -> None:
    for name in launch.snapshot_include:
        path = Path(name).expanduser().resolve()
        if not path.exists():
            raise UserError(f"launch.snapshot_include: {path}: No such file or directory")
        if not any(path.is_relative_to(tree.root) for tree in trees):
            roots = ", ".join(str(tree.root) for tree in trees)
            raise UserError(f"launch.snapshot_include: {path}: lies outside of the code that is frozen, {roots}")


def _check_number(root: Path, paths: Sequence[str]) -> None:
    if len(paths) > files.MAX_FILES:
        raise UserError(
            f"launch.snapshot: {len(paths)} files in {root}, more than {files.MAX_FILES}; leave folders out with "
            "launch.snapshot_exclude, or set launch.snapshot=off"
        )


def _check_size(trees: Sequence[SourceTree], max_mib: float) -> None:
    """Check the size of all trees of the user together; that of each was checked before it was read."""
    _check_bytes({str(tree.root / entry.path): len(entry.content) for tree in trees for entry in tree.entries}, max_mib)


def _check_bytes(sizes: dict[str, int], max_mib: float) -> None:
    total = sum(sizes.values())
    if total <= max_mib * _MIB:
        return
    largest = sorted(sizes, key=lambda path: sizes[path], reverse=True)[:3]
    shown = ", ".join(f"{path} ({sizes[path] / _MIB:.1f} MiB)" for path in largest if sizes[path] > total // 100)
    raise UserError(
        f"launch.snapshot_max_mib={max_mib:g}: the code is {total / _MIB:.1f} MiB; its largest files are {shown}; "
        "leave them out with launch.snapshot_exclude, or raise it"
    )


REFERENCES_FILE = "users.jsonl"
_SNAPSHOT_NAME = re.compile(r"[0-9a-f]{40}")
_GRACE_SECONDS = 86400.0
"""Seconds for which a new snapshot is never removed: the directory of its run is made later than the snapshot."""


def add_reference(path: Path, run: Path) -> None:
    """Record that the run or sweep in this directory needs the snapshot at `path`.

    Call this before checking whether the snapshot exists: remove_unused_snapshots looks for references after it has
    moved a snapshot away. Raises UserError as store_snapshot.
    """
    try:
        files.make_store(path.parent)
        sweep_directory.append_ledger_event(path.parent / REFERENCES_FILE, "use", code=path.name, run=str(run))
    except OSError as error:
        raise files.explain_store_error(error, path) from None


def drop_reference(place: Path, run: Path) -> None:
    """Remove the store of a submission that was refused, if it was the only one to use it."""
    users = place / REFERENCES_FILE
    if {event.get("run") for event in sweep_directory.read_ledger(users)} <= {str(run)} and {*place.glob("*")} <= {
        users
    }:
        users.unlink(missing_ok=True)
        with suppress(OSError):
            place.rmdir()


def remove_unused_snapshots(place: Path) -> None:
    """Remove the snapshots of a store that no run needs any more; those that cannot be removed stay for the next time.

    A snapshot without any recorded reference is left alone.
    """
    with suppress(OSError):
        for name in sorted({str(event.get("code")) for event in sweep_directory.read_ledger(place / REFERENCES_FILE)}):
            path = place / name
            if _SNAPSHOT_NAME.fullmatch(name) and path.is_dir() and not _is_needed(path):
                _remove_snapshot(path)


def _remove_snapshot(path: Path) -> None:
    """Remove a snapshot that no run needs; moved away first, so that a submission finds it whole or not at all.

    One that a submission has asked for meanwhile is moved back.
    """
    moved_path = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    # Readers never see half a snapshot; and after the rename nobody new can come to rely on it.
    path.rename(moved_path)
    if _is_needed(path):
        with suppress(OSError):  # it has been stored again
            moved_path.rename(path)
            return
    files.remove_read_only(moved_path)


def _is_needed(path: Path) -> bool:
    events = sweep_directory.read_ledger(path.parent / REFERENCES_FILE)
    uses = (event for event in reversed(events) if event.get("code") == path.name)
    return any(
        time.time() - float(event["time"]) < _GRACE_SECONDS or _run_refers_to(Path(event["run"]), path)
        for event in uses
    )


def _run_refers_to(run: Path, path: Path) -> bool:
    """Whether a run directory refers to the snapshot; True also where its file system is not visible from here."""
    if not run.is_dir():
        return not run.parent.is_dir()
    if (run / POINTS_FILE).exists():
        return True
    try:
        return path.name in read_text(run / "job.json")
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True
