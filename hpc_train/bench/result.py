"""From timings to the numbers that are reported: medians, ratios of medians, and how sure they are."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import numpy as np

from hpc_train.api import World
from hpc_train.bench.rounds import Samples, Side, Timings
from hpc_train.bench.startup import StartUp
from hpc_train.config.run import RunConfig

CONTRACT = "hand_written"
"""The side that ours is promised to be no slower than: the shortest loop, with the defaults of torch."""
_RESAMPLES = 2000


@dataclass(frozen=True)
class SideResult:
    """One side, a step."""

    name: str
    seconds: float
    """Median over rounds of the wall time of the slowest rank."""
    quartiles: tuple[float, float]
    tokens_per_second: float
    """At the median."""
    cpu_seconds: float
    """Median over rounds; all threads of all ranks."""
    kept_mib: float
    """Growth of rank 0's resident memory by what the side keeps between steps."""
    first_loss: float


@dataclass(frozen=True)
class Ratio:
    """Another side over ours: above 1 means that ours is faster."""

    wall: float
    """Ratio of the medians over rounds."""
    low: float
    high: float
    """From 5 % to 95 % of the ratios of medians of resampled rounds (a paired bootstrap: Efron 1979)."""
    cpu: float


@dataclass(frozen=True)
class Result:
    """What `bench step --json` prints."""

    model: str
    precision: str
    strategy: str
    device: str
    ranks: int
    tokens_per_step: int
    rounds: int
    steps: int
    """A round and side."""
    contract: str
    sides: list[SideResult]
    """The first is ours."""
    ratios: dict[str, Ratio]
    """By the name of the other side."""
    startup_seconds: dict[str, float]
    """Rank 0's, from the start of its process to the end of its first step, by part."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def summarise(
    config: RunConfig, world: World, sides: list[Side], timings: Timings, tokens: int, steps: int, startup: StartUp
) -> Result:
    """`tokens` of a step, over all ranks; `steps` of a round and side."""
    wall, cpu = timings.wall, timings.cpu
    return Result(
        model=config.model.name,
        precision=config.precision.name,
        strategy=config.parallel.strategy,
        device=world.device.type,
        ranks=world.size,
        tokens_per_step=tokens,
        rounds=len(wall),
        steps=steps,
        contract=CONTRACT,
        sides=[side_result(side, wall[:, index], cpu[:, index], tokens) for index, side in enumerate(sides)],
        ratios={side.name: ratio(wall[:, [0, index]], cpu[:, [0, index]]) for index, side in enumerate(sides) if index},
        startup_seconds=dict(startup.parts),
    )


def side_result(side: Side, wall: Samples, cpu: Samples, tokens: int) -> SideResult:
    """wall, cpu: (rounds,) of this side; tokens of a step, over all ranks."""
    low, median, high = (float(value) for value in np.quantile(wall, (0.25, 0.5, 0.75)))
    cpu_median = float(np.median(cpu))
    return SideResult(side.name, median, (low, high), tokens / median, cpu_median, side.kept_mib, side.first_loss)


def ratio(wall: Samples, cpu: Samples) -> Ratio:
    """wall, cpu: (rounds, 2), ours and the other's of the same round side by side."""
    rounds = np.random.default_rng(0).integers(len(wall), size=(_RESAMPLES, len(wall)))
    low, high = np.quantile(_of_medians(wall[rounds]), (0.05, 0.95))
    return Ratio(float(_of_medians(wall)), float(low), float(high), float(_of_medians(cpu)))


def _of_medians(pairs: Samples) -> Samples:
    """(..., rounds, 2) -> (...)."""
    medians: Samples = np.median(pairs, axis=-2)
    return np.asarray(medians[..., 1] / medians[..., 0])
