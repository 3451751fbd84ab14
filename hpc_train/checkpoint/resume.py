"""What checkpoint.resume means: auto, never, a step, or a path; and loading the newest that is sound."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.api import Piece, World
from hpc_train.checkpoint.agreement import on_first
from hpc_train.checkpoint.catalogue import committed, found, locate, step_of
from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.loading import load
from hpc_train.errors import UserError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumed:
    """What was loaded."""

    directory: Path
    step: int
    extra: dict[str, Any]


def resume(directory: Path, how: str, pieces: Iterable[Piece], world: World) -> Resumed | None:
    """Load the pieces from the checkpoint that is meant; None to start from the beginning. Every rank calls it.

    directory: where this run keeps its checkpoints.
    how: `auto` (the newest that is sound), `never`, a step in `directory`, or the path of `step-<n>`, of a directory
    of checkpoints or of a run (the newest in it that is sound).

    A damaged checkpoint shows while it is loaded; then the next one is, and a warning says so. Raises UserError for a
    step or a path that is not there, or is of another model; CheckpointError if there are checkpoints but all are
    damaged, because starting over would look like a success.
    """
    if how == "never":
        return None
    wanted = list(pieces)
    where, step = on_first(world, lambda: _meant(directory, how))
    if step is not None:
        return Resumed(where, step, load(where, step, wanted, world))
    steps = on_first(world, lambda: committed(where))
    for candidate in reversed(steps):
        try:
            return Resumed(where, candidate, load(where, candidate, wanted, world))
        except CheckpointError as error:
            if world.rank == 0:
                _log.warning("%s; it is skipped", error)
    if steps:
        raise CheckpointError(
            f"every checkpoint in {where} is damaged (`hpc-train checkpoint verify` tells how);"
            " checkpoint.resume=never starts over"
        )
    return None


def _meant(directory: Path, how: str) -> tuple[Path, int | None]:
    """(directory, step), or without a step the newest there that is sound."""
    if how == "auto":
        return directory, None
    if how.isdecimal():
        locate(directory, int(how))
        return directory, int(how)
    path = Path(how).expanduser().absolute()
    step = step_of(path)
    if step is not None and path.is_dir():
        return path.parent, step
    for place in (path, path / "checkpoints"):
        if found(place):
            return place, None
    raise UserError(f"checkpoint.resume={path}: there is no checkpoint; give the path of a step-<n>, or a step")
