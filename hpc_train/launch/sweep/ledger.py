"""ledger.jsonl: what was done with a sweep, a line an event, only ever appended to.

Events: sweep (overrides, swept keys), submit (one array: job id, the elements' points), local (points run by this
machine's pool, and the process that runs them), resume (mode), cancel (jobs of points that waited).
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.regular_files import TEXT, read_regular

Event = dict[str, Any]


def append(path: Path, kind: str, **fields: Any) -> None:
    """Add one event; it is on the disk when this returns. A line that a crash has torn off before it stays alone."""
    line = json.dumps({"event": kind, "time": time.time(), **fields}) + "\n"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, (("\n" if torn else "") + line).encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path) -> list[Event]:
    """All whole lines, in order."""
    found = []
    for line in read_regular(path, TEXT, follow=True).split(b"\n") if path.exists() else ():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and {"event", "time"} <= event.keys():
            found.append(event)
    return found


@dataclass(frozen=True)
class Placed:
    """Where a point was last sent to."""

    time: float
    job: str | None = None
    """`12_3`; None: this machine's pool."""
    packed: bool = False
    """Whether its job has, or had, room for other points."""
    process: int = 0
    started: str = ""
    machine: str = ""
    """Of the pool: see state.attempts.Begun."""


def placements(events: list[Event]) -> dict[str, Placed]:
    """Point -> where it was last sent to."""
    found: dict[str, Placed] = {}
    for event in events:
        if event["event"] == "submit":
            for index, points in enumerate(event["elements"]):
                job = f"{event['job_id']}_{index}"
                found |= dict.fromkeys(points, Placed(event["time"], job, bool(event.get("packed"))))
        elif event["event"] == "local":
            pool = Placed(event["time"], None, False, event["process"], event["started"], event["machine"])
            found |= dict.fromkeys(event["points"], pool)
    return found


def left(events: list[Event]) -> set[str]:
    """The arrays of which a point was sent elsewhere since."""
    placed = placements(events)
    return {
        event["job_id"]
        for event in events
        if event["event"] == "submit"
        for index, points in enumerate(event["elements"])
        if any(placed[point].job != f"{event['job_id']}_{index}" for point in points)
    }


def cancellations(events: list[Event]) -> dict[str, list[tuple[str, float]]]:
    """Point -> (job, time) of each cancellation that was asked for while it waited."""
    found: dict[str, list[tuple[str, float]]] = {}
    for event in events:
        if event["event"] == "cancel":
            for point, job in event["points"].items():
                found.setdefault(point, []).append((job, event["time"]))
    return found
