"""`bench step --peers`: compare all our strategies with other libraries, in interleaved rounds of one job.

Each side of ours is compared with one peer: torch's own DDP or FSDP, or DeepSpeed if it is installed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from hpc_train.bench.rounds import WARM_UP_STEPS, RoundTimings, Side, time_rounds, warm_up_side
from hpc_train.bench.step.step import StartupTimer
from hpc_train.bench.step.step_rank import (
    assemble_bench_run,
    draw_sample_order,
    hand_written_steps,
    make_same_model,
    run_our_steps,
    start_job,
)
from hpc_train.bench.step.step_result import SideResult, TimeRatio, compare_sides, summarise_side
from hpc_train.config.compose import compose
from hpc_train.config.parallel import resolve_degrees
from hpc_train.config.run import RunConfig
from hpc_train.data.datasets import Dataset, Indices, require_indexed
from hpc_train.interfaces import World
from hpc_train.parallel.user_model import get_named_blocks, require_one_input
from hpc_train.runtime.identity import identify_process
from hpc_train.runtime.start import make_another_mesh
from hpc_train.training.factory import open_data
from hpc_train.training.run_directory import RunDirectory


@dataclass(frozen=True)
class PeerPair:
    """A side of ours compared with its peer."""

    ours: str
    peer: str
    ratio: TimeRatio
    """The peer's time over ours: above 1 means that ours is faster."""


@dataclass(frozen=True)
class PeerResult:
    """The result that `bench step --peers --json` prints."""

    model: str
    device: str
    ranks: int
    tokens_per_step: int
    rounds: int
    steps: int
    """Steps of each side in a round."""
    base: str
    """Name of the side that all are compared with: torch's own loop."""
    sides: list[SideResult]
    over_base: dict[str, float]
    """Speed of each side over that of the base; above 1 is faster."""
    pairs: list[PeerPair]
    missing: list[str]
    """Peers that are not installed."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def measure_peers(overrides: Sequence[str], rounds: int, steps: int) -> PeerResult:
    """Measure on all ranks of this job; every rank gets the result. Raises UserError as a run would."""
    base = compose(overrides)
    with start_job(base, StartupTimer()) as (world, folder), ExitStack() as stack:
        data = require_indexed(open_data(base, world))
        ours = list(SIDES_OF_SEVERAL_RANKS if world.size > 1 else SIDES_OF_ONE_RANK) + (
            list(SIDES_WITH_MPI) if _started_by_mpi() and world.size > 1 else []
        )
        loops = make_peer_loops(data, base, world)
        order = draw_sample_order(base, world, data, WARM_UP_STEPS + rounds * steps)
        sides = [
            warm_up_side(name, partial(_make_peer_steps, loop, base, world, order)) for name, loop in loops.items()
        ]
        for side in ours:
            config = compose([*overrides, *side.overrides])
            sides.append(warm_up_side(side.name, partial(_make_our_steps, config, world, folder, data, stack)))
        timings = time_rounds(sides, rounds, steps)
        return _summarise_peers(base, world, data, sides, timings, ours, loops, steps)


def _started_by_mpi() -> bool:
    identity = identify_process(os.environ)
    return identity is not None and identity.launcher == "mpi"


def _make_peer_steps(loop: Loop, config: RunConfig, world: World, order: list[Indices]) -> Iterator[float]:
    return loop(make_same_model(config, world), order)


def _make_our_steps(
    config: RunConfig, world: World, folder: RunDirectory, data: Dataset, stack: ExitStack
) -> Iterator[float]:
    mesh = make_another_mesh(world, resolve_degrees(config.parallel, world.size))
    return run_our_steps(stack.enter_context(assemble_bench_run(config, mesh, folder, data)))


def _summarise_peers(
    config: RunConfig,
    world: World,
    data: Dataset,
    sides: list[Side],
    timings: RoundTimings,
    ours: list[OurSide],
    loops: dict[str, Loop],
    steps: int,
) -> PeerResult:
    """Compare every side with the first one, and each of ours with its peer's loop."""
    tokens, names = config.train.global_batch * data.tokens_per_sample, [side.name for side in sides]
    wall, cpu = timings.wall, timings.cpu
    results = [summarise_side(side, wall[:, i], cpu[:, i], tokens) for i, side in enumerate(sides)]
    pairs = []
    for side in ours:
        if side.against in names:
            columns = [names.index(side.name), names.index(side.against)]
            pairs.append(PeerPair(side.name, side.against, compare_sides(wall[:, columns], cpu[:, columns])))
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


@dataclass(frozen=True)
class OurSide:
    """A side of ours: its overrides, and the peer that it is compared with."""

    name: str
    overrides: tuple[str, ...]
    against: str


