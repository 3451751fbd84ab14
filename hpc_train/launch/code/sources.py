"""Where the code of a run comes from: hpc_train's own checkout, and the folders that users' components are in."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, distributions, entry_points
from importlib.resources import files
from pathlib import Path

import hpc_train
from hpc_train.config.model import CustomModelConfig
from hpc_train.config.run import RunConfig
from hpc_train.models.registry import ENTRY_POINTS

_INSTALLED = frozenset({"site-packages", "dist-packages"})
PACKAGE = Path(hpc_train.__file__).resolve().parent


def checkout() -> Path | None:
    """Folder of the package hpc_train where it is an editable install or a checkout; None: installed from a wheel."""
    return None if any(PACKAGE.parent.glob("hpc_train-*.dist-info")) else PACKAGE


def shipped_options() -> Path:
    """Where conf/ lies: an editable install leaves it beside the package."""
    return Path(str(files("hpc_train.conf"))).resolve()


def user_modules(configs: Sequence[RunConfig]) -> list[str]:
    """Python modules of users that these runs name, by import or by entry point."""
    names: dict[str, None] = {}
    offered = {point.name: point.module for point in entry_points(group=ENTRY_POINTS)}
    for config in configs:
        if isinstance(config.model, CustomModelConfig):
            name = config.model.module or offered.get(config.model.name)
            names |= {name: None} if name else {}
    return list(names)


def locate(module: str) -> Path | None:
    """File of a module's outermost package, found as an import would find it; nothing of it is run. None: not here."""
    top = module.partition(".")[0]
    try:
        found = importlib.util.find_spec(top) or PathFinder.find_spec(top, [str(Path.cwd())])
    except (ImportError, ValueError, AttributeError):
        return None
    return _place(found) if found else None


def _place(found: ModuleSpec) -> Path | None:
    if found.submodule_search_locations:
        return Path(next(iter(found.submodule_search_locations))).absolute()
    return Path(found.origin).resolve() if found.has_location and found.origin else None


def import_folders(modules: Sequence[str]) -> list[Path]:
    """Folders that users' modules are imported from, in the order of the search; what is installed is not theirs.

    Those on the path, those of packages that are installed as editable, that of each module, the current folder.
    """
    here = Path.cwd()
    found = [Path(entry).resolve() for entry in sys.path if entry and _is_own(Path(entry))]
    found = [folder for folder in found if folder != PACKAGE.parent]  # it is frozen by itself
    for name in [*_editable(), *modules]:
        place = locate(name)
        if place is not None and not is_installed(place):
            found.append(place.parent)
    return list(dict.fromkeys([*found, here]))


def is_installed(path: Path) -> bool:
    """Whether a path is the interpreter's, or in one of its folders of installed packages."""
    if _INSTALLED & set(path.parts):
        return True
    return any(path.is_relative_to(folder) for folder in _prefixes())


@cache
def _prefixes() -> set[str]:
    return {sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")} - {"/"}


def _is_own(folder: Path) -> bool:
    """The folder of the command itself, which Python puts on the path, holds no modules."""
    if folder.resolve() == Path(sys.argv[0]).resolve().parent != Path.cwd() or not folder.is_dir():
        return False
    return not is_installed(folder.absolute()) and folder.stat().st_uid == os.getuid()


def _editable() -> Iterator[str]:
    """Names that can be imported of distributions that pip installed as editable."""
    for distribution in distributions():
        told = distribution.read_text("direct_url.json") or ""
        if '"editable": true' in told and distribution.name != "hpc_train":
            yield from _top_level(distribution)


def _top_level(distribution: Distribution) -> list[str]:
    return (distribution.read_text("top_level.txt") or distribution.name.replace("-", "_")).split()
