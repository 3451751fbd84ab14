"""The proof that what the ranks hold adds up to the model, for all ranks of a world of which some were built."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from hpc_train.config.degrees import Degrees
from hpc_train.planner.rehearsal.result import Built, Coverage, Held
from hpc_train.planner.rehearsal.tiling import Tiling, whole

_OPTIMIZER = "optim."
_SCALER = "scaler."
"""Of the loss scale, which every rank of the job has."""


def cover(model: Mapping[str, tuple[int, ...]], ranks: Sequence[Built], degrees: Degrees) -> Coverage:
    """model: shape by name of every parameter and persistent buffer. ranks: those that were built; parameters
    that none of them has are missing only where there is one of each pipeline rank.

    Proved: every tensor belongs to one pipeline rank, whose ranks hold every element of it exactly once, copies aside
    (Tiling.problem); of the copies of each rectangle one writes it. Each rank that was built really has the rectangles
    that this is reckoned with, and its replica numbers agree with those of the others of its stage.
    """
    problems: list[str] = []
    owners: dict[str, tuple[int, Tiling]] = {}
    holders: dict[tuple[int, str, bool], int] = {}
    for built in ranks:
        for piece in built.pieces:
            problems += _check_piece(built, piece, degrees, holders)
        problems += _claim(built, model, owners, degrees)
    if not_built(ranks, degrees) == []:
        problems += [f"{name} is on no rank" for name in model if name not in owners]
    for name, (_, tiling) in owners.items():
        if wrong := tiling.problem():
            problems.append(f"{name}: {wrong}")
    elements = sum(math.prod(shape) for shape in model.values())
    return Coverage(len(model), elements, _written(ranks, owners), tuple(dict.fromkeys(problems)))


def tiling_of(built: Built, piece: Held) -> Tiling:
    """Of a piece, which for optimizer state of the parameter's shape is the parameter's."""
    tiling = built.tilings.get(_parameter(piece.name))
    return tiling if tiling is not None and tiling.shape == piece.shape else whole(piece.shape)


def _parameter(name: str) -> str:
    return name.split(".", 2)[2] if name.startswith(_OPTIMIZER) else name


def _check_piece(
    built: Built, piece: Held, degrees: Degrees, holders: dict[tuple[int, str, bool], int]
) -> Iterator[str]:
    where = f"rank {built.rank}: {piece.name}"
    if piece.name.startswith(_SCALER):
        if piece.replica != built.rank:
            yield f"{where} is copy {piece.replica} of those of all ranks"
        return
    tiling = tiling_of(built, piece)
    if (piece.offset, piece.size) != tiling.held(built.at, degrees):
        yield f"{where} begins at {piece.offset} and is {piece.size}, but should {tiling.held(built.at, degrees)}"
    count, mine = tiling.copies(degrees), tiling.copy(built.at, degrees)
    if not 0 <= piece.replica < 2 * count:
        yield f"{where} is copy {piece.replica} of {count}"
    key = (built.at["pp"], piece.name, piece.replica >= count)
    writer = (mine - piece.replica) % count
    if holders.setdefault(key, writer) != writer:
        yield f"{where}: two ranks take different ones for its writer"


def _claim(
    built: Built, model: Mapping[str, tuple[int, ...]], owners: dict[str, tuple[int, Tiling]], degrees: Degrees
) -> Iterator[str]:
    """What this rank's stages own; tied parameters of another stage are borrowed."""
    for piece in built.pieces:
        if piece.name.startswith((_OPTIMIZER, _SCALER)):
            continue
        tiling = tiling_of(built, piece)
        if piece.name not in model:
            yield f"rank {built.rank}: {piece.name} is not in the model"
        elif piece.shape != model[piece.name]:
            yield f"rank {built.rank}: {piece.name} is {piece.shape}, in the model {model[piece.name]}"
        if piece.replica >= tiling.copies(degrees):
            continue
        stage, other = owners.setdefault(piece.name, (built.at["pp"], tiling))
        if stage != built.at["pp"]:
            yield f"{piece.name} belongs to pipeline ranks {stage} and {built.at['pp']}"
        if other != tiling:
            yield f"rank {built.rank}: {piece.name} is cut as {tiling.cuts}, elsewhere as {other.cuts}"


def not_built(ranks: Sequence[Built], degrees: Degrees) -> list[int]:
    """Pipeline ranks of which no rank was built, so that nobody knows what their stages hold."""
    there = {built.at["pp"] for built in ranks}
    return [pp for pp in range(degrees.pp) if pp not in there]


def _written(ranks: Sequence[Built], owners: Mapping[str, tuple[int, Tiling]]) -> int:
    """Rectangles of all logical tensors, optimizer state among them."""
    first = {built.at["pp"]: built for built in reversed(ranks)}
    seen: dict[str, int] = {}
    for stage, built in first.items():
        for piece in built.pieces:
            owner = owners.get(_parameter(piece.name))
            if owner is None or owner[0] == stage:
                seen[piece.name] = tiling_of(built, piece).rectangles
    return sum(seen.values())
