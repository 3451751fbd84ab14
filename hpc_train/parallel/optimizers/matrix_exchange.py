"""Gather every matrix on one rank, and send the result back to the ranks that hold parts or copies of it.

Used by optimizers that compute with whole matrices (Muon). Every matrix has an owner, so that each rank computes its
share of the matrices once. A round of matrices takes these steps:

    1. all-to-all within a copy of the model: every rank sends its parts of each matrix to that matrix's owner
    2. the owners compute
    3. all-to-all back: every rank gets its parts of the results of owners in its copy
    4. all-gather over the copies (dp_replicate): every rank gets its parts of the results of owners in other copies

A model on one rank needs none of these, ddp only the fourth, shards without copies all but the fourth. Each rank sends
and receives its own parts once in the first and third, and every part once in the fourth, in bfloat16: for P parameters
in matrices, S shards and R copies that is 2 x 2 P / (S R) + 2 P / S bytes, of which the last term falls away at R = 1.
The next round's parts travel while this round is computed, and results travel while the next round is computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc_train._torch.dtensor import shard_rectangle
from hpc_train._torch.process_groups import all_gather, flatten_mesh
from hpc_train.interfaces import World
from hpc_train.parallel.mesh_axes import EXPERT_SHARD_AXIS, SHARD_CP_AXIS, get_axis_degree, get_axis_index

_ROUND_BYTES = 64 * 2**20
"""Matrices of a round together, unless there are fewer of them than ranks; bounds the memory of transfers."""
_INNER_AXES = ("dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Part:
    """Rows and columns of a matrix that a rank holds."""

    rows: slice
    columns: slice

    @property
    def shape(self) -> tuple[int, int]:
        """Its height and width."""
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start

    @property
    def size(self) -> int:
        """Its number of elements."""
        height, width = self.shape
        return height * width


@dataclass(frozen=True, eq=False)
class Matrix:
    """A parameter that is a matrix, or one of a stack of matrices."""

    parameter: nn.Parameter
    index: int | None
    """Index in the stack; None: the parameter is the matrix."""
    parts: tuple[Part | None, ...]
    """What each rank of a copy of the model holds of it; None: nothing."""
    first: tuple[int, ...]
    """Index in the stack of the first matrix that each rank holds."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the whole matrix."""
        rows, columns = self.parameter.shape[-2:]
        return rows, columns

    def select_local(self, tensor: Tensor, rank: int) -> Tensor:
        """Return the view of this matrix's part in what a rank holds of the parameter, or of a tensor like it."""
        return tensor if self.index is None else tensor[self.index - self.first[rank]]


def list_matrices(parameters: Sequence[nn.Parameter], world: World) -> list[Matrix]:
    """List the matrices of parameters of two dimensions, or of three: stacks of matrices."""
    places = [_locate(world, rank) for rank in range(_count_inner_ranks(world))]
    matrices: list[Matrix] = []
    for parameter in parameters:
        shards = [_find_rectangle(parameter, place) for place in places]
        for index in range(parameter.shape[0]) if parameter.ndim == 3 else (None,):
            parts = tuple(_find_part(size, offset, index) for size, offset in shards)
            matrices.append(Matrix(parameter, index, parts, tuple(offset[0] for _, offset in shards)))
    return matrices


def _count_inner_ranks(world: World) -> int:
    size = 1
    for axis in _INNER_AXES:
        size *= get_axis_degree(world, axis)
    return size


def _locate(world: World, rank: int) -> dict[str, int]:
    """Return the index on every axis of a rank of one copy of the model, in row-major order of _INNER_AXES."""
    place = {"dp_replicate": 0, "pp": 0}
    for axis in reversed(_INNER_AXES):
        rank, place[axis] = divmod(rank, get_axis_degree(world, axis))
    place[SHARD_CP_AXIS] = place["dp_shard"] * get_axis_degree(world, "cp") + place["cp"]
    return place


