"""From what is asked for to cases that can be checked and timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hpc_train.bench.collectives.backends import Backend, Call, Connection
from hpc_train.bench.collectives.data import UNTOUCHED, Pattern, wrong_elements
from hpc_train.bench.collectives.definitions import Shape, operation, shape_of
from hpc_train.bench.collectives.groups import WORLD, Group
from hpc_train.bench.collectives.levels import Probe
from hpc_train.bench.collectives.options import Options
from hpc_train.bench.collectives.own import OWN
from hpc_train.bench.collectives.timing import Case


@dataclass(frozen=True)
class Cell:
    """One measurement to be made."""

    group: Group
    backend: Backend
    algorithm: str
    shape: Shape

    @property
    def in_place(self) -> bool:
        return self.algorithm in OWN or self.shape.operation.name in self.backend.in_place


@dataclass(frozen=True)
class ProbeCell:
    """One size of one probe."""

    probe: Probe
    backend: Backend
    shape: Shape


class Buffers:
    """Of one device; every case uses their beginnings."""

    def __init__(self, elements: int, device: torch.device) -> None:
        self.pattern = Pattern(elements, device)
        self.sent, self.received, self.scratch = (torch.zeros(elements, device=device) for _ in range(3))

    def clear(self) -> None:
        """Zeros: sums of sums of them neither overflow nor become slow."""
        for buffer in (self.sent, self.received, self.scratch):
            buffer.zero_()


def cells_of(options: Options, groups: Sequence[Group], backends: Sequence[Backend]) -> list[Cell]:
    """Every axis, operation, algorithm, backend and size, the size varying fastest."""
    return [
        Cell(group, backend, algorithm, shape_of(operation(name), len(group.ranks), size))
        for group in groups
        for name in options.operations
        for algorithm in options.algorithms
        if algorithm not in OWN or name == "all_reduce"
        for backend in backends
        for size in options.sizes
    ]


def probe_cells(options: Options, probes: Sequence[Probe], backends: Sequence[Backend]) -> list[ProbeCell]:
    """Every backend, probe and size, the size varying fastest."""
    message = operation("send_recv")
    return [
        ProbeCell(probe, backend, shape_of(message, 2, size))
        for backend in backends
        for probe in probes
        for size in options.sizes
    ]


class CaseMaker:
    """Every rank makes the same cases in the same order, because connections are made together."""

    def __init__(self, rank: int, ranks: int, elements: int) -> None:
        """elements: of the largest buffer of any case."""
        self._rank, self._elements = rank, elements
        self._everyone = Group(WORLD, tuple(range(ranks)), rank, 1)
        self._buffers: dict[torch.device, Buffers] = {}
        self._connections: dict[tuple[str, str], Connection] = {}

    def clear(self) -> None:
        """Set all buffers to zero."""
        for buffers in self._buffers.values():
            buffers.clear()

    def case(self, cell: Cell) -> Case:
        """One collective."""
        buffers, shape, index = self._on(cell.backend.device), cell.shape, cell.group.index
        sent, received = buffers.sent[: shape.sent], buffers.received[: shape.received]
        connection = self._connect(cell.backend, cell.group)
        return Case(
            _call(cell, connection, sent, received, buffers.scratch),
            cell.backend.finish,
            partial(_fill, buffers.pattern, shape, index, sent, received, cell.in_place),
            lambda: wrong_elements(received, buffers.pattern.expected(shape, index)),
        )

    def probe(self, cell: ProbeCell) -> Case:
        """One exchange of all pairs; ranks without a partner do nothing."""
        buffers, shape, partner = self._on(cell.backend.device), cell.shape, cell.probe.partner[self._rank]
        sent, received = buffers.sent[: shape.sent], buffers.received[: shape.received]
        wire, alone = self._connect(cell.backend, self._everyone).wire(), partner == self._rank
        expected = None if alone else partial(buffers.pattern.sent, shape, partner)
        return Case(
            _nothing if alone else partial(wire.exchange, sent, partner, received, partner),
            cell.backend.finish,
            partial(_fill, buffers.pattern, shape, self._rank, sent, received, False),
            lambda: wrong_elements(received, expected() if expected else None),
        )

    def _on(self, device: torch.device) -> Buffers:
        if device not in self._buffers:
            self._buffers[device] = Buffers(self._elements, device)
        return self._buffers[device]

    def _connect(self, backend: Backend, group: Group) -> Connection:
        key = backend.name, group.axis
        if key not in self._connections:
            self._connections[key] = backend.connect(group)
        return self._connections[key]


def largest(cells: Sequence[Cell | ProbeCell]) -> int:
    """Elements of the largest buffer."""
    return max(cell.shape.elements for cell in cells)


def _nothing() -> None:
    pass


def _call(cell: Cell, connection: Connection, sent: Tensor, received: Tensor, scratch: Tensor) -> Call:
    if cell.algorithm in OWN:
        return partial(OWN[cell.algorithm], connection.wire(), received, scratch)
    return connection.call(cell.shape.operation, sent, received)


def _fill(pattern: Pattern, shape: Shape, index: int, sent: Tensor, received: Tensor, in_place: bool) -> None:
    values = pattern.sent(shape, index)
    if in_place:
        received.copy_(values)
    else:
        sent.copy_(values)
        received.fill_(UNTOUCHED)
