"""The files of a snapshot: which files of a tree belong to it, their hash, and how they are stored.

A snapshot on disk is a read-only folder named by the hash of its contents. It appears by one rename, and only its owner
can read it. Nothing outside the tree is read.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from hpc_train.errors import UserError

CACHE_FOLDER = "__pycache__"
CODE_SUFFIXES = frozenset({".py", ".pyi", ".yaml", ".yml", ".json", ".toml", ".typed", ".sh"})
"""Files that belong to a package."""
SCRIPT_SUFFIXES = frozenset({".py", ".pyi", ".yaml", ".yml"})
"""Files that belong to a project without git."""
_EXCLUDED_NAMES = frozenset(
    {
        ".git", ".hg", ".svn", CACHE_FOLDER, ".venv", "venv", "site-packages", "node_modules", ".tox", ".nox", ".eggs",
        ".cache", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis", ".ipynb_checkpoints", "wandb",
    }
)  # fmt: skip
"""Folders that are left out wherever they are."""
_DATA_SUFFIXES = frozenset(
    {
        ".h5", ".hdf5", ".npy", ".npz", ".pt", ".pth", ".ckpt", ".safetensors", ".bin", ".pkl", ".pickle", ".onnx",
        ".parquet", ".arrow", ".csv", ".tsv", ".jsonl", ".tar", ".gz", ".xz", ".zst", ".zip", ".sif", ".sqsh",
        ".log", ".out", ".err", ".pyc", ".swp", ".mp4", ".jpg", ".png", ".wav", ".db", ".sqlite",
    }
)  # fmt: skip
"""Suffixes of files that no work tree tracks and that are no code, either."""
_EXCLUDED_MARKERS = (
    ("pyvenv.cfg",),
    ("conda-meta",),
    ("job.json", "config.yaml", "logs"),
    ("points.jsonl", "ledger.jsonl"),
)
"""Files by which a folder is known to be a virtual environment, a run or a sweep."""
MAX_FILES = 50_000
"""More than that is no project."""


@dataclass(frozen=True)
class SnapshotEntry:
    """A file or a symbolic link, with what is in it."""

    path: str
    """Relative to the tree."""
    content: bytes
    """The bytes of a file; the target of a link, relative and inside of the tree."""
    kind: str = "file"
    """file, program (executable), or link."""


def hash_entries(entries: Iterable[SnapshotEntry]) -> str:
    """Name a snapshot by its contents and their paths: the first 160 bits of a SHA-256."""
    total = hashlib.sha256()
    for entry in sorted(entries, key=lambda entry: entry.path):
        path = os.fsencode(entry.path)
        # With the lengths, so that no other division into paths and contents gives the same bytes.
        total.update(f"{entry.kind} {len(path)} {len(entry.content)} ".encode())
        total.update(path)
        total.update(entry.content)
    return total.hexdigest()[:40]


def read_entry(root: Path, path: str) -> SnapshotEntry | None:
    """Read one entry of the tree at `root`; None for what is not a file, and for links that leave the tree.

    Raises UserError for a file that cannot be read.
    """
    full = f"{root}/{path}"  # strings: there may be thousands, and a Path costs as much as a system call
    try:
        status = os.lstat(full)
        if stat.S_ISLNK(status.st_mode):
            return _read_link(root, path)
        if not stat.S_ISREG(status.st_mode):
            return None
        # Since the lstat the file may have become a link, which must not be followed, or a pipe, which would block.
        descriptor = os.open(full, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            return SnapshotEntry(path, file.read(), "program" if status.st_mode & 0o100 else "file")
    except FileNotFoundError:
        return None  # tracked, and deleted
    except OSError as error:
        raise UserError(
            f"launch.snapshot: {full}: {error.strerror}; make it readable, or name it in launch.snapshot_exclude"
        ) from None


def _read_link(root: Path, path: str) -> SnapshotEntry | None:
    """Read a link as a link, so that its target is stored once; None for one that leaves the tree."""
    top = root.resolve()
    # realpath, as Path.resolve raises for a link to itself; realpath returns the link, which does not exist.
    target, parent = Path(os.path.realpath(root / path)), (root / path).parent.resolve()
    if not target.is_relative_to(top) or not parent.is_relative_to(top) or not target.exists():
        return None
    return SnapshotEntry(path, os.fsencode(os.path.relpath(target, parent)), "link")


def read_size(root: Path, path: str) -> int:
    """Return the bytes of a file; 0 for anything else."""
    try:
        status = os.lstat(f"{root}/{path}")
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def walk_tree(root: Path, suffixes: frozenset[str] | None) -> Iterator[str]:
    """Yield files and links with one of these suffixes (None: all), in order; folders such as caches are left out."""
    seen = 0
    for folder, names, files in os.walk(root):
        folder_path = os.path.relpath(folder, root)
        links = [name for name in names if (Path(folder) / name).is_symlink()]
        names[:] = sorted(name for name in names if name not in links and not is_excluded_folder(Path(folder) / name))
        seen += len(names) + len(files)
        if seen > MAX_FILES:
            raise UserError(
                f"launch.snapshot: more than {MAX_FILES} files below {root}; run from the project's own folder, "
                "make it a git repository, or set launch.snapshot=off"
            )
        for name in sorted([*files, *links]):
            if suffixes is None or os.path.splitext(name)[1] in suffixes or name in links:  # noqa: PTH122
                yield name if folder_path == "." else f"{folder_path}/{name}"


def is_excluded_folder(folder: Path) -> bool:
    """Whether a folder is left out of snapshots: a cache, a virtual environment, a run or a sweep."""
    if folder.name in _EXCLUDED_NAMES or folder.name.startswith(".hpc_train-code"):
        return True
    return any(all((folder / name).exists() for name in names) for names in _EXCLUDED_MARKERS)


def is_data(path: str) -> bool:
    """Return whether a file is data by its ending, which a code snapshot leaves out."""
    return os.path.splitext(path)[1].lower() in _DATA_SUFFIXES  # noqa: PTH122


def make_exclusion_check(root: Path) -> Callable[[str], bool]:
    """Return a function that tells whether a path of the tree lies in an excluded folder; it checks a folder once."""
    decided: dict[str, bool] = {"": False}

    def is_excluded(folder: str) -> bool:
        if folder not in decided:
            decided[folder] = is_excluded(os.path.dirname(folder)) or is_excluded_folder(root / folder)  # noqa: PTH120
        return decided[folder]

    return lambda path: is_excluded(os.path.dirname(path))  # noqa: PTH120


def matches_pattern(path: str, patterns: Iterable[str]) -> bool:
    """Whether one of these patterns matches a path, one of its folders, or its last name."""
    parts = Path(path).parts
    names = {*parts, *("/".join(parts[: count + 1]) for count in range(len(parts)))}
    return any(fnmatchcase(name, pattern.rstrip("/")) for pattern in patterns for name in names)


def store_snapshot(path: Path, entries: Sequence[SnapshotEntry]) -> int:
    """Store these entries under `path`, whose last part is their hash, unless they are stored already.

    Returns the time of writing in nanoseconds, for discard_snapshot; 0 if nothing was written. Raises UserError if they
    cannot be stored, or if another user owns the folder.
    """
    try:
        make_store(path.parent)
        with suppress(FileNotFoundError):  # it was never there, or is just being removed
            check_private_folder(path)
            if hash_folder(path) == path.name:
                os.utime(path)  # whoever wrote it and wants to take it back sees that it is needed
                return 0
            remove_read_only(path)
        return _write_snapshot(path, entries)
    except OSError as error:
        raise explain_store_error(error, path) from None


def explain_store_error(error: OSError, path: Path) -> UserError:
    """Explain why a snapshot cannot be stored at `path`."""
    return UserError(
        f"launch.snapshot: {error.filename or path}: {error.strerror}; choose a launch.snapshot_dir that can be written"
    )


def make_store(folder: Path) -> None:
    """Make a folder for snapshots. Raises UserError if it is somebody else's."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private_folder(folder)


