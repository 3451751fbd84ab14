"""Run one rank of `bench sync` in its own network namespace: train with ddp and loosely over the same link."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from hpc_train.bench.thin_link.link import MEASURED_FILE, RANKS, configure_link, count_sent_bytes, limit_rate
from hpc_train.bench.thin_link.sync import SyncMeasurement, SyncOptions
from hpc_train.config.compose import compose
from hpc_train.config.model import TransformerConfig
from hpc_train.config.parallel import resolve_degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import EXIT_DONE, EXIT_USER_ERROR, UserError
from hpc_train.interfaces import Engine, MicroBatch, StepBatch, World
from hpc_train.models.initial_values import initialise_parameters
from hpc_train.models.registry import build_model
from hpc_train.parallel.apply import build
from hpc_train.runtime.start import make_world
from hpc_train.traffic.outer_exchange import count_bytes_sent
from hpc_train.training.optimizer import make_optimizer

_SIZES = (
    "model.hidden=512",
    "model.layers=4",
    "model.heads=8",
    "model.kv_heads=8",
    "model.feed_forward=1536",
    "train.global_batch=2",
    "train.micro_batch=1",
    "train.sequence_length=64",
)
"""Many parameters for little work, as on a GPU, where a step is short beside the time that a thin link takes."""


def main(rank: int, options: SyncOptions, folder: Path) -> int:
    """Measure as one rank; rank 0 writes the measurement."""
    sys.stdin.readline()  # the link is there now
    try:
        configure_link(rank)
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
        measured = _measure(rank, options)
    except UserError as error:
        print(f"hpc-train: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    if rank == 0:
        (folder / MEASURED_FILE).write_text(json.dumps(asdict(measured)))
    dist.barrier()
    dist.destroy_process_group()
    return EXIT_DONE


def _measure(rank: int, options: SyncOptions) -> SyncMeasurement:
    """Time ddp and loosely synchronised copies over a link of limited rate, and count the bytes that each sends."""
    steps = f"train.steps={options.every}"
    overrides = [*_SIZES, *options.overrides]
    plain = [override for override in overrides if not override.startswith("parallel.sync.")]
    ddp = compose([*plain, steps])
    loose = compose([*overrides, steps, f"parallel.sync.every={options.every}"])
    world = make_world(rank, RANKS, rank, torch.device("cpu"), resolve_degrees(ddp.parallel, RANKS))
    sides = {"ddp": (_train(ddp, world), options.steps), "loose": (_train(loose, world), options.every)}
    for training, count in sides.values():
        _time_steps(training, 1 if training is sides["ddp"][0] else count)  # warm up, and end at an exchange
    limit_rate(options.rate)
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    sent: dict[str, float] = {}
    for _ in range(options.rounds):
        for side, (training, count) in sides.items():
            before = count_sent_bytes()
            seconds[side].append(_time_steps(training, count))
            sent[side] = (count_sent_bytes() - before) / count
    with torch.device("meta"):
        numbers = sum(parameter.numel() for parameter in build_model(ddp.model).parameters())
    formula = {
        "ddp": 2 * (RANKS - 1) / RANKS * 4 * numbers,
        "loose": count_bytes_sent(numbers, 4, RANKS, loose.parallel.sync) / options.every,
    }
    tokens = ddp.train.global_batch * ddp.train.sequence_length
    return SyncMeasurement(numbers, tokens, seconds, sent, formula)


def _time_steps(training: Iterator[None], count: int) -> float:
    """Return the seconds of a step on the slower rank, over `count` steps."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(count):
        next(training)
    seconds = torch.tensor((time.perf_counter() - started) / count, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def _train(config: RunConfig, world: World) -> Iterator[None]:
    """Build the engine now, then make a step whenever the next one is asked for."""
    model = build_model(config.model)
    initialise_parameters(model, 0)
    return _make_steps(
        build(model, lambda part: make_optimizer(part, config.optim), config, world), _make_batches(config, world)
    )


def _make_batches(config: RunConfig, world: World) -> Sequence[MicroBatch]:
    rows, length = config.train.global_batch // RANKS, config.train.sequence_length
    generator = torch.Generator().manual_seed(world.rank)
    if not isinstance(config.model, TransformerConfig):
        raise UserError(f"model={config.model.name}: bench sync trains a transformer; choose one of its shapes")
    vocabulary = config.model.vocab_size
    inputs, targets = torch.randint(vocabulary, (2, rows, length), generator=generator)
    size = config.train.micro_batch
    return [MicroBatch(*pair) for pair in zip(inputs.split(size), targets.split(size), strict=True)]


def _make_steps(engine: Engine, batches: Sequence[MicroBatch]) -> Iterator[None]:
    step = 0
    while True:
        engine.forward_backward(StepBatch(list(batches), step=step))
        engine.clip(1.0)
        engine.update(1e-4)
        step += 1
        yield


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), SyncOptions(**json.loads(sys.argv[2])), Path(sys.argv[3])))
