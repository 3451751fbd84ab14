"""Which rank failed first, and with what: one small file a failing rank, read by whoever has to tell a person."""

from __future__ import annotations

import json
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hpc_train.errors import IncompleteRun, UserError
from hpc_train.regular_files import read_json
from hpc_train.user_frames import LOST_PEER, describe, every_frame, place, root_cause, user_frames


@dataclass(frozen=True)
class Failure:
    """What ended one rank."""

    task: int
    host: str
    at: float
    """time.time()."""
    user_error: bool
    message: str
    traceback: str
    summary: list[str] = field(default_factory=list)
    """One line with the exception, then the lines of the user's own files that led to it, innermost first."""

    @property
    def lost_peer(self) -> bool:
        """Whether this rank only noticed that another one was gone."""
        return LOST_PEER.search(self.message) is not None

    def text(self) -> str:
        """For a person: one line for a mistake of the user, else the rank and its traceback."""
        return self.message if self.user_error else f"task {self.task} on {self.host} failed first:\n{self.traceback}"


_FRAMES = 6
"""Maximum number of frames shown."""


def summarise(error: BaseException) -> list[str]:
    """Summarise an exception; see Failure.summary. If no frame is the user's, the last frames are shown."""
    frames = user_frames(error) or every_frame(error)
    lines = [f"{place(frame)}: {frame.line}" if frame.line else place(frame) for frame in frames[:_FRAMES]]
    return [describe(root_cause(error)), *lines]


def record_failure(folder: Path, task: int, host: str, error: BaseException) -> Failure:
    """Write what ended this rank into the attempt's log directory; returns it."""
    failure = Failure(
        task=task,
        host=host,
        at=time.time(),
        user_error=isinstance(error, (UserError, IncompleteRun)),
        message=str(error) or type(error).__name__,
        traceback="".join(traceback.format_exception(error)),
        summary=summarise(error),
    )
    (folder / f"task-{task}.failure.json").write_text(json.dumps(asdict(failure)))
    return failure


def first_failure(folder: Path) -> Failure | None:
    """The earliest failure recorded in an attempt's log directory.

    A rank that is lost makes the others fail a moment later, so the time decides.
    """
    found = []
    for path in folder.glob("task-*.failure.json"):
        try:
            found.append(Failure(**read_json(path)))
        except ValueError:  # a rank that was killed while it wrote
            continue
    return min(found, key=lambda failure: failure.at, default=None)
