"""points.jsonl: what each point of a sweep runs, a frozen job spec a line; written once, at submission."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_train.errors import UserError
from hpc_train.launch.spec import JobSpec, own_text, parse_spec

POINTS = "points.jsonl"


@dataclass(frozen=True)
class FrozenPoint:
    """One point."""

    id: str
    overrides: tuple[str, ...]
    """Those in which the points differ."""
    spec: JobSpec
    files: dict[str, str] = field(default_factory=dict)
    """Name -> text of what lies beside job.json: the plan, the schedule."""

    def line(self) -> str:
        return json.dumps({**vars(self), "spec": vars(self.spec)}) + "\n"


@dataclass(frozen=True)
class SweepFolder:
    """Paths of one sweep."""

    path: Path

    @property
    def points(self) -> Path:
        return self.path / POINTS

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def logs(self) -> Path:
        """What the batch scripts print, a file an element."""
        return self.path / "logs"

    @property
    def scripts(self) -> Path:
        """The batch scripts that were submitted."""
        return self.path / ".submitit"

    @property
    def runs(self) -> Path:
        return self.path / "points"

    def run(self, point: str) -> Path:
        """Run directory of a point, made when it begins."""
        return self.runs / point


def sweep_of(path: Path) -> SweepFolder | None:
    """The sweep whose directory this is, or whose point's run directory; None if it is neither."""
    for folder in (path, *([path.parent.parent] if path.parent.name == "points" else [])):
        if (folder / POINTS).is_file():
            return SweepFolder(folder)
    return None


def write_points(path: Path, points: Iterable[FrozenPoint]) -> None:
    """Readable and writable by its owner alone, and on the disk when this returns."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.writelines(point.line() for point in points)
        file.flush()
        os.fsync(file.fileno())


def read_points(folder: SweepFolder) -> list[FrozenPoint]:
    """All points in their order. Raises UserError as `read_spec` does."""
    return [_point(line, folder) for line in own_text(folder.points).splitlines()]


def read_some(folder: SweepFolder, ids: Sequence[str]) -> list[FrozenPoint]:
    """These points only, which is quicker; in the order of `ids`. Raises UserError if one is missing."""
    found = {point.id: point for point in _matching(folder, ids)}
    if missing := [it for it in ids if it not in found]:
        raise UserError(f"{folder.points}: has no point {missing[0]}")
    return [found[it] for it in ids]


def point_ids(folder: SweepFolder) -> list[str]:
    """The ids of all points in their order."""
    return [str(_record(line, folder)["id"]) for line in own_text(folder.points).splitlines()]


def _matching(folder: SweepFolder, ids: Sequence[str]) -> Iterator[FrozenPoint]:
    starts = tuple(f'{{"id": {json.dumps(it)},' for it in ids)
    for line in own_text(folder.points).splitlines():
        if line.startswith(starts):
            yield _point(line, folder)


def _point(line: str, folder: SweepFolder) -> FrozenPoint:
    values = _record(line, folder)
    try:
        spec = parse_spec(json.dumps(values["spec"]), folder.points)
        return FrozenPoint(values["id"], tuple(values["overrides"]), spec, dict(values["files"]))
    except (KeyError, TypeError, ValueError):
        raise _damaged(folder) from None


def _record(line: str, folder: SweepFolder) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(line)
        values["id"]
    except (ValueError, TypeError, KeyError):
        raise _damaged(folder) from None
    return values


def _damaged(folder: SweepFolder) -> UserError:
    return UserError(f"{folder.points}: is damaged; submit the sweep again")
