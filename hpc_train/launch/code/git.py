"""What git knows of a folder: its repository, its commit, and which files are the project's."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

_PATIENCE = 60.0
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
class Listed:
    """A file, or a link, of a work tree."""

    path: str
    """Relative to the root."""
    tracked: bool


def repository(folder: Path) -> Repository | None:
    """The repository that `folder` lies in; None without one, without git, or where git does not trust its owner."""
    said = _git(folder, "rev-parse", "--show-toplevel")
    if not said:
        return None
    root = Path(os.fsdecode(said.rstrip(b"\n")))
    status = _git(root, "status", "--porcelain=v2", "--branch", "-z", "--ignore-submodules=none")
    if status is None:
        return None
    words = [word for word in status.split(b"\0") if word]
    name = next((word[13:].decode() for word in words if word.startswith(b"# branch.oid ")), "(initial)")
    return Repository(root, None if name == "(initial)" else name, any(not word.startswith(b"# ") for word in words))


def files(root: Path, below: str = "") -> list[Listed]:
    """What is tracked, and what is not but is not ignored either; of submodules and repositories inside, too."""
    said = _git(root, "ls-files", "-z", "-t", "--cached", "--others", "--exclude-standard") or b""
    found: dict[str, Listed] = {}
    for word in filter(None, said.split(b"\0")):
        mark, path = word[:1], os.fsdecode(word[2:])
        inner = (root / path).is_dir() and not (root / path).is_symlink()
        if inner and (root / path / ".git").exists():
            found |= {it.path: it for it in files(root / path, f"{below}{path.rstrip('/')}/")}
        elif not inner:
            found[below + path] = Listed(below + path, mark != b"?")
    return list(found.values())


def _git(folder: Path, *words: str) -> bytes | None:
    """What git answers; None if it refuses. No hook of the repository is run and nothing is written."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder), *words],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
