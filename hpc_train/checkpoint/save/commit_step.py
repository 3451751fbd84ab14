"""Prepare the temporary directory of a step on rank 0, and commit it by one rename when every file is on the disk."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from hpc_train.checkpoint.format.hdf5_index import INDEX_FILE
from hpc_train.checkpoint.format.manifest import MANIFEST_FILE, Manifest
from hpc_train.checkpoint.save.layout_cache import LayoutCache
from hpc_train.checkpoint.storage.checkpoint_directory import CheckpointDirectory
from hpc_train.checkpoint.storage.file_system import (
    WritePolicy,
    checksum_bytes,
    make_directory,
    run_concurrently,
    write_durable_file,
)
from hpc_train.checkpoint.storage.lock import Lock
from hpc_train.checkpoint.storage.retention import discard_step, make_token, sweep_leftovers
from hpc_train.checkpoint.storage.step_directory import SHARDS_FOLDER, list_shard_folders, uncommitted_path
from hpc_train.regular_files import sync_directory


def prepare_directory(
    path: Path, needs: list[int], storage: CheckpointDirectory, lock: Lock | None = None
) -> tuple[str, WritePolicy]:
    """Make the temporary directory of a step and its folders on rank 0; returns (token in its name, write policy).

    needs: bytes of every file. Raises CheckpointError, and makes nothing, if there is no room for them.
    """
    directory, token = path.parent, make_token()
    make_directory(directory)
    if lock is not None:
        lock.check()
    # Before the check of free space: what a dead save left behind may be what fills the disk.
    sweep_leftovers(directory, sole=lock is not None)
    system = storage.check_space(directory, needs)
    temporary = uncommitted_path(path, "tmp", token)
    try:
        policy = storage.make_step(temporary, temporary / SHARDS_FOLDER, system, needs)
        for folder in list_shard_folders(len(needs)):
            (temporary / folder).mkdir(mode=0o700)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return token, policy


def commit_step(
    temporary: Path, path: Path, manifest: Manifest, lock: Lock | None = None, cache: LayoutCache | None = None
) -> int:
    """Commit a step on rank 0, when every shard file is on the disk. Returns the bytes of all shard files."""
    cache = cache or LayoutCache()
    index = cache.encode_index(manifest)
    text = cache.encode_manifest(replace(manifest, index=checksum_bytes(index)))
    writes = [
        partial(write_durable_file, temporary / name, data)
        for name, data in ((MANIFEST_FILE, text), (INDEX_FILE, index))
    ]
    # Everything inside the directory must be on the disk before its name says that the step is committed: first files
    # and their folders, then the directory itself, and only then the rename. Its parent is synchronised last, so that
    # the new name survives a power failure.
    folders = sorted({temporary / SHARDS_FOLDER, *((temporary / file.name).parent for file in manifest.files)})
    run_concurrently(writes + [partial(sync_directory, folder) for folder in folders])
    sync_directory(temporary)
    if lock is not None:
        lock.check()  # as late as possible: a new owner of the lock may have committed this very step
    # An existing step is renamed first and removed only after the commit: rename cannot replace a directory with files.
    # lexists, so that a dangling link is moved away, too.
    replaced = uncommitted_path(path, "old", make_token()) if os.path.lexists(path) else None
    inode = _read_inode(temporary)
    try:
        if replaced:
            path.rename(replaced)
        temporary.rename(path)
        sync_directory(path.parent)
    except OSError:
        _undo_renames(temporary, path, replaced, inode)
        raise
    if replaced:
        discard_step(replaced)
    return manifest.size


def _read_inode(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _undo_renames(temporary: Path, path: Path, replaced: Path | None, inode: tuple[int, int]) -> None:
    """Rename everything back, so that an error means that nothing was committed.

    inode: of the directory that was to be committed. A directory of that name with another inode was committed by a new
    owner of the lock, and stays.
    """
    with suppress(OSError):
        if path.exists() and not temporary.exists() and _read_inode(path) == inode:
            path.rename(temporary)
        if replaced and replaced.exists():
            replaced.rename(path)
