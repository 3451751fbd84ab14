"""What checkpoint.resume means: auto, never, a step, or a path; and loading the newest that is sound."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.api import Piece, World
from hpc_train.checkpoint.agreement import on_first
from hpc_train.checkpoint.catalogue import found, locate, readable, step_of
from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.loading import load
from hpc_train.checkpoint.manifest import MANIFEST, read
from hpc_train.checkpoint.origin import Origin
from hpc_train.checkpoint.poison import poison_of
from hpc_train.checkpoint.weights import holds_weights_only, weights_of
from hpc_train.errors import UserError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumed:
    """What was loaded."""

    directory: Path
    step: int
    extra: dict[str, Any]
    weights_only: bool = False
    """Optimizer and position are as they were: training begins anew, from these weights."""
    origin: Origin | None = None
    """What made it, where that is known."""


def resume(directory: Path, how: str, pieces: Iterable[Piece], world: World | None) -> Resumed | None:
    """Load the pieces from the checkpoint that is meant; None to start from the beginning. Every rank calls it.

    directory: where this run keeps its checkpoints.
    how: `auto` (the newest that is sound), `never`, a step in `directory`, or the path of `step-<n>`, of a directory
    of checkpoints or of a run (the newest in it that is sound). Of a step that has weights only, these are loaded.

    A damaged checkpoint shows while it is loaded; then the next one is, and a warning says so. One with NaN in it, or
    marked bad, is passed over too, unless its step is given. Raises UserError for a step or a path that is not there,
    or is of another model; CheckpointError if there are checkpoints but all are damaged or no good, because starting
    over would look like a success, or if the directory cannot be read.
    """
    if how == "never":
        return None
    wanted = list(pieces)
    where, step = on_first(world, lambda: _meant(directory, how))
    if step is not None:
        return _loaded(where, step, wanted, world)
    steps = on_first(world, lambda: _candidates(where))
    for candidate, poison in steps:
        try:
            if poison is not None:
                raise CheckpointError(f"checkpoint step {candidate} in {where} {poison}")
            return _loaded(where, candidate, wanted, world)
        except CheckpointError as error:
            if world is None or world.rank == 0:
                _log.warning("%s; it is skipped", error)
    if steps:
        raise CheckpointError(
            f"every checkpoint in {where} is damaged{_or_bad(steps)} (`hpc-train checkpoint verify` tells how);"
            " checkpoint.resume=never starts over"
        )
    return None


def _loaded(directory: Path, step: int, wanted: list[Piece], world: World | None) -> Resumed:
    weights_only, origin = on_first(world, lambda: _about(directory, step))
    extra = load(directory, step, weights_of(wanted) if weights_only else wanted, world)
    return Resumed(directory, step, extra, weights_only, origin)


def _about(directory: Path, step: int) -> tuple[bool, Origin | None]:
    """(whether it has weights only, what made it); of a damaged manifest nothing, as loading will say."""
    manifest = readable(locate(directory, step), step)
    return (False, None) if manifest is None else (holds_weights_only(manifest.extra), manifest.origin)


def _candidates(directory: Path) -> list[tuple[int, str | None]]:
    """(step, why it is not to be gone on from): those that cannot be ordered first, then the newest first.

    Each manifest is read once: one that can be read only at the second look must not pass for the newest.
    """
    whole: list[tuple[int, int, str | None]] = []
    strange: list[tuple[int, str | None]] = []
    for step, path in found(directory).items():
        try:
            manifest = read(path, step)
            whole.append((manifest.sequence, step, poison_of(path, manifest)))
        except CheckpointError as error:
            strange.append((step, f"is damaged: {MANIFEST}: {error}"))
        except OSError as error:
            strange.append((step, f"cannot be read: {error.strerror}"))
    return sorted(strange, reverse=True) + [(step, poison) for _, step, poison in sorted(whole, reverse=True)]


def _or_bad(steps: list[tuple[int, str | None]]) -> str:
    return " or no good, as the warnings say" if any(poison for _, poison in steps) else ""


def _meant(directory: Path, how: str) -> tuple[Path, int | None]:
    """(directory, step), or without a step the newest there that is sound."""
    if how == "auto":
        return directory, None
    if how.isdecimal():
        locate(directory, int(how))
        return directory, int(how)
    path = Path(how).expanduser().absolute()
    for it in (path, path.resolve()):  # follow a link that the user names
        step = step_of(it)
        if step is not None and found(it.parent).get(step) == it:
            return it.parent, step
    for place in (path, path / "checkpoints"):
        if found(place):
            return place, None
    raise UserError(f"checkpoint.resume={path}: there is no checkpoint; give the path of a step-<n>, or a step")
