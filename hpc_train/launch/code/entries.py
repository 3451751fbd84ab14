"""The files of a snapshot: which of a tree belong to it, and what is in them. Nothing outside of the tree is read."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from hpc_train.errors import UserError

CACHE = "__pycache__"
CODE = frozenset({".py", ".pyi", ".yaml", ".yml", ".json", ".toml", ".typed"})
"""What a package is made of."""
SCRIPTS = frozenset({".py", ".pyi", ".yaml", ".yml"})
"""What is taken of a folder without git."""
_FOLDERS = frozenset(
    {
        *(".git", ".hg", ".svn", CACHE, ".venv", "venv", "site-packages", "node_modules", ".tox", ".nox", ".eggs"),
        *(".cache", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis", ".ipynb_checkpoints", "wandb"),
    }
)
_DATA = frozenset(
    {
        *(".h5", ".hdf5", ".npy", ".npz", ".pt", ".pth", ".ckpt", ".safetensors", ".bin", ".pkl", ".pickle", ".onnx"),
        *(".parquet", ".arrow", ".csv", ".tsv", ".jsonl", ".tar", ".gz", ".xz", ".zst", ".zip", ".sif", ".sqsh"),
        *(".log", ".out", ".err", ".pyc", ".swp", ".mp4", ".jpg", ".png", ".wav", ".db", ".sqlite"),
    }
)
"""Suffixes of files that no work tree tracks and that are no code, either."""
_MARKS = (("pyvenv.cfg",), ("conda-meta",), ("job.json", "config.yaml", "logs"), ("points.jsonl", "ledger.jsonl"))
"""What a folder holds that is a virtual environment, a run or a sweep."""
MOST_FILES = 50_000
"""More than that is no project."""


@dataclass(frozen=True)
class Entry:
    """A file or a symbolic link, with what is in it."""

    path: str
    """Relative to the tree."""
    content: bytes
    """Of a link: where it points to, relative and inside of the tree."""
    kind: str = "file"
    """file, program (executable), or link."""


def digest(entries: Iterable[Entry]) -> str:
    """A name for just these contents under these paths: the first 160 bits of a SHA-256."""
    total = hashlib.sha256()
    for entry in sorted(entries, key=lambda it: it.path):
        path = os.fsencode(entry.path)
        total.update(f"{entry.kind} {len(path)} {len(entry.content)} ".encode())
        total.update(path)
        total.update(entry.content)
    return total.hexdigest()[:40]


def read(root: Path, path: str) -> Entry | None:
    """One entry of the tree at `root`; None for what is no file, and for links that leave the tree.

    Raises UserError for a file that cannot be read.
    """
    full = f"{root}/{path}"  # strings: there may be thousands, and a Path costs as much as a system call
    try:
        status = os.lstat(full)
        if stat.S_ISLNK(status.st_mode):
            return _link(root, path)
        if not stat.S_ISREG(status.st_mode):
            return None
        descriptor = os.open(full, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            return Entry(path, file.read(), "program" if status.st_mode & 0o100 else "file")
    except FileNotFoundError:
        return None  # tracked, and deleted
    except OSError as error:
        raise UserError(
            f"launch.snapshot: {full}: {error.strerror}; make it readable, or name it in launch.snapshot_exclude"
        ) from None


def _link(root: Path, path: str) -> Entry | None:
    """A link is kept as one, so that what it points to is there once; it must stay inside of the tree."""
    top = root.resolve()
    # Of a link to itself realpath gives the link, which does not exist; Path.resolve raises.
    target, parent = Path(os.path.realpath(root / path)), (root / path).parent.resolve()
    if not target.is_relative_to(top) or not parent.is_relative_to(top) or not target.exists():
        return None
    return Entry(path, os.fsencode(os.path.relpath(target, parent)), "link")


def size(root: Path, path: str) -> int:
    """Bytes of a file; 0 for anything else."""
    try:
        status = os.lstat(f"{root}/{path}")
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def walk(root: Path, suffixes: frozenset[str] | None) -> Iterator[str]:
    """Files and links with one of these suffixes (None: all), in order; folders of no project left out.

    Raises UserError for a tree that is too large for one.
    """
    seen = 0
    for folder, names, files in os.walk(root):
        here = os.path.relpath(folder, root)
        links = [name for name in names if (Path(folder) / name).is_symlink()]
        names[:] = sorted(name for name in names if name not in links and not is_no_project(Path(folder) / name))
        seen += len(names) + len(files)
        if seen > MOST_FILES:
            raise UserError(
                f"launch.snapshot: more than {MOST_FILES} files below {root}; run from the project's own folder, "
                "make it a git repository, or set launch.snapshot=off"
            )
        for name in sorted([*files, *links]):
            if suffixes is None or os.path.splitext(name)[1] in suffixes or name in links:  # noqa: PTH122
                yield name if here == "." else f"{here}/{name}"


def is_no_project(folder: Path) -> bool:
    """Whether a folder holds no code of a project: caches, virtual environments, runs."""
    if folder.name in _FOLDERS or folder.name.startswith(".hpc_train-code"):
        return True
    return any(all((folder / name).exists() for name in names) for names in _MARKS)


def is_data(path: str) -> bool:
    return os.path.splitext(path)[1].lower() in _DATA  # noqa: PTH122


def inside_of_no_project(root: Path) -> Callable[[str], bool]:
    """Whether a path lies in such a folder of the tree; every folder is looked at once."""
    known: dict[str, bool] = {"": False}

    def look(folder: str) -> bool:
        if folder not in known:
            known[folder] = look(os.path.dirname(folder)) or is_no_project(root / folder)  # noqa: PTH120
        return known[folder]

    return lambda path: look(os.path.dirname(path))  # noqa: PTH120


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Whether a path, a folder of it, or its last name is meant by one of these patterns."""
    parts = Path(path).parts
    names = {*parts, *("/".join(parts[: count + 1]) for count in range(len(parts)))}
    return any(fnmatchcase(name, pattern.rstrip("/")) for pattern in patterns for name in names)
