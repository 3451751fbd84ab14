"""Snapshot: all code of a run that is no installed package, named by its contents and stored once."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpc_train.config.launch import LaunchConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.launch.code import entries as files
from hpc_train.launch.code import git, sources, store, users
from hpc_train.launch.code.entries import Entry

_MIB = 1 << 20
PATHS = "paths.json"
"""In a snapshot: its folders for PYTHONPATH, in order."""


@dataclass(frozen=True)
class Tree:
    """A folder whose code is in the snapshot."""

    root: Path
    entries: tuple[Entry, ...]
    commit: str | None = None
    dirty: bool | None = None
    """Whether it differed from the commit; None without git."""

    def row(self) -> dict[str, Any]:
        """For a job spec and an event."""
        return {"root": str(self.root), "commit": self.commit, "dirty": self.dirty, "files": len(self.entries)}


@dataclass(frozen=True)
class Snapshot:
    """What a run's code was when it was submitted. Making it writes nothing; `keep` does."""

    hash: str
    path: Path
    """Where it lies, or will: a folder whose name is the hash."""
    python_path: tuple[str, ...]
    """Folders that Python searches first, in `path`."""
    sources: tuple[dict[str, Any], ...]
    """Root, commit, dirty and number of files of each tree."""
    replaced: frozenset[Path] = frozenset()
    """Folders that Python searched and that are in the snapshot now."""
    entries: tuple[Entry, ...] = field(repr=False, default=())

    def keep(self) -> int:
        """Store it, if it is not stored yet; returns what `discard` takes. Raises UserError if it cannot be stored."""
        return store.write(self.path, self.entries)

    @contextmanager
    def kept_for(self, run: Path) -> Iterator[None]:
        """Store it for a run (or sweep) directory; what is raised inside takes back what was stored."""
        kept = 0
        try:
            users.use(self.path, run)
            kept = self.keep()
            yield
        except BaseException:
            self.discard(kept)
            users.leave(self.path.parent, run)
            raise

    def discard(self, kept: int) -> None:
        """Take back what `keep` did: what was there before stays, and so does what another submission relies on."""
        store.discard(self.path, kept)

    def without_sources(self, python_path: str) -> str:
        """A PYTHONPATH without the folders whose modules are in the snapshot: jobs must not look there."""
        folders = [folder for folder in python_path.split(os.pathsep) if folder]
        return os.pathsep.join(folder for folder in folders if Path(folder).resolve() not in self.replaced)


def snapshot(config: RunConfig, run: Path, *others: RunConfig) -> Snapshot | None:
    """The code of this run, and of others that run with it, as it is now; None where launch.snapshot=off.

    run: the run or sweep directory; without launch.snapshot_dir the store lies beside it.
    Raises UserError, one line, for code that cannot be read, is too much, or would be left out though it is needed.
    """
    if config.launch.snapshot == "off":
        print("hpc-train: launch.snapshot=off: what you edit from now on changes the job that waits", file=sys.stderr)
        return None
    modules = sources.user_modules((config, *others))
    trees, python_path, folders = _hpc_train(), ["0"] if sources.checkout() else [], [sources.PACKAGE.parent]
    if modules or config.launch.snapshot_include:
        folders += sources.import_folders(modules)
        theirs = _trees(folders[1:], config.launch)
        python_path += _python_path(folders[1:], theirs, len(trees))
        trees += theirs
        _check_modules(modules, theirs)
        _check_included(theirs, config.launch)
        _check_size(theirs, config.launch.snapshot_max_mib)
    entries = [replace(it, path=f"{index}/{it.path}") for index, tree in enumerate(trees) for it in tree.entries]
    entries.append(Entry(PATHS, json.dumps(python_path).encode()))
    name = files.digest(entries)
    path = _place(config.launch, run) / name
    python = tuple(os.path.normpath(path / part) for part in python_path)
    rows = tuple(tree.row() for tree in trees)
    return Snapshot(name, path, python, rows, frozenset(folders) if trees else frozenset(), tuple(entries))


def _place(launch: LaunchConfig, run: Path) -> Path:
    """Folder of all snapshots. Several users may have runs in one folder: each has a store of their own there."""
    chosen = launch.snapshot_dir
    place = Path(chosen).expanduser().absolute() if chosen else run.parent / f".hpc_train-code-{os.getuid()}"
    if ":" in str(place) or not str(place).isprintable():
        raise UserError(f"launch.snapshot: PYTHONPATH cannot hold {str(place)!r}; choose a launch.snapshot_dir")
    return place


def _hpc_train() -> list[Tree]:
    """The package itself, with conf/ where its wheel has it; [] if it is installed: then its version tells."""
    package = sources.checkout()
    if package is None:
        return []
    conf = sources.shipped_options()
    found = [*_below(package, "hpc_train"), *_below(conf, "hpc_train/conf")]
    entries = {entry.path: entry for entry in found if entry.kind != "link"}
    known = git.repository(package)
    told = (known.commit, known.dirty) if known else (None, None)
    return [Tree(package, tuple(entries.values()), *told)]


def _below(folder: Path, name: str) -> list[Entry]:
    found = (files.read(folder, path) for path in files.walk(folder, files.CODE))
    return [replace(entry, path=os.path.normpath(f"{name}/{entry.path}")) for entry in found if entry]


