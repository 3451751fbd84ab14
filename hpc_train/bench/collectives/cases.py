"""Build the cases of `bench collectives`, check their results and time them.

A case is one collective of one size, or one probe of a level of the fabric: pairs of ranks whose messages leave a group
of that level but no group of a higher one. The data that each rank sends is known, so every received element is
checked. Cases are timed in interleaved rounds, so that a disturbance of the machine affects all of them alike.
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
from hpc_train.bench.collectives.rank_groups import LevelProbe
from hpc_train.timing import interleave_rounds
from hpc_train.traffic.rank_groups import WORLD_AXIS, RankGroup


@dataclass(frozen=True)
class MeasurementCell:
    """One collective to measure: group, backend, algorithm and size."""

    group: RankGroup
    backend: Backend
    algorithm: str
    shape: CollectiveShape

    @property
    def in_place(self) -> bool:
        return self.algorithm in OWN_ALGORITHMS or self.shape.operation.name in self.backend.in_place


@dataclass(frozen=True)
class ProbeCell:
    """One level probe to measure, with one message size."""

    probe: LevelProbe
    backend: Backend
    shape: CollectiveShape


class CaseBuffers:
    """Buffers on one device; every case uses their first elements."""

    def __init__(self, elements: int, device: torch.device) -> None:
        self.pattern = DataPattern(elements, device)
        self.sent, self.received, self.scratch = (torch.zeros(elements, device=device) for _ in range(3))

    def clear(self) -> None:
        """Set all buffers to zero: repeated sums of other values would overflow, or become slow as denormals."""
        for buffer in (self.sent, self.received, self.scratch):
            buffer.zero_()


def make_cells(
    options: CollectivesOptions, groups: Sequence[RankGroup], backends: Sequence[Backend]
) -> list[MeasurementCell]:
    """List all combinations of axis, operation, algorithm, backend and size, with size varying fastest."""
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
    """List all combinations of backend, probe and size, with size varying fastest."""
    message = find_operation("send_recv")
    return [
        ProbeCell(probe, backend, make_shape(message, 2, size))
        for backend in backends
        for probe in probes
        for size in options.sizes
    ]


class CaseMaker:
    """Builds cases. All ranks build the same cases in the same order, because opening a connection is a collective."""

    def __init__(self, rank: int, ranks: int, elements: int) -> None:
        """elements: number in the largest buffer of any case."""
        self._rank, self._elements = rank, elements
        self._everyone = RankGroup(WORLD_AXIS, tuple(range(ranks)), rank, 1)
        self._buffers: dict[torch.device, CaseBuffers] = {}
        self._connections: dict[tuple[str, str], Connection] = {}

    def clear(self) -> None:
        """Set all buffers to zero."""
        for buffers in self._buffers.values():
            buffers.clear()

    def case(self, cell: MeasurementCell) -> TimedCase:
        """Build the case of one collective."""
        buffers, shape, index = self._get_buffers(cell.backend.device), cell.shape, cell.group.index
        sent, received = buffers.sent[: shape.sent], buffers.received[: shape.received]
        # Connections are made once per group and reused: a new one
        # for each size would take longer than the measurement.
        connection = self._connect(cell.backend, cell.group)
        return TimedCase(
            _make_call(cell, connection, sent, received, buffers.scratch),
            cell.backend.finish,
            partial(_fill_buffers, buffers.pattern, shape, index, sent, received, cell.in_place),
            lambda: count_wrong_elements(received, buffers.pattern.expected(shape, index)),
        )

    def probe(self, cell: ProbeCell) -> TimedCase:
        """Build the case of one probe: all pairs exchange messages; ranks without a partner do nothing."""
        buffers, shape, partner = self._get_buffers(cell.backend.device), cell.shape, cell.probe.partner[self._rank]
        sent, received = buffers.sent[: shape.sent], buffers.received[: shape.received]
        wire, unpaired = self._connect(cell.backend, self._everyone).wire(), partner == self._rank
        expected = None if unpaired else partial(buffers.pattern.sent, shape, partner)
        return TimedCase(
            _do_nothing if unpaired else partial(wire.exchange, sent, partner, received, partner),
            cell.backend.finish,
            partial(_fill_buffers, buffers.pattern, shape, self._rank, sent, received, False),
            lambda: count_wrong_elements(received, expected() if expected else None),
        )

    def _get_buffers(self, device: torch.device) -> CaseBuffers:
        if device not in self._buffers:
            self._buffers[device] = CaseBuffers(self._elements, device)
        return self._buffers[device]

    def _connect(self, backend: Backend, group: RankGroup) -> Connection:
        key = backend.name, group.axis
        if key not in self._connections:
            self._connections[key] = backend.connect(group)
        return self._connections[key]


def find_largest_buffer(cells: Sequence[MeasurementCell | ProbeCell]) -> int:
    """Return the number of elements of the largest buffer."""
    return max(cell.shape.elements for cell in cells)


def _do_nothing() -> None:
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
"""Small enough that sums over 30,000 ranks stay below 2^24, up to which float32 represents every integer."""
UNTOUCHED_VALUE = -1.0
"""Initial content of receive buffers; no right result contains it."""


class DataPattern:
    """Data of the cases: rank r of a group sends pattern + weight(r).

    The pattern differs from place to place and the weight from rank to rank. A sum has a closed form, so that a check
    takes as long in a group of thousands of ranks as in one of two.
    """

    def __init__(self, elements: int, device: torch.device) -> None:
        """elements: number in the largest buffer of any case."""
        # The same seed on every rank: each can compute what the others send.
        values = np.random.default_rng(0).integers(0, _VALUES, size=elements).astype(np.float32)
        self._values = torch.from_numpy(values).to(device)

    def sent(self, shape: CollectiveShape, index: int) -> Tensor:
        """Return what the rank at `index` of its group sends, (shape.sent,)."""
        begin = index * shape.count if shape.operation.receives_parts and not shape.operation.sends_parts else 0
        return self._values[begin : begin + shape.sent] + _compute_weight(index)

    def expected(self, shape: CollectiveShape, index: int) -> Tensor | None:
        """Return what that rank must receive, (shape.received,); None if nothing (reduce, except at the first rank)."""
        name, count, ranks = shape.operation.name, shape.count, shape.ranks
        total = float(sum(map(_compute_weight, range(ranks))))
        own_part = slice(index * count, (index + 1) * count)
        match name:
            case "all_reduce":
                return self._values[:count] * ranks + total
            case "reduce":
                return None if index else self._values[:count] * ranks + total
            case "reduce_scatter":
                return self._values[own_part] * ranks + total
            case "broadcast":
                return self._values[:count] + _compute_weight(0)
            case "send_recv":
                return self._values[:count] + _compute_weight((index - 1) % ranks)
        weights = torch.tensor([_compute_weight(rank) for rank in range(ranks)], dtype=torch.float32).to(
            self._values.device
        )
        if name == "all_gather":
            return (self._values[: shape.received].view(ranks, count) + weights[:, None]).flatten()
        assert name == "all_to_all", name
        return (self._values[own_part] + weights[:, None]).flatten()


def count_wrong_elements(received: Tensor, expected: Tensor | None) -> int:
    """Count the elements that differ; 0 for a rank that receives nothing."""
    return 0 if expected is None else int((received != expected).sum())


def _compute_weight(index: int) -> float:
    """Return what the rank at `index` adds to the pattern; never 0, so that data of no rank looks like the pattern."""
    return float(1 + index % _WEIGHTS)


_ROUND_SECONDS = 0.1
"""Rough time limit of a case in a round."""


@dataclass(frozen=True)
class TimedCase:
    """A collective, or an exchange of pairs, that all ranks run together."""

    call: Callable[[], None]
    finish: Callable[[], None]
    """Wait for what `call` has queued."""
    fill: Callable[[], None]
    """Fill the send buffers with the pattern."""
    wrong: Callable[[], int]
    """Count the wrong elements of this rank after `fill` and one `call`."""


def check_cases(cases: Sequence[TimedCase]) -> list[int]:
    """Call each case once, and count its wrong elements over all ranks. A collective."""
    wrong = []
    for case in cases:
        case.fill()
        case.call()
        case.finish()
        wrong.append(case.wrong())
    total = torch.tensor(wrong, dtype=torch.int64)
    dist.all_reduce(total)
    return [int(count) for count in total]


def time_cases(cases: Sequence[TimedCase], rounds: int, max_calls: int) -> NDArray[np.float64]:
    """Return seconds per call of the slowest rank, as an array of shape (rounds, cases).

    A collective. max_calls: calls of a case in a round; slow cases are called fewer times.
    """
    # All ranks must call a case equally often, so the count follows from the slowest rank.
    once = _max_over_ranks(np.array([_time_case(case, 1) for case in cases]))  # also the warm-up
    calls = [min(max_calls, max(1, math.floor(_ROUND_SECONDS / seconds))) for seconds in once]
    seconds = np.zeros((rounds, len(cases)))
    for number, index in interleave_rounds(rounds, len(cases)):
        seconds[number, index] = _time_case(cases[index], calls[index])
    return _max_over_ranks(seconds)


def _time_case(case: TimedCase, calls: int) -> float:
    """Return this rank's seconds per call."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        case.call()
    case.finish()
    return (time.perf_counter() - begin) / calls


def _max_over_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the elementwise maximum over ranks."""
    seconds = torch.from_numpy(values.copy())
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    greatest: NDArray[np.float64] = seconds.numpy()
    return greatest
