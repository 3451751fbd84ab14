"""Measure copies between a GPU and the host: how much of them computation hides, and how long a checkpoint stops it."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import accumulate, takewhile
from pathlib import Path
from shutil import rmtree

import torch
from torch import Tensor, nn

from hpc_train.bench.gpu.gpu_table import Row
from hpc_train.bench.gpu.step_sides import Step, make_batch, make_config, make_engine
from hpc_train.bench.step.step_rank import make_same_model
from hpc_train.checkpoint import Saver
from hpc_train.interfaces import TensorShard, World
from hpc_train.parallel.memory.activation_offload import ActivationMoves, wrap_offload
from hpc_train.parallel.precision.number_formats import autocast_forward
from hpc_train.parallel.user_model import get_named_blocks, replace_forward
from hpc_train.timing import interleave_rounds, synchronize_device, time_calls

_ROUNDS = 5


def measure_offload(world: World, quick: bool) -> Iterator[Row]:
    """Time forward and backward of the blocks with and without offload, and the copies alone."""
    device = world.device
    config = make_config("blocks_8b", quick)
    moves = ActivationMoves(device)
    plain, offloading = (make_same_model(config, world) for _ in range(2))
    for block in get_named_blocks(offloading).values():
        replace_forward(block, partial(wrap_offload, block, moves))
    micro = make_batch(config, device).micro[0]
    assert isinstance(micro.inputs, Tensor)
    tokens = micro.inputs.to(device)

    def make_step(model: nn.Module) -> Step:
        def step() -> float:
            with autocast_forward(config.precision, device):
                total = model(tokens).float().mean()
            total.backward()
            model.zero_grad()
            return 0.0

        return step

    steps = [make_step(plain), make_step(offloading)]
    for step in steps * 2:
        step()
    rounds = 2 if quick else _ROUNDS
    seconds: list[list[float]] = [[0.0] * rounds for _ in steps]
    for number, index in interleave_rounds(rounds, 2):
        seconds[index][number] = time_calls(steps[index], 1, device)
    without, with_offload = (statistics.median(times) for times in seconds)
    out = moves.memory.count_free_bytes()
    back = out * (config.model.layers - 1) // config.model.layers  # type: ignore[attr-defined]
    copying = _time_copies(out, device) + _time_copies(back, device)
    yield Row("activations moved, a step", (out + back) / 2**20, "MiB", "to the host; back all but the last block's")
    yield Row("step without offload", without * 1e3, "ms", "forward and backward of the blocks")
    yield Row("step with offload", with_offload * 1e3, "ms")
    yield Row("the copies alone", copying * 1e3, "ms", "as many bytes to page-locked memory")
    hidden = 1 - (with_offload - without) / copying
    yield Row("hidden by the computation", hidden, "share", "1 - (with - without) / copies")


def _time_copies(size: int, device: torch.device) -> float:
    """Return the median seconds of a copy of `size` bytes to page-locked memory."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    copy()
    return statistics.median(time_calls(copy, 1, device) for _ in range(_ROUNDS))


_STATE_BYTES = 2 * 2**30


def measure_checkpoint(world: World, quick: bool) -> Iterator[Row]:
    """Save part of a training state three times; measure how long training stops, and the time until it is on disk."""
    config = make_config("blocks_8b", quick)
    shards = _take_shards(list(make_engine(config, world).shards()), _STATE_BYTES)
    size = sum(shard.local.nbytes for shard in shards)
    with tempfile.TemporaryDirectory(prefix="hpc_train-bench-") as folder:
        saver = Saver(Path(folder), world)
        yield Row("state", size / 2**20, "MiB", "parameters and optimizer state, in the temporary directory")
        for step, name in enumerate(("first save, which locks memory", "second save", "third save")):
            synchronize_device(world.device)
            started = time.perf_counter()
            saver.save(step, shards, {})
            stall = time.perf_counter() - started
            problems = [str(save.error) for save in saver.wait() if save.error is not None]
            seconds = time.perf_counter() - started
            if problems:
                raise OSError(problems[0])
            yield Row(
                f"{name}: stall",
                stall * 1e3,
                "ms",
                f"{size / stall / 1e9:.3g} GB/s; on the disk in {seconds:.3g} s",
            )
            rmtree(Path(folder) / f"step-{step}", ignore_errors=True)


def _take_shards(shards: list[TensorShard], limit: int) -> list[TensorShard]:
    """Return the first shards of up to `limit` bytes, at least one."""
    sizes = list(accumulate(shard.local.nbytes for shard in shards))
    return shards[: max(1, len(list(takewhile(lambda size: size <= limit, sizes))))]