SIDES_OF_SEVERAL_RANKS = (
    OurSide("ddp", ("parallel.strategy=ddp",), "torch_ddp"),
    OurSide("zero1", ("parallel.strategy=zero1",), "deepspeed_1"),
    OurSide("zero2", ("parallel.strategy=zero2",), "deepspeed_2"),
    OurSide("zero3", ("parallel.strategy=zero3",), "torch_fully_shard"),
    OurSide("zero3_again", ("parallel.strategy=zero3",), "deepspeed_3"),
)
"""Our sides on several ranks. zero3_again repeats zero3: the difference of the two is noise."""

SIDES_WITH_MPI = (
    OurSide("ddp_mpi", ("parallel.strategy=ddp", "parallel.reduce_with=mpi"), "torch_ddp"),
    OurSide("servers_synchronous", ("parallel.server.mode=synchronous",), "torch_ddp"),
    OurSide("servers_asynchronous", ("parallel.server.mode=asynchronous",), "torch_ddp"),
    OurSide("neighbours", ("parallel.server.mode=peer",), "torch_ddp"),
)
"""Our sides if MPI started the ranks."""

SIDES_OF_ONE_RANK = (
    OurSide("fp32", ("precision=fp32",), "torch_loop"),
    OurSide("bf16", ("precision=bf16",), "torch_loop"),
    OurSide("bf16_compile", ("precision=bf16", "parallel.compile=true"), "torch_loop"),
)
"""Our sides on one rank."""

Loop = Callable[[nn.Module, Iterable[Indices]], Iterator[float]]


def make_peer_loops(data: Dataset, config: RunConfig, world: World) -> dict[str, Loop]:
    """Return the loops of the peers, by name; DeepSpeed's if it is installed."""

    def torch_loop(model: nn.Module, order: Iterable[Indices]) -> Iterator[float]:
        return hand_written_steps(model, data, order, config, world, tuned=False)

    def torch_fully_shard(model: nn.Module, order: Iterable[Indices]) -> Iterator[float]:
        return _fully_sharded(model, data, order, config, world)

    if world.size == 1:
        return {"torch_loop": torch_loop}
    loops: dict[str, Loop] = {"torch_ddp": torch_loop, "torch_fully_shard": torch_fully_shard}
    if find_spec("deepspeed") is not None:
        for stage in (1, 2, 3):
            loops[f"deepspeed_{stage}"] = _run_deepspeed(data, config, world, stage)
    return loops


def _fully_sharded(
    model: nn.Module, data: Dataset, order: Iterable[Indices], config: RunConfig, world: World
) -> Iterator[float]:
    """Train with torch's fully_shard as its documentation shows: shard each block, then the whole model."""
    for block in get_named_blocks(model).values():
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr)
    for indices in order:
        inputs, targets = data.get(indices)
        inputs = require_one_input(inputs, "bench step", "the plain loop takes one")
        total = torch.zeros((), device=world.device)
        for x, y, share, last in _micro_batches(inputs.to(world.device), targets.to(world.device), config):
            assert isinstance(model, FSDPModule)
            model.set_requires_gradient_sync(last)
            loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten()) * share
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.max_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        yield total.item()


def _run_deepspeed(data: Dataset, config: RunConfig, world: World, stage: int) -> Loop:
    def loop(model: nn.Module, order: Iterable[Indices]) -> Iterator[float]:
        engine = _make_deepspeed_engine(model, config, world, stage)
        for indices in order:
            inputs, targets = data.get(indices)
            inputs = require_one_input(inputs, "bench step", "DeepSpeed's loop takes one")
            total = torch.zeros((), device=world.device)
            for x, y, share, _ in _micro_batches(inputs.to(world.device), targets.to(world.device), config):
                loss = F.cross_entropy(engine(x).flatten(0, -2), y.flatten())
                engine.backward(loss)
                engine.step()
                total += loss.detach() * share
            yield total.item()

    return loop


def _make_deepspeed_engine(model: nn.Module, config: RunConfig, world: World, stage: int):  # type: ignore[no-untyped-def]
    """Make a DeepSpeed engine with its defaults and torch's AdamW."""
    os.environ.setdefault("LOCAL_RANK", str(world.local_rank))  # which DeepSpeed's own launcher would set
    import deepspeed

    micro, batch = config.train.micro_batch, config.train.global_batch
    settings = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": max(1, batch // world.dp_size // micro),
        "gradient_clipping": config.optim.max_norm or 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": config.optim.lr, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 1 << 30,
    }
    deepspeed.init_distributed(dist_backend="gloo")
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]


def _micro_batches(inputs: Tensor, targets: Tensor, config: RunConfig) -> Iterator[tuple[Tensor, Tensor, float, bool]]:
    """Yield (inputs, targets, share of the rank's batch, whether it is the last) of each micro-batch."""
    size = config.train.micro_batch
    for cut in range(0, len(targets), size):
        x, y = inputs[cut : cut + size], targets[cut : cut + size]
        yield x, y, len(y) / len(targets), cut + size >= len(targets)
