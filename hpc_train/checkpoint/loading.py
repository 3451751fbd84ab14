"""Load a step into any layout: every rank reads just what it wants of what was saved, and verifies what it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpc_train.api import Piece, World
from hpc_train.checkpoint.agreement import on_all, on_first
from hpc_train.checkpoint.catalogue import locate
from hpc_train.checkpoint.collecting import uncollected
from hpc_train.checkpoint.dtypes import dtype_name
from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.exchange import agree
from hpc_train.checkpoint.holdings import Tensor
from hpc_train.checkpoint.lone import Lone
from hpc_train.checkpoint.manifest import MANIFEST, Manifest, read
from hpc_train.checkpoint.reading import Reader
from hpc_train.checkpoint.rectangle import Rectangle, uncovered
from hpc_train.checkpoint.source import Source, table_of
from hpc_train.checkpoint.strips import Numbers, Strips, between, cut, single, sizes, strips
from hpc_train.checkpoint.targets import Targets
from hpc_train.checkpoint.transfer import in_file_order
from hpc_train.errors import UserError

__all__ = ["load", "plan_reads", "table_of", "undamaged"]


_LARGE = 1 << 40
"""Bytes of a step above which file sizes are checked before ranks share out the reads."""


def load(directory: Path, step: int, pieces: Iterable[Piece], world: World | None) -> dict[str, Any]:
    """Fill `piece.local` of every piece in place, bit for bit, from any layout it was saved in; returns `extra`.

    Every rank of `world` calls it, with its own pieces, copies (replica > 0) included; tensors of the checkpoint that
    nobody asks for are ignored. Every byte that is used is verified first. What several ranks want is read once and
    passed on (checkpoint.exchange), so all ranks together read little more than what they want of the files. No world
    means a single process.

    Raises, the same on every rank: UserError if the step is not there, or if it has no tensor of that name, shape and
    dtype; CheckpointError if it is damaged. Until then nothing is written, but after an error while the data is being
    read the content of `local` is undefined.
    """
    with uncollected():  # to the end: what a manifest of thousands of tensors is made of is gone before the next look
        return _load(directory, step, list(pieces), world)


def _load(directory: Path, step: int, wanted: Sequence[Piece], world: World | None) -> dict[str, Any]:
    path, manifest = on_first(world, lambda: _open(directory, step))
    where = f"checkpoint step {step} in {directory}"
    is_first = world is None or world.rank == 0
    plan: list[Strips] = []
    targets = Targets(wanted)
    with Source(path, manifest) as source:

        def planned() -> None:
            try:
                plan.append(plan_reads(wanted, manifest, where))
            except UserError:
                if is_first:  # the manifest may be wrong, not the one who asks for that tensor
                    undamaged(where, source.check_all)
                raise
            undamaged(where, lambda: check_reads(plan[0], source, targets))
            if is_first and world is not None and world.size > 1 and sum(source.sizes) > _LARGE:
                undamaged(where, source.check_sizes)

        on_all(world, planned, lambda _: None)
        own, shared = agree(plan[0], source.sizes, world)
        reader = Reader(source, wanted, targets)
        on_all(world, lambda: undamaged(where, lambda: reader.run(own)), lambda _: None)
        if shared is not None:
            on_all(world, lambda: undamaged(where, lambda: shared.run(source, targets)), lambda _: None)
    targets.finish()
    return manifest.extra


def _open(directory: Path, step: int) -> tuple[Path, Manifest]:
    path = locate(directory, step)
    try:
        return path, read(path, step)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint step {step} in {directory} is damaged: {MANIFEST}: {error}") from error


def check_reads(strips: Strips, source: Source, targets: Targets) -> None:
    """Raise CheckpointError unless the files have all bytes to be read, and every byte of every piece comes once."""
    source.check(strips)
    last = strips["at"] + (strips["count"] - 1) * strips["step"] + strips["run"]
    outside = (strips["at"] < 0) | (last > targets.sizes[strips["piece"]])
    coming = np.zeros(len(targets.sizes), dtype=np.int64)
    np.add.at(coming, strips["piece"], sizes(strips))
    if outside.any() or (coming != targets.sizes).any():
        raise CheckpointError("what the files hold is not what the tensors need")


def plan_reads(pieces: Sequence[Piece], manifest: Manifest, where: str) -> Strips:
    """What this rank wants, in file order."""
    plain, others = _of_lone(pieces, manifest.lone)
    rows = _of_others(pieces, others, manifest, where) if others else []
    return in_file_order(cut(np.concatenate([plain, strips(rows)])))


def _of_lone(pieces: Sequence[Piece], lone: Lone) -> tuple[Strips, list[int]]:
    """The strips of the pieces that are just what was saved and nowhere else; the others' indices."""
    found = lone.equal(pieces)
    plain = np.flatnonzero(found >= 0)
    rows = found[plain]
    whole = np.stack([lone.files[rows], lone.places[rows], lone.sizes[lone.form[rows]], plain], axis=1)
    return single(whole), np.flatnonzero(found < 0).tolist()


def _of_others(pieces: Sequence[Piece], which: Sequence[int], manifest: Manifest, where: str) -> list[Numbers]:
    tensors = {tensor.name: tensor for tensor in manifest.holdings.tensors}
    missing = [pieces[index].name for index in which if pieces[index].name not in tensors]
    if missing:
        more = f" (nor {len(missing) - 1} others)" if len(missing) > 1 else ""
        raise UserError(
            f"{where} has no tensor {missing[0]!r}{more}; it is of another model or optimizer: choose another"
        )
    return [
        row for index in which for row in _copies(index, pieces[index], tensors[pieces[index].name], manifest, where)
    ]


def _copies(index: int, piece: Piece, tensor: Tensor, manifest: Manifest, where: str) -> list[Numbers]:
    _check_kind(piece, tensor, where)
    held = Rectangle(tuple(piece.offset), tuple(piece.local.shape))
    item = piece.dtype.itemsize
    parts = manifest.holdings.touching(piece.name, held)
    if len(parts) == 1 and parts[0].rectangle == held:
        return between(parts[0].file, parts[0].place, held, index, held, held, item)
    overlaps = [(part, held.overlap(part.rectangle)) for part in parts]
    found = [(part, common) for part, common in overlaps if common]
    why = uncovered(held, [common for _, common in found])
    if why:
        raise CheckpointError(f"{where} is damaged: tensor {piece.name!r}: {why}")
    return [
        row
        for part, common in found
        for row in between(part.file, part.place, part.rectangle, index, held, common, item)
    ]


def _check_kind(piece: Piece, saved: Tensor, where: str) -> None:
    here, there = (tuple(piece.shape), dtype_name(piece.dtype)), (saved.shape, saved.dtype)
    if here != there:
        raise UserError(
            f"{where}: tensor {piece.name!r} is {there[1]} of shape {there[0]}, this run wants {here[1]} of shape"
            f" {here[0]}; choose another checkpoint or the configuration it was saved with"
        )


def undamaged(where: str, work: Callable[[], None]) -> None:
    """Do it; raises CheckpointError, which says where, for what is wrong with the files."""
    try:
        work()
    except (CheckpointError, OSError) as error:
        raise CheckpointError(f"{where} is damaged: {error}") from error
