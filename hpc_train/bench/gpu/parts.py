"""The parts of `bench gpu`, each a function that measures on one device and returns its rows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.bench.gpu.copies import measure_checkpoint, measure_offload
from hpc_train.bench.gpu.gpu_table import PartResult, Row
from hpc_train.bench.gpu.step_sides import (
    MAX_NORM,
    Step,
    find_peak,
    make_batch,
    make_config,
    make_engine,
    make_hand_written_step,
    make_our_step,
)
from hpc_train.bench.gpu.waits import measure_waits
from hpc_train.bench.loss import CountMemory
from hpc_train.config.compose import compose
from hpc_train.config.parallel import resolve_degrees
from hpc_train.config.run import RunConfig
from hpc_train.interfaces import Engine, World
from hpc_train.models.counts import compute_flops_per_token
from hpc_train.parallel.optimizer_step import get_local
from hpc_train.planner.rehearsal.checks import plan_memory_by_rank
from hpc_train.runtime.start import init, leave_process_group
from hpc_train.timing import interleave_rounds, time_calls
from hpc_train.training.numerics.step_numbers import read_step_numbers

Rows = Iterator[Row]


def measure_part(name: str, device: str, quick: bool) -> PartResult:
    """Measure one part in this process. An error is the reason in its result; rows before it are kept."""
    started, rows, failed = time.monotonic(), list[Row](), None
    try:
        with start_alone(device) as world:
            for row in _find_part(name)(world, quick):
                rows.append(row)
    except Exception as error:  # whatever a card does, the other parts are worth having
        lines = str(error).strip().splitlines()
        failed = f"{type(error).__name__}: {lines[0] if lines else ''}"
    return PartResult(name, time.monotonic() - started, tuple(rows), failed)


def _find_part(name: str) -> Callable[[World, bool], Rows]:
    parts: dict[str, Callable[[World, bool], Rows]] = {
        "waits": measure_waits,
        "parity": measure_parity,
        "memory": measure_memory,
        "llama_1b": partial(measure_speed, shape="llama_1b", cases={"bf16": ("parallel.compile=true",)}),
        "blocks_8b": partial(
            measure_speed,
            shape="blocks_8b",
            cases={
                "bf16": ("parallel.compile=true",),
                "fp8": ("parallel.compile=true", "precision=fp8"),
            },
        ),
        "offload": measure_offload,
        "checkpoint": measure_checkpoint,
        "eager": partial(measure_speed, shape="llama_1b", cases={"bf16, not compiled": ()}),
    }
    return parts[name]


@contextmanager
def start_alone(device: str) -> Iterator[World]:
    """Join a job of this process alone, on the device."""
    joined = dist.is_initialized()
    world = init()
    try:
        yield world if device == "cuda" else replace(world, device=torch.device("cpu"))
    finally:
        if not joined:
            leave_process_group()


# Speed.

_ROUNDS, _ROUND_SECONDS = 5, 1.0
_WARM_UP_STEPS = 3


def measure_speed(world: World, quick: bool, shape: str, cases: dict[str, tuple[str, ...]]) -> Rows:
    """Time our step and the hand-written one in interleaved rounds, all cases together.

    cases: overrides by name. Each has a row of MFU, of tokens/s and of the hand-written loop's time over ours.
    """
    configs = {case: make_config(shape, quick, *_without_compiler(more, quick)) for case, more in cases.items()}
    steps: list[Step] = []
    for config in configs.values():
        steps += [make_our_step(config, world), make_hand_written_step(config, world)]
    losses = [_warm_up(step) for step in steps]
    seconds = _time_steps(steps, world.device, 2 if quick else _ROUNDS, 0.0 if quick else _ROUND_SECONDS)
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
    medians = []
    for index, (case, config) in enumerate(configs.items()):
        own_seconds, reference_seconds = seconds[2 * index], seconds[2 * index + 1]
        medians.append(statistics.median(own_seconds))
        yield from _list_speeds(case, config, own_seconds, reference_seconds, name)
        first, other = losses[2 * index : 2 * index + 2]
        yield Row(f"{case}: first loss, ours less the loop's", first - other, "", f"{first:.6g} and {other:.6g}")
    if len(medians) > 1:
        first_case, second_case, *_ = cases
        yield Row(f"{second_case} over {first_case}, speed", medians[0] / medians[1], "x", "of our steps")


def _warm_up(step: Step) -> float:
    """Run the first steps, in which memory is allocated and blocks are compiled; returns the first loss."""
    losses = [step() for _ in range(_WARM_UP_STEPS)]
    return losses[0]


def _without_compiler(overrides: tuple[str, ...], quick: bool) -> tuple[str, ...]:
    """Leave compilation out where shapes are tiny: it would take longer than everything else."""
    return tuple(override for override in overrides if not (quick and override == "parallel.compile=true"))


def _time_steps(steps: list[Step], device: torch.device, rounds: int, least: float) -> list[list[float]]:
    """Return the seconds per step of every side in each round. least: seconds of a round of the first side."""
    calls = max(1, round(least / time_calls(steps[0], 1, device)))
    seconds = [[0.0] * rounds for _ in steps]
    for number, index in interleave_rounds(rounds, len(steps)):
        seconds[index][number] = time_calls(steps[index], calls, device)
    return seconds


def _list_speeds(case: str, config: RunConfig, ours: list[float], theirs: list[float], device: str) -> Rows:
    tokens, step_seconds = config.train.global_batch * config.train.sequence_length, statistics.median(ours)
    flops = compute_flops_per_token(config.model, config.train.sequence_length)
    peak = find_peak(device, "bf16")
    mfu = None if peak is None or flops is None else flops * tokens / step_seconds / peak
    why = "the peak of this device is in no file of conf/cluster" if peak is None else "against the peak of bf16"
    yield Row(f"{case}: MFU", mfu, "share", why)
    yield Row(
        f"{case}: speed", tokens / step_seconds, "tokens/s", f"{tokens} tokens per step, {step_seconds * 1e3:.4g} ms"
    )
    ratios = sorted(other / our_seconds for our_seconds, other in zip(ours, theirs, strict=True))
    span = f"time of the loop over ours; rounds {ratios[0]:.3f} to {ratios[-1]:.3f}"
    yield Row(f"{case}: over the hand-written loop", statistics.median(ratios), "x", span)


# Parity.

TOLERANCES = {"fp32": 1e-4, "bf16": 5e-2, "fp8": 3e-1}
"""Largest relative error of the gradient that is expected of a format, against float64 on the CPU."""


def measure_parity(world: World, quick: bool) -> Rows:
    """Compare loss and gradient of a step on the device with float64 on the CPU, for each format."""
    exact = replace(world, device=torch.device("cpu"))
    size = () if quick else ("model.hidden=256", "model.feed_forward=512")
    loss, gradients = _differentiate(exact, ("precision=fp64", *size))
    length = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
    for name, tolerance in TOLERANCES.items():
        loss_on_gpu, others = _differentiate(world, (f"precision={name}", *size))
        off = torch.stack([(a - b).square().sum() for a, b in zip(others, gradients, strict=True)]).sum().sqrt()
        error = float(off / length)
        verdict = "as expected" if error <= tolerance else "**more than expected**"
        yield Row(f"{name}: error of the gradient", error, "", f"{verdict} (up to {tolerance:g})")
        error = abs(loss_on_gpu - loss) / abs(loss)
        yield Row(f"{name}: error of the loss", error, "", "relative, against float64 on the CPU")


def _differentiate(world: World, overrides: tuple[str, ...]) -> tuple[float, list[Tensor]]:
    """Return the loss of a step, and its gradients in float64 on the CPU."""
    batch = ("train.sequence_length=64", "train.micro_batch=2", "train.global_batch=2")
    config = compose(["model=llama_tiny", *batch, "parallel=ddp", *overrides])
    engine = make_engine(config, world)
    sums = engine.forward_backward(make_batch(config, world.device))
    numbers = read_step_numbers(sums, engine.clip(None))
    (part,) = engine.parts
    return numbers.loss, [get_local(p.grad).double().cpu() for p in part.parameters() if p.grad is not None]


# Memory.


def measure_memory(world: World, quick: bool) -> Rows:
    """Compare the peak of two steps of llama_1b with the plan's; on a CPU torch's operators are counted."""
    config = make_config("llama_1b", quick)
    planned = sum(plan_memory_by_rank(config, resolve_degrees(config.parallel, 1), {0: 0})[0].values())
    peak = _measure_peak(config, world)
    yield Row("peak", peak / 2**20, "MiB", "of torch's allocator" if world.device.type == "cuda" else "counted")
    yield Row("planned", planned / 2**20, "MiB")
    yield Row("peak over plan", peak / planned, "x", "the planner promises 0.95 to 1.05 of what is counted")


def _measure_peak(config: RunConfig, world: World) -> float:
    def run() -> None:
        engine = make_engine(config, world)
        for _ in range(2):
            _train(engine, config, world)

    if world.device.type != "cuda":
        with CountMemory() as counted:
            run()
        return float(counted.ledger.worst().total)
    torch.cuda.reset_peak_memory_stats(world.device)
    run()
    return float(torch.cuda.max_memory_allocated(world.device))


def _train(engine: Engine, config: RunConfig, world: World) -> None:
    sums = engine.forward_backward(make_batch(config, world.device))
    read_step_numbers(sums, engine.clip(MAX_NORM))
    engine.update(config.optim.lr)
