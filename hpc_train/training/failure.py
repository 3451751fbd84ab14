"""Which rank failed first, and with what: one small file a failing rank, read by whoever has to tell a person."""

from __future__ import annotations

import json
import re
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_train.errors import UserError
from hpc_train.regular_files import read_json

_LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|broken pipe|remote process exited|socket ?timeout|failed to recv|timed out",
    re.IGNORECASE,
)


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

    @property
    def lost_peer(self) -> bool:
        """Whether this rank only noticed that another one was gone."""
        return _LOST_PEER.search(self.message) is not None

    def text(self) -> str:
        """For a person: one line for a mistake of the user, else the rank and its traceback."""
        return self.message if self.user_error else f"task {self.task} on {self.host} failed first:\n{self.traceback}"


def record_failure(folder: Path, task: int, host: str, error: BaseException) -> Failure:
    """Write what ended this rank into the attempt's log directory; returns it."""
    failure = Failure(
        task=task,
        host=host,
        at=time.time(),
        user_error=isinstance(error, UserError),
        message=str(error) or type(error).__name__,
        traceback="".join(traceback.format_exception(error)),
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
