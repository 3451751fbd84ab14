"""Load a step into any layout: every rank reads just what it wants of what was saved, and verifies what it reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hpc_train.api import Piece, World
from hpc_train.checkpoint.agreement import on_all, on_first
from hpc_train.checkpoint.catalogue import locate
from hpc_train.checkpoint.digests import Digests, from_bytes
from hpc_train.checkpoint.dtypes import dtype_name
from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.files import checksum_of
from hpc_train.checkpoint.holdings import Part, Tensor
from hpc_train.checkpoint.manifest import MANIFEST, Manifest, ShardFile, read
from hpc_train.checkpoint.reading import Reader
from hpc_train.checkpoint.rectangle import Rectangle, uncovered
from hpc_train.checkpoint.shard import beside
from hpc_train.checkpoint.transfer import Copy, copy_of, reads
from hpc_train.errors import UserError


def load(directory: Path, step: int, pieces: Iterable[Piece], world: World) -> dict[str, Any]:
    """Fill `piece.local` of every piece in place, bit for bit, from any layout it was saved in; returns `extra`.

    Every rank of `world` calls it, with its own pieces, copies (replica > 0) included; tensors of the checkpoint that
    nobody asks for are ignored. Every byte that is used is verified first.

    Raises, the same on every rank: UserError if the step is not there, or if it has no tensor of that name, shape and
    dtype; CheckpointError if it is damaged. Until then nothing is written, but after an error while the data is being
    read the content of `local` is undefined.
    """
    wanted = list(pieces)
    path, manifest = on_first(world, lambda: _open(directory, step))
    where = f"checkpoint step {step} in {directory}"
    copies: list[Copy] = []
    on_all(world, lambda: copies.extend(_plan(wanted, manifest, where)), lambda _: None)
    on_all(world, lambda: _read(path, manifest, copies, where), lambda _: None)
    return manifest.extra


def table_of(directory: Path, file: ShardFile) -> Digests:
    """The digests of a shard file. Raises CheckpointError if they are not those that were committed."""
    name = beside(Path(file.name)).as_posix()
    try:
        data = beside(directory / file.name).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{name}: it cannot be read: {error.strerror}") from error
    if checksum_of(data) != file.digests:
        raise CheckpointError(f"{name}: its content is not what was committed (checksum)")
    try:
        return from_bytes(data, file.bytes)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from error


def _open(directory: Path, step: int) -> tuple[Path, Manifest]:
    path = locate(directory, step)
    try:
        return path, read(path, step)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint step {step} in {directory} is damaged: {MANIFEST}: {error}") from error


def _plan(pieces: Sequence[Piece], manifest: Manifest, where: str) -> list[Copy]:
    tensors = {tensor.name: tensor for tensor in manifest.holdings.tensors}
    missing = [piece.name for piece in pieces if piece.name not in tensors]
    if missing:
        more = f" (nor {len(missing) - 1} others)" if len(missing) > 1 else ""
        raise UserError(
            f"{where} has no tensor {missing[0]!r}{more}; it is of another model or optimizer: choose another"
        )
    parts = manifest.holdings.parts()
    return [copy for piece in pieces for copy in _copies(piece, tensors[piece.name], parts[piece.name], where)]


def _copies(piece: Piece, tensor: Tensor, parts: list[Part], where: str) -> list[Copy]:
    _check_kind(piece, tensor, where)
    wanted = Rectangle(tuple(piece.offset), tuple(piece.local.shape))
    overlaps = [(part, wanted.overlap(part.rectangle)) for part in parts]
    copies = [copy_of(part, piece, common) for part, common in overlaps if common]
    why = uncovered(wanted, [copy.wanted for copy in copies])
    if why:
        raise CheckpointError(f"{where} is damaged: tensor {piece.name!r}: {why}")
    return copies


def _check_kind(piece: Piece, saved: Tensor, where: str) -> None:
    here, there = (tuple(piece.shape), dtype_name(piece.dtype)), (saved.shape, saved.dtype)
    if here != there:
        raise UserError(
            f"{where}: tensor {piece.name!r} is {there[1]} of shape {there[0]}, this run wants {here[1]} of shape"
            f" {here[0]}; choose another checkpoint or the configuration it was saved with"
        )


def _read(path: Path, manifest: Manifest, copies: list[Copy], where: str) -> None:
    try:
        tables = {file: table_of(path, manifest.files[file]) for file in {copy.part.file for copy in copies}}
        with Reader(path, manifest.files, tables) as reader:
            reader.run(reads(copies, [file.bytes for file in manifest.files]))
    except (CheckpointError, OSError) as error:
        raise CheckpointError(f"{where} is damaged: {error}") from error
