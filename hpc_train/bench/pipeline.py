"""`hpc-train bench bubble`: what each pipeline schedule really loses, beside what its simulated order says.

Every rank is a process whose stages sleep for known times, run by the engine's own stages and torch's schedules over
gloo. Torch's time to send, receive and choose the next action, which the simulation has not, is part of what is lost.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_train.bench.local import run_as_ranks
from hpc_train.errors import EXIT_DONE, EXIT_USER_ERROR, UserError
from hpc_train.runtime.identity import Identity, identify
from hpc_train.schedules import table
from hpc_train.schedules.actions import Order
from hpc_train.schedules.generate import orders
from hpc_train.schedules.validate import problem, runtime_problem

AGREE = 0.1
"""Relative difference of two bubbles that count as the same."""


@dataclass(frozen=True)
class Options:
    """What is measured."""

    schedules: tuple[str, ...]
    """Names, or files .csv."""
    ranks: int
    micro_batches: int
    rounds: int
    """Interleaved rounds of one step of each schedule."""
    milliseconds: float
    """Of F, of I and of W of one micro-batch on one rank, over all its stages."""


@dataclass(frozen=True)
class ScheduleResult:
    """One schedule; shares of a step's time, from the first action of any rank to the last."""

    name: str
    stages: int
    simulated_bubble: float
    """Mean over ranks."""
    measured_bubble: float
    """Median over rounds of the same."""
    quartiles: tuple[float, float]
    difference: float
    """Measured over simulated, less 1."""
    simulated_seconds: float
    measured_seconds: float
    """Of a step."""
    simulated_ranks: tuple[float, ...]
    """The bubble of each rank."""
    measured_ranks: tuple[float, ...]
    live: tuple[int, ...]
    """Largest number of activations, of one stage and one micro-batch, that each rank holds at once."""


@dataclass(frozen=True)
class Result:
    """What `bench bubble --json` prints."""

    options: Options
    schedules: list[ScheduleResult]
    refused: dict[str, str]
    """Schedules that cannot do these numbers, and why."""
    cpus: int
    load_average: float
    """Of the last minute, at the end; the ranks themselves sleep."""
    woke_first: bool
    """The ranks had real-time priority; without it, a load above `cpus` was in their way."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def bubble_command(options: Options, as_json: bool) -> int:
    """Start the ranks and measure; rank 0 prints. Returns the exit code; raises UserError for what cannot be run."""
    chosen, refused = choose(options)
    me = identify(os.environ)
    if me is None:
        return run_as_ranks(_arguments(options, as_json), options.ranks, threads=1)
    _check_ranks(me, options)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nothing is computed, and gloo needs no GPU
    from hpc_train.bench.pipeline_rank import measure
    from hpc_train.bench.sleeping import wake_first

    first = wake_first()
    try:
        results = measure(options, chosen)
    except UserError:
        if me.process == 0:
            raise
        return EXIT_USER_ERROR  # process 0 says it
    if me.process == 0:
        result = Result(options, results, refused, os.cpu_count() or 1, os.getloadavg()[0], first)
        print(result.to_json() if as_json else text(result))
    return EXIT_DONE


def choose(options: Options) -> tuple[dict[str, Order], dict[str, str]]:
    """The order of each schedule that can do these numbers, and why the others cannot. UserError if none can."""
    for name, value, least in (("ranks", options.ranks, 2), ("micro-batches", options.micro_batches, 1)):
        if value < least:
            raise UserError(f"--{name} {value}: must be at least {least}")
    if options.rounds < 1:
        raise UserError(f"--rounds {options.rounds}: must be at least 1")
    if not 0 < options.milliseconds < float("inf"):
        raise UserError(f"--milliseconds {options.milliseconds:g}: must be above 0")
    chosen: dict[str, Order] = {}
    refused: dict[str, str] = {}
    for name in options.schedules:
        try:
            chosen[name] = _order(name, options)
        except UserError as error:
            refused[name] = str(error)
    if not chosen:
        raise UserError(next(iter(refused.values())))
    return chosen, refused


def _order(name: str, options: Options) -> Order:
    if not name.endswith(".csv"):
        return orders(name, options.ranks, options.micro_batches)
    order = table.read(Path(name))
    if order.ranks != options.ranks:
        raise UserError(f"{name}: has {order.ranks} lines, one a rank, but --ranks {options.ranks}")
    if wrong := problem(order, options.micro_batches) or runtime_problem(order):
        raise UserError(f"{name}: {wrong}")
    return order


def _arguments(options: Options, as_json: bool) -> list[str]:
    numbers = ["--ranks", options.ranks, "--micro-batches", options.micro_batches, "--rounds", options.rounds]
    words = [*numbers, "--milliseconds", options.milliseconds]
    for name in options.schedules:
        words += ["--schedule", name]
    return ["bench", "bubble", *map(str, words), *(["--json"] if as_json else [])]


def _check_ranks(me: Identity, options: Options) -> None:
    """Ranks of another launcher are welcome if they are as many, on one node: their clocks are compared."""
    if me.nodes > 1 or me.processes != options.ranks:
        raise UserError(
            f"bench bubble: is one of {me.processes} processes on {me.nodes} nodes, but --ranks {options.ranks} are "
            "those of one node; start it once and without a launcher, and it starts its ranks itself"
        )


def text(result: Result) -> str:
    """The result for a person."""
    options = result.options
    wide = max(len(schedule.name) for schedule in result.schedules)
    lines = [
        f"{options.ranks} ranks, {options.micro_batches} micro-batches; F, I and W of a rank sleep "
        f"{options.milliseconds:g} ms each; {options.rounds} interleaved rounds; {result.cpus} CPUs, load "
        f"{result.load_average:.1f}{' (ranks with real-time priority)' if result.woke_first else ''}",
        f"{'schedule':{wide}} {'stages':>6} {'simulated':>10} {'measured (quartiles)':>26} {'difference':>11} "
        f"{'step s: simulated':>18} {'measured':>9} {'live':>5}",
        *(_line(schedule, wide) for schedule in result.schedules),
        *(f"left out: {why}" for why in result.refused.values()),
        _verdict(result),
    ]
    return "\n".join(lines)


def _line(schedule: ScheduleResult, wide: int) -> str:
    low, high = (f"{share:.2%}" for share in schedule.quartiles)
    measured = f"{schedule.measured_bubble:.2%} ({low} - {high})"
    return (
        f"{schedule.name:{wide}} {schedule.stages:6} {schedule.simulated_bubble:10.2%} {measured:>26} "
        f"{schedule.difference:+11.1%} {schedule.simulated_seconds:18.3f} {schedule.measured_seconds:9.3f} "
        f"{max(schedule.live):5}"
    )


def _verdict(result: Result) -> str:
    off = [schedule.name for schedule in result.schedules if abs(schedule.difference) > AGREE]
    if not off:
        return f"The bubble of every schedule is within {AGREE:.0%} of what its order says."
    return f"Not within {AGREE:.0%} of what its order says: {', '.join(off)}."