def _trees(folders: Sequence[Path], launch: LaunchConfig) -> list[Tree]:
    """The repositories of these folders, and the folders that are in none."""
    known = {folder: git.repository(folder) for folder in folders}
    roots = dict.fromkeys(it.root if it else folder for folder, it in known.items())
    plain = [root for root in roots if not any(it and it.root == root for it in known.values())]
    inner = [root for root in plain if any(root != other and root.is_relative_to(other) for other in plain)]
    of_root = {it.root: it for it in known.values() if it}
    return [_tree(root, of_root.get(root), launch) for root in roots if root not in inner]


def _tree(root: Path, known: git.Repository | None, launch: LaunchConfig) -> Tree:
    paths = _paths_of_git(root) if known else list(files.walk(root, files.SCRIPTS))
    paths = [path for path in paths if not files.matches(path, launch.snapshot_exclude)] + _included(root, launch)
    _check_number(root, paths)
    _check_bytes({str(root / path): files.size(root, path) for path in paths}, launch.snapshot_max_mib)
    found = {path: files.read(root, path) for path in paths}
    if left := [path for path in paths if found[path] is None and (root / path).is_symlink()]:
        print(
            f"hpc-train: launch.snapshot: not in it, as they lead out of {root}: {', '.join(left[:3])}"
            f"{f' and {len(left) - 3} more links' if len(left) > 3 else ''}",
            file=sys.stderr,
        )
    entries = tuple(entry for entry in found.values() if entry)
    return Tree(root, entries, known.commit if known else None, known.dirty if known else None)


def _paths_of_git(root: Path) -> list[str]:
    """What is tracked is the project's, whatever it is; of the rest, what looks like code."""
    elsewhere = files.inside_of_no_project(root)
    return [it.path for it in git.files(root) if it.tracked or not (files.is_data(it.path) or elsewhere(it.path))]


def _included(root: Path, launch: LaunchConfig) -> list[str]:
    """launch.snapshot_include, as far as it lies in this tree."""
    found: list[str] = []
    for name in launch.snapshot_include:
        path = Path(name).expanduser().resolve()
        if path.is_relative_to(root):
            below = str(path.relative_to(root))
            found += [os.path.normpath(f"{below}/{it}") for it in files.walk(path, None)] if path.is_dir() else [below]
    return found


def _python_path(folders: Sequence[Path], trees: Sequence[Tree], first: int) -> list[str]:
    """Where the modules of these folders are in the snapshot, whose trees are numbered from `first`."""
    found = []
    for folder in folders:
        tree = _tree_of(folder, trees)
        below = str(folder.relative_to(tree.root)) if tree else ""
        if tree and any(below == "." or entry.path.startswith(f"{below}/") for entry in tree.entries):
            found.append(os.path.normpath(f"{first + trees.index(tree)}/{below}"))
    return list(dict.fromkeys(found))


def _tree_of(path: Path, trees: Sequence[Tree]) -> Tree | None:
    """The innermost one around a path."""
    around = [tree for tree in trees if path.is_relative_to(tree.root)]
    return max(around, key=lambda tree: len(tree.root.parts), default=None)


def _check_modules(modules: Sequence[str], trees: Sequence[Tree]) -> None:
    """A module that git ignores would be missed by the job only hours later."""
    for name in modules:
        place = sources.locate(name)
        if place is None or sources.is_installed(place):
            continue
        tree = _tree_of(place, trees)
        below = str(place.relative_to(tree.root)) if tree else ""
        if tree is None or not any(f"{entry.path}/".startswith(f"{below}/") for entry in tree.entries):
            raise UserError(
                f"model.module={name}: {place} is not in the snapshot of the code (git ignores it, or "
                "launch.snapshot_exclude names it); name it in launch.snapshot_include"
            )


def _check_included(trees: Sequence[Tree], launch: LaunchConfig) -> None:
    for name in launch.snapshot_include:
        path = Path(name).expanduser().resolve()
        if not path.exists():
            raise UserError(f"launch.snapshot_include: {path}: No such file or directory")
        if not any(path.is_relative_to(tree.root) for tree in trees):
            roots = ", ".join(str(tree.root) for tree in trees)
            raise UserError(f"launch.snapshot_include: {path}: lies outside of the code that is frozen, {roots}")


def _check_number(root: Path, paths: Sequence[str]) -> None:
    if len(paths) > files.MOST_FILES:
        raise UserError(
            f"launch.snapshot: {len(paths)} files in {root}, more than {files.MOST_FILES}; leave folders out with "
            "launch.snapshot_exclude, or set launch.snapshot=off"
        )


def _check_size(trees: Sequence[Tree], most: float) -> None:
    """All trees of the user together; each by itself was looked at before it was read."""
    _check_bytes({str(tree.root / it.path): len(it.content) for tree in trees for it in tree.entries}, most)


def _check_bytes(sizes: dict[str, int], most: float) -> None:
    total = sum(sizes.values())
    if total <= most * _MIB:
        return
    largest = sorted(sizes, key=lambda path: sizes[path], reverse=True)[:3]
    shown = ", ".join(f"{path} ({sizes[path] / _MIB:.1f} MiB)" for path in largest if sizes[path] > total // 100)
    raise UserError(
        f"launch.snapshot_max_mib={most:g}: the code is {total / _MIB:.1f} MiB; its largest files are {shown}; leave "
        "them out with launch.snapshot_exclude, or raise it"
    )
