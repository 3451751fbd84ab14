"""What `hpc-train bench checkpoint` measures, from rounds to medians."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

OURS = "hpc_train"
RAW_DIRECT, RAW_BUFFERED, DCP = "raw_direct", "raw_buffered", "dcp"
BASES = (RAW_DIRECT, RAW_BUFFERED, DCP)
SAVE, STALL, COLD, WARM, VERIFY = "save", "stall", "load_cold", "load_warm", "verify"
MORE, FEWER, COLUMNS = "reshard_1_to_n", "reshard_n_to_1", "reshard_columns"
RESHARDINGS = (MORE, FEWER, COLUMNS)
"""Of several ranks: a load by all of what one saved, by one of what all saved by rows, and by columns of that."""
OPERATIONS = (SAVE, STALL, COLD, WARM, VERIFY, *RESHARDINGS)
SIDES = (OURS, RAW_DIRECT, RAW_BUFFERED, "torch_save", "safetensors", DCP, "dcp_async", "dcp_async_cached")

Samples = NDArray[np.float64]
"""(wall seconds, CPU seconds, bytes read) of every round, [rounds, 3]: wall of the slowest rank, the others of all."""
Measured = Mapping[str, Mapping[str, Samples]]
"""By operation and side."""


@dataclass(frozen=True)
class Options:
    """What is measured."""

    gib: float
    """Of state, over all ranks."""
    ranks: tuple[int, ...]
    tensors: int | None
    """That many equal ones, over all ranks; None: those of a transformer with its AdamW state."""
    directories: tuple[str, ...]
    rounds: int
    operations: tuple[str, ...] = OPERATIONS
    sides: tuple[str, ...] = SIDES


@dataclass(frozen=True)
class Ratio:
    """How many times as fast as another side; median and quartiles of the ratios of the same round."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Line:
    """One operation of one side."""

    operation: str
    side: str
    seconds: float
    """Median over rounds, of the slowest rank."""
    quartiles: tuple[float, float]
    gib_per_second: float
    cpu_seconds_per_gib: float
    """Of all ranks and threads."""
    over: dict[str, Ratio]
    """By base: raw_direct, raw_buffered, dcp."""
    read: float | None = None
    """Of resharding, bytes that all ranks read over bytes that they want."""


@dataclass(frozen=True)
class Setting:
    """One directory and number of ranks."""

    directory: str
    file_system: str
    ranks: int
    tensors: int
    """Of all ranks."""
    gib: float
    lines: list[Line]
    missing: dict[str, str]
    """Sides that cannot be measured here, and why."""
    load_average: tuple[float, float]
    """Of the last minute, before and after."""


@dataclass(frozen=True)
class Result:
    """What `bench checkpoint --json` prints."""

    options: Options
    settings: list[Setting]
    cpus: int

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def lines(measured: Measured, gib: float) -> list[Line]:
    """Medians, quartiles and ratios, operation by operation, the fastest side first."""
    found = []
    for operation, sides in measured.items():
        rows = [_line(operation, side, sides, gib) for side in sides]
        found += sorted(rows, key=lambda row: row.seconds)
    return found


def _line(operation: str, side: str, sides: Mapping[str, Samples], gib: float) -> Line:
    wall, cpu, read = sides[side].T
    low, median, high = (float(value) for value in np.quantile(wall, (0.25, 0.5, 0.75)))
    over = {base: _ratio(sides[base][:, 0] / wall) for base in BASES if base in sides and base != side}
    times = float(np.median(read)) / 2**30 / gib if operation in RESHARDINGS else None
    return Line(operation, side, median, (low, high), gib / median, float(np.median(cpu)) / gib, over, times)


def _ratio(samples: Samples) -> Ratio:
    low, median, high = (float(value) for value in np.quantile(samples, (0.25, 0.5, 0.75)))
    return Ratio(median, low, high)


def load_average() -> float:
    """Of the last minute; above the number of CPUs, others had a part of the machine."""
    return os.getloadavg()[0]