def _write_snapshot(path: Path, entries: Sequence[SnapshotEntry]) -> int:
    """Write a snapshot under a temporary name, and rename it: if two processes store it at the same time, one wins."""
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        _write_entries(unfinished, entries)
        written = unfinished.stat().st_mtime_ns
        unfinished.rename(path)
        return written
    except OSError:
        if path.exists() and hash_folder(path) == path.name:
            return 0
        raise
    finally:
        if unfinished.exists():
            remove_read_only(unfinished)


def _write_entries(top: Path, entries: Sequence[SnapshotEntry]) -> None:
    top.mkdir(0o700)
    holding = {os.path.dirname(entry.path) for entry in entries}  # noqa: PTH120
    folders = sorted({folder for path in holding for folder in (Path(path), *Path(path).parents)} - {Path()})
    for folder in folders:
        (top / folder).mkdir(0o700)
    for entry in entries:
        if entry.kind == "link":
            (top / entry.path).symlink_to(os.fsdecode(entry.content))
        else:
            _write_file(f"{top}/{entry.path}", entry)
    _make_cache_folders(top, entries)
    # Read-only: an editor that follows a traceback into the snapshot cannot change what other jobs run.
    for folder in reversed([Path(), *folders]):
        (top / folder).chmod(0o500)


def _write_file(path: str, entry: SnapshotEntry) -> None:
    mode = 0o500 if entry.kind == "program" else 0o400
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(entry.content)


def _make_cache_folders(top: Path, entries: Iterable[SnapshotEntry]) -> None:
    """Make the folders of compiled modules: without them every rank of every job compiles all modules again."""
    for folder in {os.path.dirname(entry.path) for entry in entries if entry.path.endswith(".py")}:  # noqa: PTH120
        (top / folder / CACHE_FOLDER).mkdir(0o700, exist_ok=True)


def hash_folder(path: Path) -> str:
    """Hash what lies in a folder now."""
    return hash_entries(_read_stored(str(path), ""))


def _read_stored(top: str, below: str) -> Iterator[SnapshotEntry]:
    with os.scandir(f"{top}/{below}") as listed:
        for item in listed:
            name = f"{below}{item.name}"
            if item.is_symlink():
                yield SnapshotEntry(name, os.fsencode(os.readlink(item.path)), "link")  # noqa: PTH115
            elif not item.is_dir(follow_symlinks=False):
                yield read_entry(Path(top), name) or SnapshotEntry(name, b"", "neither file nor link")
            elif item.name != CACHE_FOLDER:
                yield from _read_stored(top, f"{name}/")


def check_private_folder(path: Path) -> None:
    """Raise UserError unless it is a folder of this user that nobody else can write to."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise UserError(
            f"{path}: is not your own folder (owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}), and "
            "code would be run from it; choose another launch.snapshot_dir"
        )


def discard_snapshot(path: Path, written: int) -> None:
    """Remove a snapshot that was written at this time, unless another submission has asked for it since."""
    if written and path.stat().st_mtime_ns == written:
        remove_read_only(path)
        with suppress(OSError):  # others are in it
            path.parent.rmdir()


def remove_read_only(path: Path) -> None:
    """Remove a folder whose subfolders are read-only."""
    for folder, _, _ in os.walk(path):
        Path(folder).chmod(0o700)
    shutil.rmtree(path)
