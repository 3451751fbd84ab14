"""Summarise the rounds of `bench step`: median times of each side, and bootstrap intervals of their ratios to ours."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import numpy as np

from hpc_train.bench.rounds import RoundTimings, Samples, Side
from hpc_train.bench.step.step import StartupTimer
from hpc_train.config.run import RunConfig
from hpc_train.interfaces import World

UNRECORDED_SIDE = "hpc_train_unrecorded"
"""Ours with train.record_steps=false: what recording steps costs."""
TRACED_SIDE = "hand_written_traceml"
"""The shortest loop traced by TraceML, where that has started the ranks."""
REFERENCE_SIDE = "hand_written"
"""The side that ours must not be slower than: the shortest loop, with torch's defaults."""
_RESAMPLES = 2000
"""Draws of the bootstrap."""


@dataclass(frozen=True)
class SideResult:
    """Time and memory of a step of one side."""

    name: str
    seconds: float
    """Median over rounds of the wall time of the slowest rank."""
    quartiles: tuple[float, float]
    tokens_per_second: float
    """Tokens per second at the median time."""
    cpu_seconds: float
    """CPU seconds of all threads of all ranks, median over rounds."""
    kept_mib: float
    """MiB by which rank 0's resident memory has grown: what the side keeps between steps."""
    first_loss: float


@dataclass(frozen=True)
class TimeRatio:
    """Time of another side over ours; above 1, ours is faster."""

    wall: float
    """Ratio of the medians over rounds."""
    low: float
    high: float
    """Bounds of the 90 % interval of the ratio, from resampled rounds (a paired bootstrap: Efron 1979)."""
    cpu: float


@dataclass(frozen=True)
class StepResult:
    """The result that `bench step --json` prints."""

    model: str
    precision: str
    strategy: str
    device: str
    ranks: int
    tokens_per_step: int
    rounds: int
    steps: int
    """Steps of each side in a round."""
    contract: str
    sides: list[SideResult]
    """The first is ours."""
    ratios: dict[str, TimeRatio]
    """Time ratio of each other side, by name."""
    startup_seconds: dict[str, float]
    """Seconds of each part of rank 0's start-up, from the start of its process to the end of its first step."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def summarise_step(
    config: RunConfig,
    world: World,
    sides: list[Side],
    timings: RoundTimings,
    tokens: int,
    steps: int,
    startup: StartupTimer,
) -> StepResult:
    """Summarise all sides. tokens: of a step, over all ranks. steps: of each side in a round."""
    wall, cpu = timings.wall, timings.cpu
    return StepResult(
        model=config.model.name,
        precision=config.precision.name,
        strategy=config.parallel.strategy,
        device=world.device.type,
        ranks=world.size,
        tokens_per_step=tokens,
        rounds=len(wall),
        steps=steps,
        contract=REFERENCE_SIDE,
        sides=[summarise_side(side, wall[:, index], cpu[:, index], tokens) for index, side in enumerate(sides)],
        ratios={
            side.name: compare_sides(wall[:, [0, index]], cpu[:, [0, index]])
            for index, side in enumerate(sides)
            if index
        },
        startup_seconds=dict(startup.parts),
    )


def summarise_side(side: Side, wall: Samples, cpu: Samples, tokens: int) -> SideResult:
    """Summarise one side. wall, cpu: (rounds,) seconds per step. tokens: of a step, over all ranks."""
    low, median, high = (float(value) for value in np.quantile(wall, (0.25, 0.5, 0.75)))
    cpu_median = float(np.median(cpu))
    return SideResult(
        name=side.name,
        seconds=median,
        quartiles=(low, high),
        tokens_per_second=tokens / median,
        cpu_seconds=cpu_median,
        kept_mib=side.kept_mib,
        first_loss=side.first_loss,
    )


def compare_sides(wall: Samples, cpu: Samples) -> TimeRatio:
    """Compare the times of another side with ours. wall, cpu: (rounds, 2), ours and the other's of each round."""
    # Whole rounds are drawn, both sides of each: a slow moment of the machine falls on both.
    rounds = np.random.default_rng(0).integers(len(wall), size=(_RESAMPLES, len(wall)))
    low, high = np.quantile(_compute_ratio_of_medians(wall[rounds]), (0.05, 0.95))
    return TimeRatio(
        float(_compute_ratio_of_medians(wall)), float(low), float(high), float(_compute_ratio_of_medians(cpu))
    )


def _compute_ratio_of_medians(pairs: Samples) -> Samples:
    """Return the ratio of the second median to the first. pairs: (..., rounds, 2); returns (...)."""
    medians: Samples = np.median(pairs, axis=-2)
    return np.asarray(medians[..., 1] / medians[..., 0])
