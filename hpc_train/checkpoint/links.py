"""A file of an earlier step as a file of this one too: one more name for the same bytes (link(2)).

The file system counts the names: whichever of the steps is removed first, the bytes go with the last of them.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.manifest import ShardFile
from hpc_train.checkpoint.shard import beside
from hpc_train.checkpoint.source import table_of

CANNOT = (errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)
"""Errors of link(2) that mean that it will never be had here; with EMLINK one file has all the names it can have."""


@dataclass(frozen=True)
class Older:
    """A shard file that this process has written, in a step that it saw committed."""

    file: ShardFile
    """As it was in that step."""
    step: int
    inode: int
    data: int
    """Bytes of tensors in it, whether they are still wanted or not."""

    def name_in(self, step: int) -> str:
        """Path within the directory of a step that has it, of its own or since then."""
        if step == self.step:
            return self.file.name
        path = PurePosixPath(self.file.name)
        return path.with_name(f"{path.stem}.step-{self.step}{path.suffix}").as_posix()

    def as_in(self, step: int) -> ShardFile:
        """What the manifest of a later step says of it."""
        return replace(self.file, name=self.name_in(step), written_at=self.step)


def written(directory: Path, file: ShardFile, step: int, data: int) -> Older:
    """A file that was just written. Raises OSError."""
    return Older(file, step, (directory / file.name).stat().st_ino, data)


def link(source: Path, target: Path, older: Older, base: int, step: int) -> None:
    """Give a file of the step `base`, whose directory is `source`, its name in `step`, whose directory is `target`.

    Its folder is there; it is not synchronised. Raises OSError, and CheckpointError for a file that is no longer the
    one that was written: then the name is not there, as far as it could be taken away.
    """
    of, to = source / older.name_in(base), target / older.name_in(step)
    try:
        os.link(of, to)
        os.link(beside(of), beside(to))
        found = to.stat()
        if (found.st_ino, found.st_size) != (older.inode, older.file.bytes):
            raise CheckpointError(f"{of} is not the file that was written there")
        table_of(target, older.as_in(step))
    except (OSError, CheckpointError):
        for name in (to, beside(to)):
            with suppress(OSError):
                name.unlink()
        raise
