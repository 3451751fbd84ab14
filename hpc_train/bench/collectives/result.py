"""What `bench collectives` found."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from hpc_train.cluster.calibration import Calibration, Constants

VERSION = 1


@dataclass(frozen=True)
class Measurement:
    """One operation of one size in all groups of one axis."""

    axis: str
    """A mesh axis, or world."""
    groups: int
    """Of the axis; they run at the same time."""
    ranks: int
    """Of a group."""
    operation: str
    algorithm: str
    """library, or ring or tree: ours."""
    backend: str
    size: int
    """Bytes; see definitions.Shape."""
    count: int
    """Elements; see definitions.Shape."""
    type: str
    redop: str
    in_place: bool
    seconds: float
    """Median over rounds of the slowest rank of all groups."""
    quartiles: tuple[float, float]
    algbw: float
    """10^9 bytes/s."""
    busbw: float
    wrong: int
    """Elements, over all ranks."""


@dataclass(frozen=True)
class Fit:
    """The constants of one level with one backend."""

    level: str
    backend: str
    pairs: int
    """Of ranks, that sent at once across the border of a group, each way."""
    sizes: tuple[int, ...]
    """Bytes of a message."""
    seconds: tuple[float, ...]
    latency: float | None
    """Seconds; None, as the bandwidth: the times do not tell."""
    bandwidth: float | None
    """Bytes/s out of a group, by all pairs together."""
    error: float | None
    """The largest relative difference of latency + pairs x size / bandwidth from what was measured."""


@dataclass(frozen=True)
class Result:
    """What `bench collectives --json` prints."""

    cluster: str
    device: str
    ranks: int
    nodes: int
    degrees: dict[str, int]
    placement: str
    """How ranks came to their nodes."""
    rounds: int
    date: str
    """ISO 8601, UTC."""
    measurements: tuple[Measurement, ...]
    fits: tuple[Fit, ...]
    wrong: int
    """Of all measurements and probes."""
    notes: tuple[str, ...]
    """What was left out, and why."""

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)


def calibration_of(result: Result) -> Calibration:
    """The levels that could be fitted, with the backend that was measured first."""
    backend = result.fits[0].backend if result.fits else ""
    levels = tuple(
        Constants(fit.level, fit.latency, fit.bandwidth)
        for fit in result.fits
        if fit.backend == backend and fit.latency is not None and fit.bandwidth is not None
    )
    return Calibration(result.cluster, backend, result.date, levels)
