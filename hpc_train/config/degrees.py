"""From the parallel config and a world size to the degree of every mesh axis."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from hpc_train.config.parallel import ParallelConfig
from hpc_train.errors import UserError

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes, outermost first."""


@dataclass(frozen=True)
class Degrees:
    """Resolved degrees; their product is the world size."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int

    @property
    def world(self) -> int:
        return math.prod(self.sizes)

    @property
    def data_parallel(self) -> int:
        """Ranks that see different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def sizes(self) -> tuple[int, ...]:
        """One size an axis, in the order of AXES."""
        return tuple(asdict(self).values())

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in asdict(self).items())


def wanted(config: ParallelConfig) -> dict[str, int]:
    """The degrees as asked for, with the strategy's defaults filled in; at most one is -1.

    Raises UserError for a degree of 0 and for more than one -1.
    """
    sharded = config.strategy != "ddp"
    default = {"dp_replicate": 1 if sharded else -1, "dp_shard": -1 if sharded else 1}
    given = {axis: getattr(config, axis) for axis in AXES}
    if -1 in given.values():  # what is left of the world is already asked for
        default = {"dp_replicate": 1, "dp_shard": 1}
    degrees = {axis: default[axis] if value is None else value for axis, value in given.items()}
    for axis, value in degrees.items():
        if value == 0:
            raise UserError(f"parallel.{axis}=0: a degree is at least 1, or -1 for what is left of the world")
    open_axes = [f"parallel.{axis}=-1" for axis, value in degrees.items() if value == -1]
    if len(open_axes) > 1:
        raise UserError(f"{' and '.join(open_axes)}: only one degree can be what is left of the world")
    return degrees


def resolve(config: ParallelConfig, world: int) -> Degrees:
    """Fill in -1 so that the degrees multiply to `world`.

    Raises UserError with the equation when they cannot, and for parallel=auto, which plan, train and submit decide.
    """
    if config.auto:
        raise UserError(
            "parallel=auto: is decided by `hpc-train plan`, `train` and `submit`; give here the degrees `plan` tells"
        )
    degrees = wanted(config)
    fixed = math.prod(value for value in degrees.values() if value != -1)
    equation = " x ".join(f"{axis} {'?' if value == -1 else value}" for axis, value in degrees.items())
    if -1 not in degrees.values():
        if fixed != world:
            raise UserError(
                f"parallel: {equation} = {fixed}, but the world has {world} ranks; "
                f"set one of them to -1 to take what is left"
            )
    elif world % fixed:
        raise UserError(f"parallel: {equation} = {world} has no solution: {world} ranks do not divide by {fixed}")
    return Degrees(**{axis: world // fixed if value == -1 else value for axis, value in degrees.items()})


def smallest_world(config: ParallelConfig) -> int:
    """The fewest ranks that the degrees as asked for can run on."""
    return math.prod(value for value in wanted(config).values() if value != -1)
