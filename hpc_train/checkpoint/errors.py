"""What goes wrong with a checkpoint, always told in one line."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpc_train.errors import LostRanksError, RemoteError

_HDF5_CAUSE = re.compile(r"errno = (\d+), error message = '([^']*)'")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or is damaged: the machine's fault, not the user's. Its text is one line."""


class UnreadableError(CheckpointError):
    """The file system does not give a file that is there: it may do so later, so this is not damage."""


class RemoteCheckpointError(RemoteError, CheckpointError):
    """An error of some rank with a checkpoint, raised on all ranks; the text names the rank."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a committed checkpoint."""

    file: str
    """Name within the directory of the step."""
    what: str
    tensor: str | None = None
    offset: int | None = None
    """Byte in the file, where it is known."""

    def __str__(self) -> str:
        tensor = f"tensor {self.tensor!r}: " if self.tensor is not None else ""
        offset = f" at byte {self.offset}" if self.offset is not None else ""
        return f"{self.file}: {tensor}{self.what}{offset}"


def format_error(error: BaseException) -> str:
    """The text of an error in one line; the cause alone where HDF5 wraps an error of the operating system."""
    text = " ".join(str(error).split())
    cause = _HDF5_CAUSE.search(text)
    if cause:
        return f"[Errno {cause[1]}] {cause[2]}"
    if isinstance(error, (OSError, CheckpointError, LostRanksError)):
        return text or type(error).__name__
    return f"{type(error).__name__}: {text}"
