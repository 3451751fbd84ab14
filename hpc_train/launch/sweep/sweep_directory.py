"""The files of a sweep directory: points.jsonl and ledger.jsonl.

points.jsonl says what each point runs, a frozen job spec per line, written once at submission. ledger.jsonl says
what was done with the sweep and is only ever appended to. Its events: sweep (overrides, swept keys), submit (one
array: job id, the points of each element), local (points run by this machine's pool, and the process that runs
them), resume (mode), cancel (jobs of points that waited).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_train.config.run_file import POINTS_FILE
from hpc_train.errors import UserError
from hpc_train.launch.job_spec import JobSpec, parse_spec, read_own_file
from hpc_train.regular_files import MAX_TEXT_BYTES, append_line, parse_json_object, read_regular


@dataclass(frozen=True)
class FrozenPoint:
    """One point."""

    id: str
    overrides: tuple[str, ...]
    """The overrides in which points differ."""
    spec: JobSpec
    files: dict[str, str] = field(default_factory=dict)
    """Name -> text of the files beside job.json: the plan, the schedule."""

    def line(self) -> str:
        return json.dumps({**vars(self), "spec": vars(self.spec)}) + "\n"


@dataclass(frozen=True)
class SweepDirectory:
    """Paths of one sweep."""

    path: Path

    @property
    def points(self) -> Path:
        return self.path / POINTS_FILE

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def logs(self) -> Path:
        """Folder of what the batch scripts print, a file for each element."""
        return self.path / "logs"

    @property
    def scripts(self) -> Path:
        """Folder of the batch scripts that were submitted."""
        return self.path / ".submitit"

    @property
    def runs(self) -> Path:
        return self.path / "points"

    def run(self, point: str) -> Path:
        """Run directory of a point, made when it begins."""
        return self.runs / point


def find_sweep(path: Path) -> SweepDirectory | None:
    """Return the sweep with this directory, or with a point in it; None if it is neither."""
    for folder in (path, *([path.parent.parent] if path.parent.name == "points" else [])):
        if (folder / POINTS_FILE).is_file():
            return SweepDirectory(folder)
    return None


def write_points(path: Path, points: Iterable[FrozenPoint]) -> None:
    """Write points.jsonl, for its owner alone; returns when it is on the disk: next, jobs are sent that read it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.writelines(point.line() for point in points)
        file.flush()
        os.fsync(file.fileno())


def read_points(folder: SweepDirectory) -> list[FrozenPoint]:
    """Read all points in their order. Raises UserError as read_spec does."""
    return [_parse_point(line, folder) for line in read_own_file(folder.points).splitlines()]


def read_chosen_points(folder: SweepDirectory, ids: Sequence[str]) -> list[FrozenPoint]:
    """Read only these points, in the order of `ids`; quicker than read_points. Raises UserError if one is missing."""
    points = {point.id: point for point in _select_matching_lines(folder, ids)}
    if missing := [name for name in ids if name not in points]:
        raise UserError(f"{folder.points}: has no point {missing[0]}")
    return [points[name] for name in ids]


def list_point_ids(folder: SweepDirectory) -> list[str]:
    """Return the ids of all points in their order."""
    return [str(_parse_record(line, folder)["id"]) for line in read_own_file(folder.points).splitlines()]


def _select_matching_lines(folder: SweepDirectory, ids: Sequence[str]) -> Iterator[FrozenPoint]:
    # Points are long lines of JSON, and an element of a large sweep needs one of them: the id comes first, so text
    # comparison finds the line without parsing the others.
    starts = tuple(f'{{"id": {json.dumps(name)},' for name in ids)
    for line in read_own_file(folder.points).splitlines():
        if line.startswith(starts):
            yield _parse_point(line, folder)


def _parse_point(line: str, folder: SweepDirectory) -> FrozenPoint:
    values = _parse_record(line, folder)
    try:
        spec = parse_spec(json.dumps(values["spec"]), folder.points)
        return FrozenPoint(values["id"], tuple(values["overrides"]), spec, dict(values["files"]))
    except (KeyError, TypeError, ValueError):
        raise _make_damaged_error(folder) from None


def _parse_record(line: str, folder: SweepDirectory) -> dict[str, Any]:
    values = parse_json_object(line)
    # parse_json_object returns {} for a line that is no object, such as one that was cut short.
    if "id" not in values:
        raise _make_damaged_error(folder)
    return values


def _make_damaged_error(folder: SweepDirectory) -> UserError:
    return UserError(f"{folder.points}: is damaged; submit the sweep again")


LedgerEvent = dict[str, Any]


def append_ledger_event(path: Path, kind: str, **fields: Any) -> None:
    """Append one event to a ledger and sync it to the disk. Raises OSError."""
    append_line(path, json.dumps({"event": kind, "time": time.time(), **fields}), sync=True)


def read_ledger(path: Path) -> list[LedgerEvent]:
    """Read all whole lines of a ledger, in order."""
    events = []
    for line in read_regular(path, MAX_TEXT_BYTES, follow=True).split(b"\n") if path.exists() else ():
        event = parse_json_object(line)
        if {"event", "time"} <= event.keys():
            events.append(event)
    return events


@dataclass(frozen=True)
class PointPlacement:
    """The job, or the process here, to which a point was last sent."""

    time: float
    job: str | None = None
    """`12_3`; None: this machine's pool."""
    packed: bool = False
    """Whether its job has, or had, room for other points."""
    process: int = 0
    started: str = ""
    machine: str = ""
    """With `process` and `started`, identifies the process that runs the sweep; see state.attempts.AttemptStart."""


def find_latest_placements(events: list[LedgerEvent]) -> dict[str, PointPlacement]:
    """Return the job to which each point was last sent."""
    placements: dict[str, PointPlacement] = {}
    for event in events:
        if event["event"] == "submit":
            for index, points in enumerate(event["elements"]):
                job = f"{event['job_id']}_{index}"
                placements |= dict.fromkeys(points, PointPlacement(event["time"], job, bool(event.get("packed"))))
        elif event["event"] == "local":
            pool = PointPlacement(event["time"], None, False, event["process"], event["started"], event["machine"])
            placements |= dict.fromkeys(event["points"], pool)
    return placements


def list_superseded_arrays(events: list[LedgerEvent]) -> set[str]:
    """Return the arrays of which a point has been sent elsewhere since."""
    placed = find_latest_placements(events)
    return {
        event["job_id"]
        for event in events
        if event["event"] == "submit"
        for index, points in enumerate(event["elements"])
        if any(placed[point].job != f"{event['job_id']}_{index}" for point in points)
    }


def find_cancellations(events: list[LedgerEvent]) -> dict[str, list[tuple[str, float]]]:
    """Return, for each point, the job and the time of every cancellation that was asked for while it waited."""
    cancellations: dict[str, list[tuple[str, float]]] = {}
    for event in events:
        if event["event"] == "cancel":
            for point, job in event["points"].items():
                cancellations.setdefault(point, []).append((job, event["time"]))
    return cancellations
