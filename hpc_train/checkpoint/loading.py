"""Load a step into any layout: every rank reads just the overlaps of what it wants with what was saved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.api import Piece, World
from hpc_train.checkpoint.agreement import on_all, on_first
from hpc_train.checkpoint.catalogue import locate
from hpc_train.checkpoint.dtypes import dtype_name
from hpc_train.checkpoint.errors import CheckpointError, Problem
from hpc_train.checkpoint.manifest import MANIFEST, Entry, Manifest, by_name, read
from hpc_train.checkpoint.rectangle import Rectangle, uncovered
from hpc_train.checkpoint.shard import read_into, reading
from hpc_train.checkpoint.verification import file_problems
from hpc_train.errors import UserError


@dataclass(frozen=True)
class _Copy:
    """Part of a saved rectangle that belongs into one piece; `part` counts from the logical tensor's beginning."""

    entry: Entry
    piece: Piece
    part: Rectangle


def load(directory: Path, step: int, pieces: Iterable[Piece], world: World) -> dict[str, Any]:
    """Fill `piece.local` of every piece in place, bit for bit, from any layout it was saved in; returns `extra`.

    Every rank of `world` calls it, with its own pieces, copies (replica > 0) included; tensors of the checkpoint that
    nobody asks for are ignored. Checksums of the files that are read are verified first, each file by one rank.

    Raises, the same on every rank: UserError if the step is not there, or if it has no tensor of that name, shape and
    dtype; CheckpointError if it is damaged. Until then nothing is written, but after an error while the data is being
    read the content of `local` is undefined.
    """
    wanted = list(pieces)
    path, manifest = on_first(world, lambda: _open(directory, step))
    where = f"checkpoint step {step} in {directory}"
    copies: list[_Copy] = []

    def plan() -> set[str]:
        copies.extend(_plan(wanted, manifest, where))
        return {copy.entry.file for copy in copies}

    files: list[str] = on_all(world, plan, lambda needed: sorted(set().union(*needed)))
    on_all(
        world,
        lambda: file_problems(path, manifest, files[world.rank :: world.size]),
        lambda found: _raise_first(where, [problem for of_rank in found for problem in of_rank]),
    )
    on_all(world, lambda: _read(path, copies), lambda _: None)
    return manifest.extra


def _open(directory: Path, step: int) -> tuple[Path, Manifest]:
    path = locate(directory, step)
    try:
        return path, read(path, step)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint step {step} in {directory} is damaged: {MANIFEST}: {error}") from error


def _plan(pieces: list[Piece], manifest: Manifest, where: str) -> list[_Copy]:
    saved = by_name(manifest.entries)
    missing = [piece.name for piece in pieces if piece.name not in saved]
    if missing:
        more = f" (nor {len(missing) - 1} others)" if len(missing) > 1 else ""
        raise UserError(
            f"{where} has no tensor {missing[0]!r}{more}; it is of another model or optimizer: choose another"
        )
    return [copy for piece in pieces for copy in _copies(piece, saved[piece.name], where)]


def _copies(piece: Piece, saved: list[Entry], where: str) -> list[_Copy]:
    _check_kind(piece, saved[0], where)
    wanted = Rectangle(piece.offset, tuple(piece.local.shape))
    overlaps = [(entry, wanted.overlap(entry.rectangle)) for entry in saved]
    copies = [_Copy(entry, piece, part) for entry, part in overlaps if part]
    why = uncovered(wanted, [copy.part for copy in copies])
    if why:
        raise CheckpointError(f"{where} is damaged: tensor {piece.name!r}: {why}")
    return copies


def _check_kind(piece: Piece, saved: Entry, where: str) -> None:
    here, there = (tuple(piece.shape), dtype_name(piece.dtype)), (saved.shape, saved.dtype)
    if here != there:
        raise UserError(
            f"{where}: tensor {piece.name!r} is {there[1]} of shape {there[0]}, this run wants {here[1]} of shape"
            f" {here[0]}; choose another checkpoint or the configuration it was saved with"
        )


def _raise_first(where: str, problems: list[Problem]) -> None:
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise CheckpointError(f"{where} is damaged: {problems[0]}{more}")


def _read(path: Path, copies: list[_Copy]) -> None:
    by_file: dict[str, list[_Copy]] = {}
    for copy in copies:
        by_file.setdefault(copy.entry.file, []).append(copy)
    for name, of_file in by_file.items():
        with reading(path / name) as file:
            for copy in of_file:
                read_into(file, copy.entry, copy.piece, copy.part)
