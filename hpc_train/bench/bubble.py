"""`hpc-train bench bubble`: measure the bubble of each pipeline schedule, and compare it with the simulation.

Every rank is a process whose stages sleep for known times instead of computing. The engine's own stages and torch's
schedules run them over gloo. The measured bubble includes torch's time to send, receive and choose the next action,
which the simulation lacks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hpc_train.bench.local_ranks import run_local_ranks
from hpc_train.errors import EXIT_DONE, EXIT_USER_ERROR, UserError
from hpc_train.garbage_collection import pause_gc
from hpc_train.runtime.identity import ProcessIdentity, identify_process
from hpc_train.schedules.generate import generate_order
from hpc_train.schedules.order import Order, read_order
from hpc_train.schedules.validate import find_problem, find_runtime_problem

TOLERANCE = 0.1
"""Maximum relative difference of two bubbles that count as equal."""


@dataclass(frozen=True)
class BubbleOptions:
    """Options of `bench bubble`."""

    schedules: tuple[str, ...]
    """Names of schedules, or .csv files."""
    ranks: int
    micro_batches: int
    rounds: int
    """Number of interleaved rounds; a round is one step of each schedule."""
    milliseconds: float
    """Milliseconds of F, of I and of W of one micro-batch on one rank, over all its stages; the mean over ranks."""
    costs: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Relative times of the stages of a schedule, by its name; all stages alike if it is not here."""


@dataclass(frozen=True)
class ScheduleResult:
    """Result of one schedule. Bubbles are fractions of a step, from the first action of any rank to the last."""

    name: str
    stages: int
    simulated_bubble: float
    """Simulated bubble, mean over ranks."""
    measured_bubble: float
    """Measured bubble, mean over ranks, median over rounds."""
    quartiles: tuple[float, float]
    difference: float
    """Measured over simulated, less 1."""
    simulated_seconds: float
    measured_seconds: float
    """Measured seconds of a step, median over rounds."""
    simulated_ranks: tuple[float, ...]
    """Simulated bubble of each rank."""
    measured_ranks: tuple[float, ...]
    live: tuple[int, ...]
    """Largest number of activations, of one stage and one micro-batch, that each rank holds at once."""


