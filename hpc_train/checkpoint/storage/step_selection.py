"""Find the checkpoints at a path that the user gives."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.format.manifest import MANIFEST_FILE, Manifest, read_manifest
from hpc_train.checkpoint.storage.step_directory import (
    WEIGHTS_FOLDER,
    find_steps,
    list_committed_steps,
    locate_step,
    parse_step,
)
from hpc_train.config.run_file import POINTS_FILE
from hpc_train.errors import SHOWN_POINTS, SweepError, UserError

_UNCOMMITTED = re.compile(r"step-([0-9]+)\.(tmp|trash)-.+")


@dataclass(frozen=True)
class CheckpointTarget:
    """A checkpoint directory, and the step in it if the path names one."""

    directory: Path
    step: int | None = None

    @property
    def run(self) -> Path:
        """The run directory that would contain these checkpoints."""
        inside = self.directory.parent if self.directory.name == WEIGHTS_FOLDER else self.directory
        return inside.parent if inside.name == "checkpoints" else inside


@dataclass(frozen=True)
class Leftover:
    """Directory of a save that died or has not finished, or of a step that was replaced or is being deleted."""

    path: Path
    step: int
    kind: str
    """tmp: not committed; trash: being deleted; old: replaced."""


@dataclass(frozen=True)
class OpenStep:
    """A committed step whose manifest is sound."""

    directory: Path
    path: Path
    manifest: Manifest

    @property
    def where(self) -> str:
        """The step, named for messages."""
        return f"checkpoint step {self.manifest.step} in {self.directory}"


def find_target(text: str) -> CheckpointTarget:
    """Find the checkpoints at a path. Raises UserError if there are none; a leftover counts as one."""
    path = Path(text).expanduser().absolute()
    if not text or not path.is_dir():
        named, what = text or "''", "is not a directory" if text and path.exists() else "no such directory"
        raise UserError(f"{named}: {what}; give that of a run, of its checkpoints or of one step")
    if named_step := find_named_step(path):
        return CheckpointTarget(*named_step)
    places = (path, path / "checkpoints")
    for place in (*places, *(parent / WEIGHTS_FOLDER for parent in places)):
        if find_steps(place) or find_leftovers(place):
            return CheckpointTarget(place)
    _refuse_sweep(text, path)
    raise UserError(
        f"{text}: there is no checkpoint in it; give the directory of a run, of its checkpoints or a step-<n>"
    )


def _refuse_sweep(text: str, path: Path) -> None:
    """Raise SweepError, naming points that have checkpoints, if the path is a sweep or the folder of its points."""
    path, text = (path.parent, str(Path(text).parent)) if path.name == "points" else (path, text)
    if not (path / POINTS_FILE).is_file() and not (path / "points").is_dir():
        return
    runs = sorted((path / "points").iterdir()) if (path / "points").is_dir() else []
    saved = (Path(text, "points", run.name) for run in runs if find_steps(run / "checkpoints"))
    if points := list(islice(saved, SHOWN_POINTS + 1)):
        raise SweepError(text, points, "a point that has a checkpoint")
    raise UserError(f"{text}: is a sweep, and no point of it has a checkpoint yet; see `hpc-train status {text}`")


def find_named_step(path: Path) -> tuple[Path, int] | None:
    """Return the checkpoint directory and the step that a path names; None if it names no committed step."""
    for candidate in (path, path.resolve()):  # a link to a step may have any name
        step = parse_step(candidate)
        if step is not None and find_steps(candidate.parent).get(step) == candidate:
            return candidate.parent, step
    return None


def find_leftovers(directory: Path) -> list[Leftover]:
    """List the leftovers of a directory, sorted by name."""
    if not directory.is_dir():
        return []
    steps = find_steps(directory)
    leftover = []
    for path in sorted(directory.iterdir()):
        match, step = _UNCOMMITTED.fullmatch(path.name), parse_step(path)
        if match:
            leftover.append(Leftover(path, int(match[1]), match[2]))
        elif step is not None and steps.get(step, path) != path and not path.is_symlink() and path.is_dir():
            leftover.append(Leftover(path, step, "old"))
    return leftover


def open_one_step(text: str) -> OpenStep:
    """Open the step that a path names, or the newest one in it. Raises UserError, or CheckpointError if damaged."""
    place = find_target(text)
    return open_step(place.directory, find_newest_step(place) if place.step is None else place.step)


def find_newest_step(place: CheckpointTarget) -> int:
    """Return the step that was committed last. Raises UserError if there is none."""
    steps = list_committed_steps(place.directory)
    if not steps:
        raise UserError(f"{place.directory}: nothing is committed in it, there are only leftovers of unfinished saves")
    return steps[-1]


def open_step(directory: Path, step: int) -> OpenStep:
    """Open a committed step. Raises UserError if it does not exist, CheckpointError if its manifest is damaged."""
    path = locate_step(directory, step)
    try:
        return OpenStep(directory, path, read_manifest(path, step))
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint step {step} in {directory} is damaged: {MANIFEST_FILE}: {error}") from error
