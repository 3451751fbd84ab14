"""`hpc-train checkpoint reshard`: the same tensors in other files."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from hpc_train.checkpoint.commands.show import print_json, progress, size
from hpc_train.checkpoint.commands.target import Step, one_step
from hpc_train.checkpoint.offline.cutting import cut
from hpc_train.checkpoint.offline.rewriting import About, write_step
from hpc_train.checkpoint.offline.source import Saved
from hpc_train.checkpoint.poison import mark_bad, mark_of


def reshard(where: str, out: str, ranks: int, dim: int, json: bool) -> int:
    """Write the step anew under the directory `out`, and print where it is; returns 0."""
    step = one_step(where)
    manifest = step.manifest
    directory = Path(out).expanduser().absolute()
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


def _mark(step: Step, directory: Path) -> None:
    """A step that was marked bad stays so."""
    with suppress(FileNotFoundError):
        mark_bad(directory, step.manifest.step, mark_of(step.path))
