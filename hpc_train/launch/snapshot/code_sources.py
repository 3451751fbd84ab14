"""Find the code of a run: hpc_train's own checkout, the folders of users' modules, and what git says of them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, distributions, entry_points
from importlib.resources import files
from pathlib import Path

import hpc_train
from hpc_train.components import DATASETS, LOSSES, METRICS, MODELS, OPTIMIZERS, SCHEDULES, ComponentKind
from hpc_train.config.run import RunConfig

_INSTALLED_FOLDERS = frozenset({"site-packages", "dist-packages"})
PACKAGE_FOLDER = Path(hpc_train.__file__).resolve().parent


def find_own_checkout() -> Path | None:
    """Return the folder of the package hpc_train in a checkout or an editable install; None: installed from a wheel."""
    return None if any(PACKAGE_FOLDER.parent.glob("hpc_train-*.dist-info")) else PACKAGE_FOLDER


def find_shipped_conf() -> Path:
    """Return the folder conf/: an editable install has it beside the package."""
    return Path(str(files("hpc_train.conf"))).resolve()


def list_user_modules(configs: Sequence[RunConfig]) -> list[str]:
    """Return the users' Python modules that these runs name, by import or by entry point."""
    # Most points of a sweep name the same, and finding the entry points of all installed packages takes 10 ms.
    named = dict.fromkeys(component for config in configs for component in _list_components(config))
    names: dict[str, None] = {}
    for kind, module, chosen in named:
        if module:
            names[module] = None
        elif chosen:
            offered = {point.name: point.module for point in entry_points(group=kind.entry_points)}
            names |= dict.fromkeys(offered[name] for name in chosen if name in offered)
    return list(names)


def _list_components(config: RunConfig) -> Iterator[tuple[ComponentKind, str | None, tuple[str, ...]]]:
    """Yield (kind, Python module, names) of what may be the user's own."""
    train, optim = config.train, config.optim
    if config.model.kind == "custom":
        yield MODELS, getattr(config.model, "module", None), (config.model.name,)
    if config.data.kind == "custom":
        yield DATASETS, getattr(config.data, "module", None), (config.data.name,)
    yield OPTIMIZERS, optim.module, (optim.name,)
    yield SCHEDULES, optim.module, (optim.schedule.name,)
    yield LOSSES, train.module, (train.loss,) if train.loss else ()
    yield METRICS, train.module, tuple(train.metrics)


def locate_module(module: str) -> Path | None:
    """Find the file of a module's outermost package as an import would, running nothing of it; None: not here."""
    top = module.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top) or PathFinder.find_spec(top, [str(Path.cwd())])
    except (ImportError, ValueError, AttributeError):
        return None
    return _find_module(spec) if spec else None


def _find_module(spec: ModuleSpec) -> Path | None:
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).absolute()
    return Path(spec.origin).resolve() if spec.has_location and spec.origin else None


def list_import_folders(modules: Sequence[str]) -> list[Path]:
    """Return the folders that users' modules are imported from, in search order; not what is installed."""
    cwd = Path.cwd()
    folders = [Path(entry).resolve() for entry in sys.path if entry and _holds_user_modules(Path(entry))]
    folders = [folder for folder in folders if folder != PACKAGE_FOLDER.parent]  # it is frozen by itself
    for name in [*_list_editable_packages(), *modules]:
        place = locate_module(name)
        if place is not None and not is_installed(place):
            folders.append(place.parent)
    return list(dict.fromkeys([*folders, cwd]))


def is_installed(path: Path) -> bool:
    """Whether a path is the interpreter's, or in one of its folders of installed packages."""
    if _INSTALLED_FOLDERS & set(path.parts):
        return True
    return any(path.is_relative_to(folder) for folder in _list_python_prefixes())


@cache
def _list_python_prefixes() -> set[str]:
    return {sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")} - {"/"}


def _holds_user_modules(folder: Path) -> bool:
    """Whether a folder of the path may hold modules: that of the command itself, which Python adds, does not."""
    if folder.resolve() == Path(sys.argv[0]).resolve().parent != Path.cwd() or not folder.is_dir():
        return False
    return not is_installed(folder.absolute()) and folder.stat().st_uid == os.getuid()


def _list_editable_packages() -> Iterator[str]:
    """List the names that can be imported of distributions that pip installed as editable."""
    for distribution in distributions():
        text = distribution.read_text("direct_url.json") or ""
        if '"editable": true' in text and distribution.name != "hpc_train":
            yield from _list_top_level_names(distribution)


def _list_top_level_names(distribution: Distribution) -> list[str]:
    return (distribution.read_text("top_level.txt") or distribution.name.replace("-", "_")).split()


_GIT_TIMEOUT_SECONDS = 60.0
"""Seconds for one answer; a large repository on a slow file system needs some."""


@dataclass(frozen=True)
class Repository:
    """The work tree that a folder belongs to."""

    root: Path
    commit: str | None
    """None before the first one."""
    dirty: bool
    """Whether anything differs from the commit, files that git does not know included."""


@dataclass(frozen=True)
class ListedFile:
    """A file, or a link, of a work tree."""

    path: str
    """Relative to the root."""
    tracked: bool


def find_repository(folder: Path) -> Repository | None:
    """Return the repository of `folder`; None without one, without git, or where git does not trust its owner."""
    output = _run_git(folder, "rev-parse", "--show-toplevel")
    if not output:
        return None
    root = Path(os.fsdecode(output.rstrip(b"\n")))
    status = _run_git(root, "status", "--porcelain=v2", "--branch", "-z", "--ignore-submodules=none")
    if status is None:
        return None
    words = [word for word in status.split(b"\0") if word]
    name = next((word[13:].decode() for word in words if word.startswith(b"# branch.oid ")), "(initial)")
    return Repository(root, None if name == "(initial)" else name, any(not word.startswith(b"# ") for word in words))


def list_files(root: Path, below: str = "") -> list[ListedFile]:
    """List the files that are tracked or not ignored, including those of submodules and nested repositories."""
    output = _run_git(root, "ls-files", "-z", "-t", "--cached", "--others", "--exclude-standard") or b""
    files: dict[str, ListedFile] = {}
    for word in filter(None, output.split(b"\0")):
        mark, path = word[:1], os.fsdecode(word[2:])
        inner = (root / path).is_dir() and not (root / path).is_symlink()
        if inner and (root / path / ".git").exists():
            files |= {file.path: file for file in list_files(root / path, f"{below}{path.rstrip('/')}/")}
        elif not inner:
            files[below + path] = ListedFile(below + path, mark != b"?")
    return list(files.values())


def _run_git(folder: Path, *words: str) -> bytes | None:
    """Return what git prints; None if it refuses. No hook of the repository runs, and nothing is written."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder), *words],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
