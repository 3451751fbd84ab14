"""Which runs a snapshot was stored for, and the end of those that no run needs any more.

users.jsonl in the store has a line a submission, and is only ever appended to.
"""

from __future__ import annotations

import re
import time
import uuid
from contextlib import suppress
from pathlib import Path

from hpc_train.launch.code import store
from hpc_train.launch.sweep import ledger
from hpc_train.launch.sweep.frozen import POINTS
from hpc_train.regular_files import read_text

USERS = "users.jsonl"
_NAME = re.compile(r"[0-9a-f]{40}")
_AT_ONCE = 86400.0
"""Seconds in which a snapshot is needed whatever is seen of its run, whose directory is made later than it is."""


def use(path: Path, run: Path) -> None:
    """Write down that the run (or sweep) in this directory needs the snapshot at `path`.

    Before it is looked whether it is there: `tidy` looks for users after it has moved a snapshot away. Raises UserError
    as `store.write`.
    """
    try:
        store.make_place(path.parent)
        ledger.append(path.parent / USERS, "use", code=path.name, run=str(run))
    except OSError as error:
        raise store.refusal(error, path) from None


def leave(place: Path, run: Path) -> None:
    """Of a submission that was refused: a store that it was the first in goes with it."""
    users = place / USERS
    if {event.get("run") for event in ledger.read(users)} <= {str(run)} and {*place.glob("*")} <= {users}:
        users.unlink(missing_ok=True)
        with suppress(OSError):
            place.rmdir()


def tidy(place: Path) -> None:
    """Remove the snapshots of a store that no run needs any more; what cannot be is left for the next time.

    One that nobody has written down is left alone.
    """
    with suppress(OSError):
        for name in sorted({str(event.get("code")) for event in ledger.read(place / USERS)}):
            path = place / name
            if _NAME.fullmatch(name) and path.is_dir() and not _is_needed(path):
                _remove(path)


def _remove(path: Path) -> None:
    """Out of the way first: who asks for it now finds none and stores it again, or is found here and gets it back."""
    away = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    path.rename(away)
    if _is_needed(path):
        with suppress(OSError):  # it has been stored again
            away.rename(path)
            return
    store.remove(away)


def _is_needed(path: Path) -> bool:
    events = ledger.read(path.parent / USERS)
    mine = (event for event in reversed(events) if event.get("code") == path.name)
    return any(time.time() - float(event["time"]) < _AT_ONCE or _refers(Path(event["run"]), path) for event in mine)


def _refers(run: Path, path: Path) -> bool:
    """Whether what lies in a run directory names the snapshot. Nothing is said where its file system is not seen."""
    if not run.is_dir():
        return not run.parent.is_dir()
    if (run / POINTS).exists():
        return True
    try:
        return path.name in read_text(run / "job.json")
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True
