"""Write a step from tensors that are read a bounded part at a time, and commit it as a save does."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpc_train.api import Piece
from hpc_train.checkpoint.catalogue import beside, found, next_sequence, step_of, step_path
from hpc_train.checkpoint.holdings import Held, Tensor, gather, held_by
from hpc_train.checkpoint.image import Image, Row, make_image
from hpc_train.checkpoint.lock import Lock, take_lock
from hpc_train.checkpoint.manifest import Manifest, ShardFile
from hpc_train.checkpoint.offline.blocks import BlockWriter
from hpc_train.checkpoint.offline.source import Tensors, blank
from hpc_train.checkpoint.origin import Origin
from hpc_train.checkpoint.rectangle import Rectangle, slabs
from hpc_train.checkpoint.saving import commit, prepare
from hpc_train.checkpoint.shard import shard_name
from hpc_train.checkpoint.storage import Place
from hpc_train.errors import UserError

PART = 32 << 20
"""Bytes that are read at a time."""
_ROWS = 100_000
"""Datasets of the files that are written at the same time; their structure is some kilobytes each."""
_FILES = 256
Tell = Callable[[int], object]


@dataclass(frozen=True)
class About:
    """What a manifest says beside tensors and files (see Manifest)."""

    extra: dict[str, Any]
    finite: bool = True
    validation_loss: float | None = None
    origin: Origin | None = None


@dataclass(frozen=True)
class _Open:
    """A file that is being written."""

    rows: list[Row]
    image: Image
    writer: BlockWriter


@dataclass(frozen=True)
class _Goal:
    """Where a rectangle of a tensor goes."""

    rectangle: Rectangle
    place: int
    writer: BlockWriter


def write_step(
    directory: Path, step: int, source: Tensors, files: Sequence[list[Row]], about: About, tell: Tell
) -> Path:
    """Commit `step` under `directory` with these rows in each file; returns where it is.

    files: of the source's tensors; all together cover each exactly once. Those without a row are not written.
    tell: is called with the bytes that were read. Memory is bounded, whatever the sizes of tensors and files.
    Raises UserError if the step is there, CheckpointError or OSError if it cannot be read or written: then nothing is.
    """
    refuse_existing(directory, step)
    lock = take_lock(directory)
    try:
        return _write_step(step_path(directory, step), source, files, about, tell, lock)
    finally:
        lock.release()


def refuse_existing(directory: Path, step: int) -> None:
    """Raise UserError if the step is there: a command never replaces one."""
    if step in found(directory):
        raise UserError(f"{directory}: it has a step {step} already; choose another directory")


def _write_step(path: Path, source: Tensors, files: Sequence[list[Row]], about: About, tell: Tell, lock: Lock) -> Path:
    token, _ = prepare(path, [sum(row.bytes for row in rows) for rows in files], Place(), lock)
    temporary = beside(path, "tmp", token)
    try:
        shards: list[tuple[ShardFile, Held]] = []
        _many_files()
        for group in _groups(files):
            shards += _write(temporary, source, group, tell)
        commit(temporary, path, _manifest(path, len(files), shards, about), lock)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return path


def _manifest(path: Path, ranks: int, shards: list[tuple[ShardFile, Held]], about: About) -> Manifest:
    step = step_of(path)
    assert step is not None, path
    holdings = gather([held for _, held in shards])
    files = tuple(file for file, _ in shards)
    told = (about.extra, about.finite, about.validation_loss, about.origin)
    return Manifest(step, next_sequence(path.parent), ranks, holdings, files, *told)


def _groups(files: Sequence[list[Row]]) -> Iterator[list[tuple[int, list[Row]]]]:
    """(index, rows) of files that are written together, in order; those without a row are left out."""
    group: list[tuple[int, list[Row]]] = []
    for index, rows in enumerate(files):
        if rows:
            group.append((index, rows))
        if len(group) == _FILES or sum(len(it) for _, it in group) > _ROWS:
            yield group
            group = []
    if group:
        yield group


def _write(
    temporary: Path, source: Tensors, group: list[tuple[int, list[Row]]], tell: Tell
) -> list[tuple[ShardFile, Held]]:
    opened: list[_Open] = []
    try:
        for index, rows in group:
            image = make_image(rows)
            opened.append(_Open(rows, image, BlockWriter(temporary, shard_name(index), image)))
        goals = _goals(opened)
        for pieces in _batches([tensor for tensor in source.tensors if tensor.name in goals], goals):
            source.fill(pieces)
            for piece in pieces:
                _share(piece, goals[piece.name])
            tell(sum(piece.local.nbytes for piece in pieces))
        held = [held_by(it.rows, it.image) for it in opened]
        return [(it.writer.close(of.seal), of) for it, of in zip(opened, held, strict=True)]
    finally:
        for it in opened:
            it.writer.abandon()


def _goals(opened: list[_Open]) -> dict[str, list[_Goal]]:
    goals: dict[str, list[_Goal]] = {}
    for it in opened:
        for row, place in zip(it.rows, it.image.places, strict=True):
            if row.bytes:
                goals.setdefault(row.name, []).append(_Goal(Rectangle(row.offset, row.local_shape), place, it.writer))
    return goals


def _batches(tensors: Sequence[Tensor], goals: dict[str, list[_Goal]]) -> Iterator[list[Piece]]:
    """Pieces of all that has a goal, about PART bytes at a time."""
    batch: list[Piece] = []
    size = 0
    for tensor in tensors:
        for slab in slabs(_around([goal.rectangle for goal in goals[tensor.name]]), PART // tensor.itemsize):
            bytes_of = slab.volume * tensor.itemsize
            if batch and size + bytes_of > PART:
                yield batch
                batch, size = [], 0
            batch.append(blank(tensor, slab))
            size += bytes_of
    if batch:
        yield batch


def _around(rectangles: Sequence[Rectangle]) -> Rectangle:
    """The smallest rectangle that has all of them."""
    begin = [min(it) for it in zip(*(r.offset for r in rectangles), strict=True)]
    ends = ([at + size for at, size in zip(r.offset, r.shape, strict=True)] for r in rectangles)
    end = [max(it) for it in zip(*ends, strict=True)]
    return Rectangle(tuple(begin), tuple(b - a for a, b in zip(begin, end, strict=True)))


def _share(piece: Piece, goals: list[_Goal]) -> None:
    """Give every file its part of a slab: a slab is contiguous there too."""
    slab = Rectangle(piece.offset, tuple(piece.local.shape))
    for goal in goals:
        common = slab.overlap(goal.rectangle)
        if common is None:
            continue
        starts = zip(common.start_in(slab), common.shape, strict=True)
        part = piece.local[tuple(slice(at, at + size) for at, size in starts)].contiguous()
        at = 0
        for start, size in zip(common.start_in(goal.rectangle), goal.rectangle.shape, strict=True):
            at = at * size + start
        data: Any = part.reshape(-1).view(torch.uint8).numpy()
        goal.writer.put(goal.place + at * piece.dtype.itemsize, memoryview(data))


def _many_files() -> None:
    """Both sides of a step may have more files than a process has by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
