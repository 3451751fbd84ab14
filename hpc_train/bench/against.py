"""One rank of `bench step --peers`: all sides of one run, each of ours paired with the one it is measured against."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial

from hpc_train.api import World
from hpc_train.bench.measure import assembled, same_model, sample_order, started
from hpc_train.bench.peers import ALONE, MPI, SEVERAL, Loop, Ours, peers
from hpc_train.bench.result import Ratio, SideResult, ratio, side_result
from hpc_train.bench.rounds import WARM_UP, Side, Timings, begin, take_rounds
from hpc_train.bench.sides import hpc_train
from hpc_train.bench.startup import StartUp
from hpc_train.config.compose import compose
from hpc_train.config.degrees import resolve
from hpc_train.config.run import RunConfig
from hpc_train.data.datasets import Dataset, Indices
from hpc_train.runtime.identity import identify
from hpc_train.runtime.start import another_mesh
from hpc_train.training.folder import RunFolder
from hpc_train.training.rank import open_data


@dataclass(frozen=True)
class Pair:
    """One side of ours and the peer it is measured against."""

    ours: str
    peer: str
    ratio: Ratio
    """The peer's time over ours: above 1 means that ours is faster."""


@dataclass(frozen=True)
class PeerResult:
    """What `bench step --peers --json` prints."""

    model: str
    device: str
    ranks: int
    tokens_per_step: int
    rounds: int
    steps: int
    """A round and side."""
    base: str
    """The side that all are compared with: torch's own, without us."""
    sides: list[SideResult]
    over_base: dict[str, float]
    """Speed of each side over that of the base: above 1 is faster than it."""
    pairs: list[Pair]
    missing: list[str]
    """Peers that are not installed."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def measure_peers(overrides: Sequence[str], rounds: int, steps: int) -> PeerResult:
    """Measure on all ranks of this job; every rank gets the result. Raises UserError as a run would."""
    base = compose(overrides)
    with started(base, StartUp()) as (world, folder), ExitStack() as stack:
        data = open_data(base, world)
        ours = list(SEVERAL if world.size > 1 else ALONE) + (list(MPI) if _is_mpi() and world.size > 1 else [])
        loops = peers(data, base, world)
        order = sample_order(base, world, data, WARM_UP + rounds * steps)
        sides = [begin(name, partial(_theirs, loop, base, world, order)) for name, loop in loops.items()]
        for side in ours:
            config = compose([*overrides, *side.overrides])
            sides.append(begin(side.name, partial(_ours, config, world, folder, data, stack)))
        timings = take_rounds(sides, rounds, steps)
        return _summary(base, world, data, sides, timings, ours, loops, steps)


def _is_mpi() -> bool:
    me = identify(os.environ)
    return me is not None and me.launcher == "mpi"


def _theirs(loop: Loop, config: RunConfig, world: World, order: list[Indices]) -> Iterator[float]:
    return loop(same_model(config, world), order)


def _ours(config: RunConfig, world: World, folder: RunFolder, data: Dataset, stack: ExitStack) -> Iterator[float]:
    own = another_mesh(world, resolve(config.parallel, world.size))
    return hpc_train(stack.enter_context(assembled(config, own, folder, data)))


def _summary(
    config: RunConfig,
    world: World,
    data: Dataset,
    sides: list[Side],
    timings: Timings,
    ours: list[Ours],
    loops: dict[str, Loop],
    steps: int,
) -> PeerResult:
    tokens, names = config.train.global_batch * data.tokens_per_sample, [side.name for side in sides]
    wall, cpu = timings.wall, timings.cpu
    results = [side_result(side, wall[:, i], cpu[:, i], tokens) for i, side in enumerate(sides)]
    pairs = []
    for side in ours:
        if side.against in names:
            columns = [names.index(side.name), names.index(side.against)]
            pairs.append(Pair(side.name, side.against, ratio(wall[:, columns], cpu[:, columns])))
    return PeerResult(
        model=config.model.name,
        device=world.device.type,
        ranks=world.size,
        tokens_per_step=tokens,
        rounds=len(wall),
        steps=steps,
        base=names[0],
        sides=results,
        over_base={side.name: results[0].seconds / side.seconds for side in results},
        pairs=pairs,
        missing=sorted({side.against for side in ours} - set(loops)),
    )
