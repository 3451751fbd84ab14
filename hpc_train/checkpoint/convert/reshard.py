"""Rewrite a committed step in another number of shard files, a part of a tensor at a time."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_train.checkpoint.convert.rewrite import Progress, StepMetadata, cut_rows, write_step
from hpc_train.checkpoint.convert.tensor_sources import SavedStepTensors
from hpc_train.checkpoint.storage.step_directory import mark_bad, read_bad_mark
from hpc_train.checkpoint.storage.step_selection import CheckpointTarget, OpenStep
from hpc_train.errors import UserError

_RESHARDED_NAMES = re.compile(r"step-[0-9]+|\.?lock.*")
"""Names in a directory that earlier calls have written: steps, and their locks."""


@dataclass(frozen=True)
class ReshardedStep:
    """The step that was written."""

    step: int
    path: Path
    files: int
    bytes: int
    """Size of the tensors."""


def reshard_step(step: OpenStep, directory: Path, ranks: int, dim: int, progress: Progress) -> ReshardedStep:
    """Write `step` into `directory` as `ranks` files, with tensors cut along `dim`.

    Raises UserError for a directory that is not empty, CheckpointError for a damaged step.
    """
    manifest = step.manifest
    _check_output(directory, step.path.resolve().parent)
    tensors = manifest.step_layout.tensors
    total = sum(tensor.rectangle.volume * tensor.itemsize for tensor in tensors)
    metadata = StepMetadata(manifest.extra, manifest.finite, manifest.validation_loss, manifest.origin)
    with (
        SavedStepTensors(step.path, manifest, step.where) as source,
        progress(f"step {manifest.step}", total) as on_bytes,
    ):
        files = cut_rows(tensors, ranks, dim)
        path = write_step(directory, manifest.step, source, files, metadata, on_bytes)
    # Copy the mark of a bad step: a run would resume from an unmarked copy.
    with suppress(FileNotFoundError):
        mark_bad(directory, manifest.step, read_bad_mark(step.path))
    return ReshardedStep(manifest.step, path, sum(bool(rows) for rows in files), total)


def _check_output(out: Path, directory: Path) -> None:
    """Raise UserError if the copy could be taken for a run's own step, or would lie among other files.

    directory: checkpoint directory that is read, with links resolved.
    """
    place = out.resolve()
    for folder in (CheckpointTarget(directory).run, directory):
        if place == folder or folder in place.parents:
            raise UserError(f"{out}: is inside the checkpoint that is read, {folder}; choose a directory outside of it")
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file; choose a new or an empty directory")
    names = sorted(entry.name for entry in out.iterdir()) if out.is_dir() else []
    others = [name for name in names if not _RESHARDED_NAMES.fullmatch(name)]
    if others:
        raise UserError(f"{out}: holds {others[0]}; choose a new or an empty directory, or one of resharded steps")
    if names and any((place.parent / name).exists() for name in ("job.json", "config.yaml")):
        raise UserError(f"{out}: holds the checkpoints of a run; choose a new or an empty directory")