@dataclass(frozen=True)
class BubbleResult:
    """The result that `bench bubble --json` prints."""

    options: BubbleOptions
    schedules: list[ScheduleResult]
    refused: dict[str, str]
    """Schedules that are impossible with these numbers, and why."""
    cpus: int
    load_average: float
    """Load average of the last minute, at the end; the ranks themselves sleep."""
    woke_first: bool
    """Whether the ranks had real-time priority; without it, a load above `cpus` disturbs them."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def run_bubble_command(options: BubbleOptions, as_json: bool) -> int:
    """Start the ranks and measure; rank 0 prints. Returns the exit code; raises UserError for what cannot be run."""
    chosen, refused = choose_schedules(options)
    identity = identify_process(os.environ)
    if identity is None:
        return run_local_ranks(_rank_arguments(options, as_json), options.ranks, threads=1)
    _check_ranks(identity, options)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nothing is computed, and gloo needs no GPU
    with pause_gc(freeze=True):
        from hpc_train.bench.bubble_rank import measure_schedules, set_realtime_priority

    first = set_realtime_priority()
    try:
        results = measure_schedules(options, chosen)
    except UserError:
        if identity.process == 0:
            raise
        return EXIT_USER_ERROR  # process 0 prints the error for all
    if identity.process == 0:
        result = BubbleResult(options, results, refused, os.cpu_count() or 1, os.getloadavg()[0], first)
        print(result.to_json() if as_json else format_bubbles(result))
    return EXIT_DONE


def parse_costs(texts: Sequence[str], schedules: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """Parse NAME=TIME,TIME,... for some of the schedules. Raises UserError for anything else."""
    costs_by_name = {}
    for text in texts:
        name, _, values = text.rpartition("=")
        try:
            costs = tuple(float(value) for value in values.split(","))
        except ValueError:
            costs = ()
        if name not in schedules or not costs or not all(0 <= cost < float("inf") for cost in costs) or not sum(costs):
            raise UserError(
                f"--costs {text}: write SCHEDULE=TIME,TIME,... with a time of 0 or more for each stage of a schedule "
                "that is measured"
            )
        costs_by_name[name] = costs
    return costs_by_name


def choose_schedules(options: BubbleOptions) -> tuple[dict[str, Order], dict[str, str]]:
    """Return the order of each schedule that is possible, and why others are not. Raises UserError if none is."""
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
            chosen[name] = _make_order(name, options)
        except UserError as error:
            refused[name] = str(error)
            continue
        if name in options.costs and len(options.costs[name]) != chosen[name].stages:
            raise UserError(f"--costs {name}: {len(options.costs[name])} numbers for {chosen[name].stages} stages")
    if not chosen:
        raise UserError(next(iter(refused.values())))
    return chosen, refused


def _make_order(name: str, options: BubbleOptions) -> Order:
    if not name.endswith(".csv"):
        return generate_order(name, options.ranks, options.micro_batches)
    order = read_order(Path(name))
    if order.ranks != options.ranks:
        raise UserError(f"{name}: has {order.ranks} lines, one per rank, but --ranks {options.ranks}")
    if wrong := find_problem(order, options.micro_batches) or find_runtime_problem(order):
        raise UserError(f"{name}: {wrong}")
    return order


def _rank_arguments(options: BubbleOptions, as_json: bool) -> list[str]:
    numbers = ["--ranks", options.ranks, "--micro-batches", options.micro_batches, "--rounds", options.rounds]
    words = [*numbers, "--milliseconds", options.milliseconds]
    for name in options.schedules:
        words += ["--schedule", name]
    for name, costs in options.costs.items():
        words += ["--costs", f"{name}={','.join(map(str, costs))}"]
    return ["bench", "bubble", *map(str, words), *(["--json"] if as_json else [])]


def _check_ranks(identity: ProcessIdentity, options: BubbleOptions) -> None:
    """Check the ranks of another launcher: as many as asked for, on one node, because their clocks are compared."""
    if identity.nodes > 1 or identity.processes != options.ranks:
        raise UserError(
            f"bench bubble: is one of {identity.processes} processes on {identity.nodes} nodes, but "
            f"--ranks {options.ranks} are those of one node; start it once and without a launcher, and it starts its "
            "ranks itself"
        )


def format_bubbles(result: BubbleResult) -> str:
    """Format the result as text."""
    options = result.options
    width = max(len(schedule.name) for schedule in result.schedules)
    lines = [
        f"{options.ranks} ranks, {options.micro_batches} micro-batches; F, I and W of a rank sleep "
        f"{options.milliseconds:g} ms each; {options.rounds} interleaved rounds; {result.cpus} CPUs, load "
        f"{result.load_average:.1f}{' (ranks with real-time priority)' if result.woke_first else ''}",
        f"{'schedule':{width}} {'stages':>6} {'simulated':>10} {'measured (quartiles)':>26} {'difference':>11} "
        f"{'step s: simulated':>18} {'measured':>9} {'live':>5}",
        *(_format_schedule(schedule, width) for schedule in result.schedules),
        *(f"left out: {why}" for why in result.refused.values()),
        _format_verdict(result),
    ]
    return "\n".join(lines)


def _format_schedule(schedule: ScheduleResult, width: int) -> str:
    low, high = (f"{share:.2%}" for share in schedule.quartiles)
    measured = f"{schedule.measured_bubble:.2%} ({low} - {high})"
    return (
        f"{schedule.name:{width}} {schedule.stages:6} {schedule.simulated_bubble:10.2%} {measured:>26} "
        f"{schedule.difference:+11.1%} {schedule.simulated_seconds:18.3f} {schedule.measured_seconds:9.3f} "
        f"{max(schedule.live):5}"
    )


def _format_verdict(result: BubbleResult) -> str:
    off = [schedule.name for schedule in result.schedules if abs(schedule.difference) > TOLERANCE]
    if not off:
        return f"The bubble of every schedule is within {TOLERANCE:.0%} of the simulated one."
    return f"The bubble differs by more than {TOLERANCE:.0%} from the simulated one: {', '.join(off)}."
