"""Snapshots on disk: read-only folders that appear whole, under the hash of their contents, for their owner alone."""

from __future__ import annotations

import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from hpc_train.errors import UserError
from hpc_train.launch.code.entries import CACHE, Entry, digest, read


def write(path: Path, entries: Sequence[Entry]) -> int:
    """Store these entries under `path`, whose last part is their hash; returns when it was written, 0: long ago.

    Raises UserError if it cannot be, or if somebody else owns what lies there.
    """
    try:
        make_place(path.parent)
        with suppress(FileNotFoundError):  # it was never there, or is just being removed
            check_owner(path)
            if contents(path) == path.name:
                os.utime(path)  # whoever wrote it and wants to take it back sees that it is needed
                return 0
            remove(path)
        return _write(path, entries)
    except OSError as error:
        raise refusal(error, path) from None


def refusal(error: OSError, path: Path) -> UserError:
    """Why a snapshot cannot be stored at `path`."""
    return UserError(
        f"launch.snapshot: {error.filename or path}: {error.strerror}; choose a launch.snapshot_dir that can be written"
    )


def make_place(folder: Path) -> None:
    """Make a folder for snapshots. Raises UserError if it is somebody else's."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_owner(folder)


def _write(path: Path, entries: Sequence[Entry]) -> int:
    """Beside, then renamed: of two that store the same at the same time one wins, and either is whole."""
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        _fill(beside, entries)
        written = beside.stat().st_mtime_ns
        beside.rename(path)
        return written
    except OSError:
        if path.exists() and contents(path) == path.name:
            return 0
        raise
    finally:
        if beside.exists():
            remove(beside)


def _fill(top: Path, entries: Sequence[Entry]) -> None:
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
    _make_caches(top, entries)
    for folder in reversed([Path(), *folders]):
        (top / folder).chmod(0o500)


def _write_file(path: str, entry: Entry) -> None:
    mode = 0o500 if entry.kind == "program" else 0o400
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(entry.content)


def _make_caches(top: Path, entries: Iterable[Entry]) -> None:
    """Where Python leaves what it has compiled: without them every rank of every job compiles all modules again."""
    for folder in {os.path.dirname(entry.path) for entry in entries if entry.path.endswith(".py")}:  # noqa: PTH120
        (top / folder / CACHE).mkdir(0o700, exist_ok=True)


def contents(path: Path) -> str:
    """The hash of what lies there now."""
    return digest(_stored(str(path), ""))


def _stored(top: str, below: str) -> Iterator[Entry]:
    with os.scandir(f"{top}/{below}") as listed:
        for item in listed:
            name = f"{below}{item.name}"
            if item.is_symlink():
                yield Entry(name, os.fsencode(os.readlink(item.path)), "link")  # noqa: PTH115
            elif not item.is_dir(follow_symlinks=False):
                yield read(Path(top), name) or Entry(name, b"", "neither file nor link")
            elif item.name != CACHE:
                yield from _stored(top, f"{name}/")


def check_owner(path: Path) -> None:
    """Raise UserError unless it is a folder of this user that nobody else can write to."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise UserError(
            f"{path}: is no folder of yours alone (owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}), and "
            "code would be run from it; choose another launch.snapshot_dir"
        )


def discard(path: Path, written: int) -> None:
    """Remove what `write` wrote at that time, unless another submission has asked for it since."""
    if written and path.stat().st_mtime_ns == written:
        remove(path)
        with suppress(OSError):  # others are in it
            path.parent.rmdir()


def remove(path: Path) -> None:
    """Remove a folder whose folders are read-only."""
    for folder, _, _ in os.walk(path):
        Path(folder).chmod(0o700)
    shutil.rmtree(path)
