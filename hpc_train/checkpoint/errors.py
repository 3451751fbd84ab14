"""The errors of checkpoints, and the problems that a check finds; the text of each is one line."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpc_train.errors import LostRanksError, RemoteError

_HDF5_CAUSE = re.compile(r"errno = (\d+), error message = '([^']*)'")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or is damaged: the machine's fault, not the user's. Its text is one line."""


class UnreadableError(CheckpointError):
    """A file exists but cannot be read just now. It may be readable later, so this is not damage."""


class RemoteCheckpointError(RemoteError, CheckpointError):
    """A checkpoint error of one rank, raised on all ranks; the text names the rank."""


@dataclass(frozen=True)
class Problem:
    """One defect of a committed checkpoint."""

    file: str
    """Path within the directory of the step."""
    what: str
    tensor: str | None = None
    offset: int | None = None
    """Byte of the file; None if not known."""

    def __str__(self) -> str:
        tensor = f"tensor {self.tensor!r}: " if self.tensor is not None else ""
        offset = f" at byte {self.offset}" if self.offset is not None else ""
        return f"{self.file}: {tensor}{self.what}{offset}"


def format_error(error: BaseException) -> str:
    """Format an error as one line; if HDF5 wraps an error of the operating system, only that one."""
    text = " ".join(str(error).split())
    cause = _HDF5_CAUSE.search(text)
    if cause:
        return f"[Errno {cause[1]}] {cause[2]}"
    if isinstance(error, (OSError, CheckpointError, LostRanksError)):
        return text or type(error).__name__
    return f"{type(error).__name__}: {text}"