def _find_rectangle(parameter: nn.Parameter, place: dict[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (shape, offset) of what the rank at a place holds."""
    if not isinstance(parameter, DTensor):
        return tuple(parameter.shape), (0,) * parameter.ndim
    names = parameter.device_mesh.mesh_dim_names
    assert names is not None
    if "ep" in names:  # a view of dp_shard x cp
        ep = parameter.device_mesh.size(names.index("ep"))
        place = {**place, EXPERT_SHARD_AXIS: place[SHARD_CP_AXIS] // ep, "ep": place[SHARD_CP_AXIS] % ep}
    return shard_rectangle(parameter, tuple(place[name] for name in names))


def _find_part(size: tuple[int, ...], offset: tuple[int, ...], index: int | None) -> Part | None:
    if 0 in size or (index is not None and not offset[0] <= index < offset[0] + size[0]):
        return None
    (rows, columns), (first_row, first_column) = size[-2:], offset[-2:]
    return Part(slice(first_row, first_row + rows), slice(first_column, first_column + columns))


@dataclass(frozen=True)
class _Piece:
    """A part of a matrix as it travels."""

    matrix: Matrix
    part: Part


@dataclass
class _Route:
    """Pieces that this rank sends and receives in an all-to-all, by the other rank, and their numbers of elements."""

    sent: list[_Piece] = field(default_factory=list)
    received: list[_Piece] = field(default_factory=list)
    sent_sizes: list[int] = field(default_factory=list)
    received_sizes: list[int] = field(default_factory=list)


@dataclass
class Transfer:
    """An all-to-all under way, and the memory that it uses; or parts that stay on this rank."""

    parts: list[Tensor]
    received: Tensor | None = None
    sent: Tensor | None = None
    work: dist.Work | None = None


@dataclass
class Round:
    """Matrices that are exchanged together, seen from one rank."""

    local_matrices: list[Matrix]
    """Those that this rank computes."""
    by_copy: list[list[_Piece]]
    """This rank's parts of the matrices of each copy of the model."""
    gather_route: _Route
    """To the owners, before they compute."""
    return_route: _Route
    """From the owners, with the results."""


class MatrixExchange:
    """The rounds in which matrices travel to their owners and back."""

    def __init__(self, matrices: Sequence[Matrix], world: World, dtype: torch.dtype) -> None:
        """matrices: the same list on every rank of a stage. dtype: in which parts travel. Every rank of a job calls."""
        sharded = _is_sharded(matrices, world)
        self._dtype, self._device = dtype, world.device
        self._inner_group: dist.ProcessGroup | None = None
        self._copy_group: dist.ProcessGroup | None = None
        self.rank, self._ranks = 0, 1
        """This rank's index in its copy of the model."""
        if sharded and _count_inner_ranks(world) > 1:
            inner = flatten_mesh(world.mesh[_INNER_AXES], "matrix_parts")
            self._inner_group = inner.get_group()
            self.rank, self._ranks = inner.get_local_rank(), inner.size()
        self._copy, self._copies = _find_copy(world, sharded)
        if self._copies > 1:
            self._copy_group = world.mesh["dp_replicate"].get_group() if sharded else dist.group.WORLD
        owners = _assign_owners(matrices, self._ranks, self._copies)
        self.rounds = [
            self._plan_round(matrices[begin:end], owners[begin:end])
            for begin, end in _cut_rounds(matrices, self._ranks * self._copies, dtype)
        ]

    def _plan_round(self, matrices: Sequence[Matrix], owners: Sequence[tuple[int, int]]) -> Round:
        by_copy: list[list[_Piece]] = [[] for _ in range(self._copies)]
        copy_matrices = []
        for matrix, (copy, owner) in zip(matrices, owners, strict=True):
            if (part := matrix.parts[self.rank]) is not None:
                by_copy[copy].append(_Piece(matrix, part))
            if copy == self._copy:
                copy_matrices.append((matrix, owner))
        local_matrices = [matrix for matrix, owner in copy_matrices if owner == self.rank]
        return Round(local_matrices, by_copy, self._plan_gather(copy_matrices), self._plan_return(copy_matrices))

    def _plan_gather(self, matrices: Sequence[tuple[Matrix, int]]) -> _Route:
        """Send each part to its owner once, from the holder that is nearest to it."""
        sent, received = defaultdict(list), defaultdict(list)
        for matrix, owner in matrices:
            senders = _choose_senders(matrix, owner)
            if self.rank in senders:
                sent[owner].append(_Piece(matrix, _get_part(matrix, self.rank)))
            for sender in senders if owner == self.rank else ():
                received[sender].append(_Piece(matrix, _get_part(matrix, sender)))
        return _order_route(sent, received, self._ranks)

    def _plan_return(self, matrices: Sequence[tuple[Matrix, int]]) -> _Route:
        """Send each holder its part back."""
        sent, received = defaultdict(list), defaultdict(list)
        for matrix, owner in matrices:
            if (part := matrix.parts[self.rank]) is not None:
                received[owner].append(_Piece(matrix, part))
            for rank, part_of_rank in enumerate(matrix.parts) if owner == self.rank else ():
                if part_of_rank is not None:
                    sent[rank].append(_Piece(matrix, part_of_rank))
        return _order_route(sent, received, self._ranks)

    def start_gather(self, number: int, get_part: Callable[[Matrix], Tensor]) -> Transfer:
        """Start to bring the matrices of a round to their owners. get_part: returns this rank's part of a matrix."""
        route = self.rounds[number].gather_route
        return self._start(route, [get_part(piece.matrix) for piece in route.sent])

    def finish_gather(self, number: int, transfer: Transfer) -> dict[Matrix, Tensor]:
        """Wait, and return the whole matrices that this rank owns."""
        arrived = self._finish(self.rounds[number].gather_route, transfer)
        if self._inner_group is None:  # a rank that has all of a copy
            return {piece.matrix: values for piece, values in arrived}
        shapes = {matrix: matrix.shape for matrix in self.rounds[number].local_matrices}
        matrices = {m: torch.empty(shape, dtype=self._dtype, device=self._device) for m, shape in shapes.items()}
        for piece, values in arrived:
            matrices[piece.matrix][piece.part.rows, piece.part.columns] = values
        return matrices

    def start_return(self, number: int, results: dict[Matrix, Tensor]) -> Transfer:
        """Start to bring results (of the matrices' shapes) to the ranks that hold parts."""
        route = self.rounds[number].return_route
        parts = [results[piece.matrix][piece.part.rows, piece.part.columns] for piece in route.sent]
        return self._start(route, parts)

    def finish_return(self, number: int, transfer: Transfer) -> Iterator[tuple[Matrix, Tensor]]:
        """Wait, and yield this rank's part of the result of every matrix of the round."""
        route, by_copy = self.rounds[number].return_route, self.rounds[number].by_copy
        values_by_matrix = {piece.matrix: values for piece, values in self._finish(route, transfer)}
        if self._copy_group is None:
            yield from values_by_matrix.items()
            return
        # Each copy of the model has computed some of the matrices. An all-gather takes equal sizes, so that all send as
        # much as the copy with the most.
        sizes = [sum(piece.part.size for piece in pieces) for pieces in by_copy]
        copy_parts = torch.zeros(max(sizes), dtype=self._dtype, device=self._device)
        for piece, place in _split(by_copy[self._copy], copy_parts):
            place.copy_(values_by_matrix[piece.matrix])
        of_copies = copy_parts.new_empty(self._copies, max(sizes))
        all_gather(of_copies, copy_parts, self._copy_group)
        for pieces, values in zip(by_copy, of_copies, strict=True):
            for piece, part in _split(pieces, values):
                yield piece.matrix, part

    def _start(self, route: _Route, parts: list[Tensor]) -> Transfer:
        if self._inner_group is None:
            return Transfer([part.to(self._dtype) for part in parts])
        flat = [part.reshape(-1).to(self._dtype) for part in parts]
        sent = torch.cat(flat) if flat else torch.empty(0, dtype=self._dtype, device=self._device)
        received = sent.new_empty(sum(route.received_sizes))
        sizes = route.received_sizes, route.sent_sizes
        work = dist.all_to_all_single(received, sent, *sizes, group=self._inner_group, async_op=True)
        return Transfer([], received, sent, work)

    def _finish(self, route: _Route, transfer: Transfer) -> Iterator[tuple[_Piece, Tensor]]:
        """Wait, and return what has arrived."""
        if self._inner_group is None:
            return zip(route.received, transfer.parts, strict=True)
        assert transfer.work is not None
        assert transfer.received is not None
        transfer.work.wait()
        return _split(route.received, transfer.received)


def _is_sharded(matrices: Sequence[Matrix], world: World) -> bool:
    """Whether the model's parameters are DTensors: those of a stage without matrices are if pp splits the model."""
    return any(isinstance(matrix.parameter, DTensor) for matrix in matrices) or get_axis_degree(world, "pp") > 1


def _find_copy(world: World, sharded: bool) -> tuple[int, int]:
    """Return which copy of the model this rank has a part of, and how many there are."""
    if sharded:
        return get_axis_index(world, "dp_replicate"), get_axis_degree(world, "dp_replicate")
    return world.rank, world.size  # every rank has all of it: ddp, over cp too


def _assign_owners(matrices: Sequence[Matrix], ranks: int, copies: int) -> list[tuple[int, int]]:
    """Return (copy, rank in it) of each matrix's owner: the one with least to compute of those that need least."""
    loads = [[0] * ranks for _ in range(copies)]
    owners = []
    for matrix in matrices:
        rows, columns = matrix.shape
        full = [rank for rank in range(ranks) if (part := matrix.parts[rank]) and part.size == rows * columns]
        _, copy, rank = min((loads[copy][rank], copy, rank) for copy in range(copies) for rank in full or range(ranks))
        loads[copy][rank] += rows * columns * min(rows, columns)
        owners.append((copy, rank))
    return owners


def _cut_rounds(matrices: Sequence[Matrix], owners: int, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    """Yield where each round begins and ends: at _ROUND_BYTES, but not before every rank owns a matrix."""
    begin, size = 0, 0
    for index, matrix in enumerate(matrices):
        if size >= _ROUND_BYTES and index - begin >= owners:
            yield begin, index
            begin, size = index, 0
        size += matrix.shape[0] * matrix.shape[1] * dtype.itemsize
    if begin < len(matrices):
        yield begin, len(matrices)


def _choose_senders(matrix: Matrix, owner: int) -> set[int]:
    """Return the ranks that send their parts to the owner: of several holders of one part the nearest."""
    nearest: dict[tuple[int, int], int] = {}
    for rank, part in enumerate(matrix.parts):
        if part is not None:
            corner = part.rows.start, part.columns.start
            other = nearest.setdefault(corner, rank)
            nearest[corner] = min(other, rank, key=lambda candidate: abs(candidate - owner))
    return set(nearest.values())


def _get_part(matrix: Matrix, rank: int) -> Part:
    part = matrix.parts[rank]
    assert part is not None
    return part


def _order_route(sent: dict[int, list[_Piece]], received: dict[int, list[_Piece]], ranks: int) -> _Route:
    route = _Route()
    for rank in range(ranks):
        route.sent += sent.get(rank, [])
        route.received += received.get(rank, [])
        route.sent_sizes.append(sum(piece.part.size for piece in sent.get(rank, ())))
        route.received_sizes.append(sum(piece.part.size for piece in received.get(rank, ())))
    return route


def _split(pieces: Sequence[_Piece], flat: Tensor) -> Iterator[tuple[_Piece, Tensor]]:
    """Yield each piece with its values in a flat tensor that begins with them."""
    begin = 0
    for piece in pieces:
        yield piece, flat[begin : begin + piece.part.size].view(piece.part.shape)
        begin += piece.part.size
