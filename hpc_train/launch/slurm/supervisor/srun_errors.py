"""Read srun's messages about failed tasks, and decide when the other tasks are to be ended."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hpc_train.errors import EXIT_NO_REQUEUE, EXIT_REQUEUE
from hpc_train.launch.recovery.failures import list_exit_codes

_ERROR_BYTES = 1 << 20
"""How much of srun's messages is read at a time."""
_PEER_SECONDS = 2.0
"""How long ranks have to end by themselves after one of them has failed, and to write down what they saw of that."""
_AGREED_SECONDS = 30.0
"""How long ranks have to end by themselves after an exit code that all agree on, when they stop on purpose."""


@dataclass
class SrunErrors:
    """Reads, as they come, the messages of an srun about its tasks that have failed."""

    path: Path
    """File that its standard error goes to."""
    _position: int = 0
    _file: BinaryIO | None = None
    """The open file. It stays open, because srun keeps writing to it even if somebody removes its name."""

    def read_exit_codes(self) -> list[int]:
        """Return the exit codes of the tasks that were reported since the last call; see list_exit_codes."""
        with suppress(OSError):
            self._file = self._file or self.path.open("rb", buffering=0)
            self._file.seek(self._position)
            text, newline, _ = self._file.read(_ERROR_BYTES).rpartition(b"\n")
            self._position += len(text + newline)
            return list_exit_codes((text + newline).decode(errors="replace"))
        return []

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


@dataclass
class PeerFailures:
    """Decides when ranks are to be ended because one of them has failed."""

    errors: SrunErrors
    """The messages of the ranks' srun."""
    _due: float = float("inf")
    killed: float | None = None
    """When the others were killed."""

    def are_due(self) -> bool:
        """Return whether a rank has failed, and the others had enough time to end by themselves."""
        for code in self.errors.read_exit_codes():
            seconds = _AGREED_SECONDS if code in (EXIT_REQUEUE, EXIT_NO_REQUEUE) else _PEER_SECONDS
            self._due = min(self._due, time.monotonic() + seconds)
        return time.monotonic() >= self._due
