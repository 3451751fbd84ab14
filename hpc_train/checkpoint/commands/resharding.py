"""`hpc-train checkpoint reshard`: the same tensors in other files."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from hpc_train.checkpoint.commands.show import print_json, progress, size
from hpc_train.checkpoint.commands.target import Step, Target, one_step
from hpc_train.checkpoint.offline.cutting import cut
from hpc_train.checkpoint.offline.rewriting import About, write_step
from hpc_train.checkpoint.offline.source import Saved
from hpc_train.checkpoint.poison import mark_bad, mark_of
from hpc_train.errors import UserError

_OF_STEPS = re.compile(r"step-[0-9]+|\.?lock.*")


def reshard(where: str, out: str, ranks: int, dim: int, json: bool) -> int:
    """Write the step anew under the directory `out`, and print where it is; returns 0."""
    step = one_step(where)
    manifest = step.manifest
    directory = Path(out).expanduser().absolute()
    _refuse_output(directory, step.path.resolve().parent)
    total = sum(it.rectangle.volume * it.itemsize for it in manifest.holdings.tensors)
    about = About(manifest.extra, manifest.finite, manifest.validation_loss, manifest.origin)
    with Saved(step.path, manifest, step.where) as source, progress(f"step {manifest.step}", total, json) as tell:
        files = cut(manifest.holdings.tensors, ranks, dim)
        path = write_step(directory, manifest.step, source, files, about, tell)
    _mark(step, directory)
    count = sum(bool(rows) for rows in files)
    if json:
        print_json({"step": manifest.step, "path": str(path), "files": count, "bytes": total})
    else:
        print(f"{path}: {size(total)} in {count} files")
    return 0


def _refuse_output(out: Path, directory: Path) -> None:
    """Raise UserError if a copy would pass for one of a run's own steps, or lie among other files.

    directory: of the checkpoints that are read, with links resolved.
    """
    place = out.resolve()
    for own in (Target(directory).run, directory):
        if place == own or own in place.parents:
            raise UserError(f"{out}: is inside of what is read, {own}; choose a directory outside of it")
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file; choose a new or an empty directory")
    names = sorted(entry.name for entry in out.iterdir()) if out.is_dir() else []
    strange = [name for name in names if not _OF_STEPS.fullmatch(name)]
    if strange:
        raise UserError(f"{out}: holds {strange[0]}; choose a new or an empty directory, or one of resharded steps")
    if names and any((place.parent / name).exists() for name in ("job.json", "config.yaml")):
        raise UserError(f"{out}: holds the checkpoints of a run; choose a new or an empty directory")


def _mark(step: Step, directory: Path) -> None:
    """A step that was marked bad stays so."""
    with suppress(FileNotFoundError):
        mark_bad(directory, step.manifest.step, mark_of(step.path))
