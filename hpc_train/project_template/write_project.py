"""Write the small project of `hpc-train new`: what `project_template/` holds, under the user's name.

The folder is written under a temporary name and then renamed, so that it is there as a whole or not at all.
"""

from __future__ import annotations

import keyword
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from hpc_train.errors import UserError

_PLACEHOLDER = "my_project"
"""Name in the template's files that is replaced by the user's."""


@dataclass(frozen=True)
class NewProject:
    """A project that was written."""

    folder: Path
    files: list[Path]
    override: str
    """Options of `hpc-train train` that choose its settings."""


def write_project(folder: str) -> NewProject:
    """Write the project. Raises UserError if the folder exists, or if its name cannot be a Python package."""
    target = Path(folder).expanduser()
    name = target.name.replace("-", "_")
    _check_name(folder, name)
    if target.exists() or target.is_symlink():
        raise UserError(f"{folder}: is there already; give another name, or move it away")
    if not target.parent.is_dir():
        raise UserError(f"{folder}: there is no folder {target.parent}; make it first")
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
    except OSError as error:
        raise UserError(f"{folder}: cannot be made ({error.strerror}); choose a folder that can be written") from error
    try:
        for path, text in _list_template():
            file = temporary / path.replace(_PLACEHOLDER, name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.replace(_PLACEHOLDER, name), encoding="utf-8")
        # mkdtemp makes a private folder; the project gets the permissions of any new folder.
        temporary.chmod(0o777 & ~_get_umask())
        temporary.rename(target)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    written = sorted(path for path in target.rglob("*") if path.is_file())
    return NewProject(target, written, f"--config-dir conf experiment={name}")


def _check_name(folder: str, name: str) -> None:
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,59}", name) or keyword.iskeyword(name):
        raise UserError(
            f"{folder or repr(folder)}: cannot be the name of a Python package; use letters, digits and _, such as "
            "my_model"
        )
    taken = name in sys.stdlib_module_names or name in ("hpc_train", "torch", "conf", "test", "tests")
    if taken or name in packages_distributions():
        raise UserError(f"{folder}: Python, an installed package or this project has that name; choose another one")


def _get_umask() -> int:
    """Return the umask of this process, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _list_template(folder: Traversable | None = None, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield path and text of each file; a template's name ends in .txt, so that no tool takes it for code of ours."""
    for entry in (folder or files("hpc_train.project_template")).iterdir():
        if entry.is_dir() and entry.name != "__pycache__":
            yield from _list_template(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".txt"):
            yield f"{prefix}{entry.name.removesuffix('.txt')}", entry.read_text(encoding="utf-8")
