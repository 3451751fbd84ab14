"""From what is asked for to cases that can be checked and timed.

A case is one collective of one size, or one probe of a level of the fabric: pairs of ranks whose messages leave
one group of the level, and no higher one. What each rank sends is known to the last bit, so every received
element is checked. Cases are timed in interleaved rounds: what disturbs the machine disturbs all of them alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from hpc_train.bench.collectives.backends import OWN_ALGORITHMS, Backend, CollectiveCall, Connection
from hpc_train.bench.collectives.definitions import CollectiveShape, find_operation, make_shape
from hpc_train.bench.collectives.options import CollectivesOptions
from hpc_train.bench.collectives.rank_groups import WORLD_AXIS, LevelProbe, RankGroup


@dataclass(frozen=True)
class MeasurementCell:
    """One measurement to be made."""

    group: RankGroup
    backend: Backend
    algorithm: str
    shape: CollectiveShape

    @property
    def in_place(self) -> bool:
        return self.algorithm in OWN_ALGORITHMS or self.shape.operation.name in self.backend.in_place


@dataclass(frozen=True)
class ProbeCell:
    """One size of one probe."""

    probe: LevelProbe
    backend: Backend
    shape: CollectiveShape


class CaseBuffers:
    """Of one device; every case uses their beginnings."""

    def __init__(self, elements: int, device: torch.device) -> None:
        self.pattern = DataPattern(elements, device)
        self.sent, self.received, self.scratch = (torch.zeros(elements, device=device) for _ in range(3))

    def clear(self) -> None:
        """Zeros: sums of sums of them neither overflow nor become slow."""
        for buffer in (self.sent, self.received, self.scratch):
            buffer.zero_()


def make_cells(
    options: CollectivesOptions, groups: Sequence[RankGroup], backends: Sequence[Backend]
) -> list[MeasurementCell]:
    """Every axis, operation, algorithm, backend and size, the size varying fastest."""
    return [
        MeasurementCell(group, backend, algorithm, make_shape(find_operation(name), len(group.ranks), size))
        for group in groups
        for name in options.operations
        for algorithm in options.algorithms
        if algorithm not in OWN_ALGORITHMS or name == "all_reduce"
        for backend in backends
        for size in options.sizes
    ]


def make_probe_cells(
    options: CollectivesOptions, probes: Sequence[LevelProbe], backends: Sequence[Backend]
) -> list[ProbeCell]:
    """Every backend, probe and size, the size varying fastest."""
    message = find_operation("send_recv")
    return [
        ProbeCell(probe, backend, make_shape(message, 2, size))
        for backend in backends
        for probe in probes
        for size in options.sizes
    ]


class CaseMaker:
    """Every rank makes the same cases in the same order, because connections are made together."""

    def __init__(self, rank: int, ranks: int, elements: int) -> None:
        """elements: of the largest buffer of any case."""
        self._rank, self._elements = rank, elements
        self._everyone = RankGroup(WORLD_AXIS, tuple(range(ranks)), rank, 1)
        self._buffers: dict[torch.device, CaseBuffers] = {}
        self._connections: dict[tuple[str, str], Connection] = {}

    def clear(self) -> None:
        """Set all buffers to zero."""
        for buffers in self._buffers.values():
            buffers.clear()

    def case(self, cell: MeasurementCell) -> TimedCase:
        """One collective."""
        buffers, shape, index = self._on(cell.backend.device), cell.shape, cell.group.index
        sent, received = buffers.sent[: shape.sent], buffers.received[: shape.received]
        connection = self._connect(cell.backend, cell.group)
        return TimedCase(
            _make_call(cell, connection, sent, received, buffers.scratch),
            cell.backend.finish,
            partial(_fill_buffers, buffers.pattern, shape, index, sent, received, cell.in_place),
            lambda: count_wrong_elements(received, buffers.pattern.expected(shape, index)),
        )

    def probe(self, cell: ProbeCell) -> TimedCase:
        """One exchange of all pairs; ranks without a partner do nothing."""
        buffers, shape, partner = self._on(cell.backend.device), cell.shape, cell.probe.partner[self._rank]
        sent, received = buffers.sent[: shape.sent], buffers.received[: shape.received]
        wire, alone = self._connect(cell.backend, self._everyone).wire(), partner == self._rank
        expected = None if alone else partial(buffers.pattern.sent, shape, partner)
        return TimedCase(
            _nothing if alone else partial(wire.exchange, sent, partner, received, partner),
            cell.backend.finish,
            partial(_fill_buffers, buffers.pattern, shape, self._rank, sent, received, False),
            lambda: count_wrong_elements(received, expected() if expected else None),
        )

    def _on(self, device: torch.device) -> CaseBuffers:
        if device not in self._buffers:
            self._buffers[device] = CaseBuffers(self._elements, device)
        return self._buffers[device]

    def _connect(self, backend: Backend, group: RankGroup) -> Connection:
        key = backend.name, group.axis
        if key not in self._connections:
            self._connections[key] = backend.connect(group)
        return self._connections[key]


def largest_buffer(cells: Sequence[MeasurementCell | ProbeCell]) -> int:
    """Elements of the largest buffer."""
    return max(cell.shape.elements for cell in cells)


def _nothing() -> None:
    pass


def _make_call(
    cell: MeasurementCell, connection: Connection, sent: Tensor, received: Tensor, scratch: Tensor
) -> CollectiveCall:
    if cell.algorithm in OWN_ALGORITHMS:
        return partial(OWN_ALGORITHMS[cell.algorithm], connection.wire(), received, scratch)
    return connection.call(cell.shape.operation, sent, received)


def _fill_buffers(
    pattern: DataPattern, shape: CollectiveShape, index: int, sent: Tensor, received: Tensor, in_place: bool
) -> None:
    values = pattern.sent(shape, index)
    if in_place:
        received.copy_(values)
    else:
        sent.copy_(values)
        received.fill_(UNTOUCHED_VALUE)


_VALUES = 251
_WEIGHTS = 254
"""Sums of 30,000 ranks stay below 2^24, up to which float32 has every whole number."""
UNTOUCHED_VALUE = -1.0
"""What a buffer holds before: no right answer has it."""


class DataPattern:
    """Rank r of a group sends pattern + weight(r): the pattern tells places apart, the weight ranks.

    So a sum has a closed form, and checking it takes as long in a group of thousands as in one of two.
    """

    def __init__(self, elements: int, device: torch.device) -> None:
        """elements: of the largest buffer that is asked for."""
        values = np.random.default_rng(0).integers(0, _VALUES, size=elements).astype(np.float32)
        self._values = torch.from_numpy(values).to(device)

    def sent(self, shape: CollectiveShape, index: int) -> Tensor:
        """(shape.sent,) of the rank at `index` of its group."""
        begin = index * shape.count if shape.operation.receives_parts and not shape.operation.sends_parts else 0
        return self._values[begin : begin + shape.sent] + _weight(index)

    def expected(self, shape: CollectiveShape, index: int) -> Tensor | None:
        """(shape.received,) at that rank; None: it receives nothing (reduce, except at the first rank)."""
        name, count, ranks = shape.operation.name, shape.count, shape.ranks
        everyone = float(sum(map(_weight, range(ranks))))
        mine = slice(index * count, (index + 1) * count)
        match name:
            case "all_reduce":
                return self._values[:count] * ranks + everyone
            case "reduce":
                return None if index else self._values[:count] * ranks + everyone
            case "reduce_scatter":
                return self._values[mine] * ranks + everyone
            case "broadcast":
                return self._values[:count] + _weight(0)
            case "send_recv":
                return self._values[:count] + _weight((index - 1) % ranks)
        weights = torch.tensor([_weight(rank) for rank in range(ranks)], dtype=torch.float32).to(self._values.device)
        if name == "all_gather":
            return (self._values[: shape.received].view(ranks, count) + weights[:, None]).flatten()
        assert name == "all_to_all", name
        return (self._values[mine] + weights[:, None]).flatten()


def count_wrong_elements(received: Tensor, expected: Tensor | None) -> int:
    """How many differ."""
    return 0 if expected is None else int((received != expected).sum())


def _weight(index: int) -> float:
    return float(1 + index % _WEIGHTS)


_ROUND_SECONDS = 0.1
"""About what a case may take in a round."""


@dataclass(frozen=True)
class TimedCase:
    """Something that all ranks do together."""

    call: Callable[[], None]
    finish: Callable[[], None]
    """Wait for what `call` has queued."""
    fill: Callable[[], None]
    """Set the buffers to what is sent."""
    wrong: Callable[[], int]
    """Elements of this rank that are not what they must be after `fill` and one `call`."""


def check_cases(cases: Sequence[TimedCase]) -> list[int]:
    """Of each case, over all ranks; each is called once. Every rank calls it and gets the answer."""
    mine = []
    for case in cases:
        case.fill()
        case.call()
        case.finish()
        mine.append(case.wrong())
    total = torch.tensor(mine, dtype=torch.int64)
    dist.all_reduce(total)
    return [int(count) for count in total]


def time_cases(cases: Sequence[TimedCase], rounds: int, most: int) -> NDArray[np.float64]:
    """(rounds, cases): seconds a call of the slowest rank; every second round is in reverse order.

    most: calls of a case and round, which are fewer where they take long. Every rank calls it and gets the answer.
    """
    once = _max_over_ranks(np.array([_time_case(case, 1) for case in cases]))  # it also warms up
    calls = [min(most, max(1, math.floor(_ROUND_SECONDS / seconds))) for seconds in once]
    seconds = np.zeros((rounds, len(cases)))
    for number in range(rounds):
        forward = range(len(cases))
        for index in forward if number % 2 == 0 else reversed(forward):
            seconds[number, index] = _time_case(cases[index], calls[index])
    return _max_over_ranks(seconds)


def _time_case(case: TimedCase, calls: int) -> float:
    """Seconds a call of this rank."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        case.call()
    case.finish()
    return (time.perf_counter() - begin) / calls


def _max_over_ranks(mine: NDArray[np.float64]) -> NDArray[np.float64]:
    """The greatest value over the ranks, of each element."""
    seconds = torch.from_numpy(mine.copy())
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    greatest: NDArray[np.float64] = seconds.numpy()
    return greatest
