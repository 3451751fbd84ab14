"""One rank of mpirun for test_server.py: trains with and without servers in one job, and prints what it observed."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from late_copies import assert_same, save_both_ways
from outcome import engine_steps, held, whole
from plain_setup import engine_of, global_batch, share

from hpc_train.checkpoint import load_step, save_step
from hpc_train.config.compose import compose
from hpc_train.config.run import RunConfig
from hpc_train.interfaces import Engine, World
from hpc_train.parallel.engines.server_engine import ServerEngine
from hpc_train.parallel.parameter_server.asynchronous import AsynchronousUpdates
from hpc_train.runtime.start import join, leave_process_group, make_identity_map, start

STEPS = (0, 1)
MODES = ("synchronous", "asynchronous", "peer")


def config_of(*overrides: str) -> RunConfig:
    """Return the configuration: float64, with clipping at every step."""
    return compose(("precision=fp64", "train.global_batch=24", "optim.max_norm=0.05", "optim.eps=1e-6", *overrides))


def everybody(world: World, mine: Any) -> list[Any]:
    """Return every rank's value."""
    values: list[Any] = [None] * world.size
    torch.distributed.all_gather_object(values, mine)
    return values


def synchronous(world: World) -> dict[str, Any]:
    """Return the largest difference to an all-reduce in the same job, for every way to place the servers."""
    found = {}
    nodes = replace(world, local_rank=world.rank % 2)  # as if there were two nodes of two ranks
    truth = _trained(config_of(), world)
    for name, where, options in (
        ("one", world, ()),
        ("sharded", world, ("parallel.server.servers=3",)),
        ("replicated", nodes, ("parallel.server.servers=2", "parallel.server.replicas=2")),
        ("hybrid", nodes, ("parallel.server.servers=2", "parallel.server.hybrid=true")),
    ):
        got = _trained(config_of("parallel.server.mode=synchronous", *options), where)
        assert got.keys() == truth.keys()
        found[name] = max(abs(got[key] - truth[key]).max() for key in truth)
    return found


def _trained(config: RunConfig, world: World) -> dict[str, Any]:
    outcome = engine_steps(engine_of("tied", config, world), world, config, "tied", "two", STEPS)
    ranks = everybody(world, outcome)
    arrays = whole([rank.state for rank in ranks])
    return {**arrays, "loss": torch.tensor(outcome.losses).numpy(), "norm": torch.tensor(outcome.norms).numpy()}


def resumed(world: World, folder: Path) -> float:
    """Return the largest difference between continuing and resuming from a checkpoint with other servers."""
    config = config_of("parallel.server.mode=synchronous", "parallel.server.servers=2")
    engine = engine_of("tied", config, world)
    engine_steps(engine, world, config, "tied", "one", STEPS)
    save_step(folder, len(STEPS), engine.shards(), {}, world).wait()
    other = config_of("parallel.server.mode=synchronous", "parallel.server.servers=1")
    again = engine_of("tied", other, world)
    load_step(folder, len(STEPS), again.shards(), world)
    states = []
    for continued in (engine, again):
        outcome = engine_steps(continued, world, config, "tied", "one", (len(STEPS),))
        states.append(whole([rank.state for rank in everybody(world, outcome)]))
    return float(max(abs(states[0][key] - states[1][key]).max() for key in states[0]))


def asynchronous(world: World, *options: str) -> dict[str, Any]:
    """Return losses of workers of which the last is slow, the spread of their clocks, and when a stop takes effect."""
    config = config_of("parallel.server.mode=asynchronous", "parallel.server.staleness=2", *options)
    where = replace(world, local_rank=world.rank % 2)
    engine = engine_of("untied", config, where)
    assert isinstance(engine, ServerEngine)
    updates = engine._updates
    assert isinstance(updates, AsynchronousUpdates)
    losses, ahead, stopped, began = [], 0, None, time.monotonic()
    for step in range(50):
        batch = share(global_batch("untied", 0), world, "one")
        batch.stop = world.rank == 1 and step == 40
        sums = engine.forward_backward(batch)
        if updates._ranks.leads:
            done = updates._clock._read()[:-1]
            ahead = max(ahead, int(updates._clock.updates - done.min()))
        losses.append(float(sums.loss) / sums.tokens)
        engine.clip(1.0)
        engine.update(3e-3)
        if world.rank == world.size - 1:
            time.sleep(0.01)
        if sums.stop:
            stopped = step
            break
    seconds = time.monotonic() - began
    evaluated = engine.evaluate(share(global_batch("untied", 0), world, "one"))
    whole(everybody(world, held(engine.shards())))  # copies agree, nothing is missing
    return {
        "first": losses[0],
        "evaluated": float(evaluated.loss) / evaluated.tokens,
        "ahead": ahead,
        "stopped": stopped,
        "seconds": seconds,
    }


def peers(world: World) -> dict[str, Any]:
    """Return losses of the common batch under neighbour averaging, and how far apart the copies are before a save."""
    config = config_of("parallel.server.mode=peer")
    engine = engine_of("untied", config, world)
    losses = []
    for _ in range(30):
        sums = engine.forward_backward(share(global_batch("untied", 0), world, "one"))
        losses.append(float(sums.loss) / sums.tokens)
        engine.clip(1.0)
        engine.update(3e-3)
    apart = _apart(engine, world)
    list(engine.shards())
    return {"first": losses[0], "last": losses[-1], "apart": apart, "apart_after": _apart(engine, world)}


def _apart(engine: Engine, world: World) -> float:
    flat = torch.cat([p.detach().flatten() for p in engine.parts[0].parameters()])
    others = everybody(world, flat)
    return float(max((other - flat).norm() for other in others) / flat.norm())


def saved(world: World, mode: str, folder: Path) -> tuple[list[str], int]:
    """Return the errors of saves beside the next step, and how many tensors of this rank they copied late."""
    config = config_of(f"parallel.server.mode={mode}")
    found = save_both_ways(
        world,
        lambda world: engine_of("untied", config, world),
        lambda world, step: share(global_batch("untied", step), world, "one"),
        folder / mode,
    )
    torch.distributed.barrier()
    assert_same(folder / mode)
    return found


def main(folder: Path) -> None:
    """Run every scenario in one job; rank 0 prints the results as JSON."""
    torch.set_num_threads(1)
    task = join(timeout=timedelta(seconds=60))
    world = start(task, make_identity_map(task), config_of())
    found = {
        "synchronous": synchronous(world),
        "resumed": resumed(world, folder),
        "asynchronous": everybody(world, asynchronous(world, "parallel.server.servers=2")),
        "hybrid": everybody(world, asynchronous(world, "parallel.server.replicas=2", "parallel.server.hybrid=true")),
        "peer": everybody(world, peers(world)),
        "saved": {mode: everybody(world, saved(world, mode, folder)) for mode in MODES},
    }
    if world.rank == 0:
        print(json.dumps(found))
    leave_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
