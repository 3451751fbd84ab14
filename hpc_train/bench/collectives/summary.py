"""From the times of all rounds to the numbers that are reported."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hpc_train.bench.collectives.cases import Cell, ProbeCell
from hpc_train.bench.collectives.definitions import algorithm_bandwidth, bus_factor
from hpc_train.bench.collectives.fit import fit_line
from hpc_train.bench.collectives.result import Fit, Measurement

Times = NDArray[np.float64]
"""[rounds]: seconds of the slowest rank."""


def measurement_of(cell: Cell, times: Times, wrong: int) -> Measurement:
    """What is reported of a cell."""
    shape, operation = cell.shape, cell.shape.operation
    low, median, high = (float(value) for value in np.quantile(times, (0.25, 0.5, 0.75)))
    algbw = algorithm_bandwidth(shape.size, median) / 1e9
    return Measurement(
        axis=cell.group.axis,
        groups=cell.group.groups,
        ranks=shape.ranks,
        operation=operation.name,
        algorithm=cell.algorithm,
        backend=cell.backend.name,
        size=shape.size,
        count=shape.count,
        type="float",
        redop="sum" if operation.sums else "none",
        in_place=cell.in_place,
        seconds=median,
        quartiles=(low, high),
        algbw=algbw,
        busbw=algbw * bus_factor(operation.name, shape.ranks),
        wrong=wrong,
    )


def fit_of(cells: Sequence[ProbeCell], times: Sequence[Times]) -> list[Fit]:
    """The constants of every backend and level; of two probes of one level, the slower one of each size counts."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    pairs: dict[tuple[str, str], int] = {}
    for cell, rounds in zip(cells, times, strict=True):
        key, size = (cell.backend.name, cell.probe.level), cell.shape.size
        sizes = found.setdefault(key, {})
        sizes[size] = max(sizes.get(size, 0.0), float(np.median(rounds)))
        pairs[key] = cell.probe.pairs
    return [_fit(key, pairs[key], sizes) for key, sizes in found.items()]


def _fit(key: tuple[str, str], pairs: int, medians: dict[int, float]) -> Fit:
    backend, level = key
    sizes, seconds = tuple(medians), tuple(medians.values())
    line = fit_line([size * pairs for size in sizes], seconds)
    constants = (line.latency, line.bandwidth, line.error) if line else (None, None, None)
    return Fit(level, backend, pairs, sizes, seconds, *constants)
