"""Is there room for a checkpoint? Asked before anything of it is on the disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.storage.kind import FileSystem

_FILES_EACH = 2
"""A writer's: its shard, and the digests of it."""
_SMALL = 64 << 10
"""Bytes a writer's share of the manifest, of directories and of rounding up to blocks may take."""
_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"))


def check_space(system: FileSystem, directory: Path, needs: Sequence[int]) -> None:
    """Raise CheckpointError, in one line, if what all ranks are about to write does not fit.

    needs: bytes of the file of every rank, 0 where it has none. A quota shows only when it is met.
    """
    need = sum(needs) + _SMALL * len(needs)
    if need > system.free_bytes:
        raise CheckpointError(
            f"it needs {human(need)}, {directory} has {human(system.free_bytes)} free: remove old checkpoints"
            " (hpc-train checkpoint prune), keep fewer (checkpoint.keep), or set checkpoint.dir to a larger file system"
        )
    files = _FILES_EACH * len(needs) + 1
    if system.free_files is not None and files > system.free_files:
        raise CheckpointError(
            f"it needs {files} files, {directory} may have {system.free_files} more: remove old checkpoints or other"
            " files, or set checkpoint.dir to another file system"
        )


def human(size: int) -> str:
    """`1.50 GiB`; rounded, so two sizes that differ may look the same."""
    unit, name = next(((u, n) for u, n in _UNITS if size >= u), (1 << 10, "KiB"))
    return f"{size / unit:.2f} {name}"
