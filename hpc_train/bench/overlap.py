"""`hpc-train bench overlap`: how much of tensor parallelism's communication the asynchronous kind hides, in seconds.

Two ranks in two network namespaces compute a column- and a row-parallel layer, forward and backward, over a link that
is slow enough to matter. What counts is the exposed wait: a step's time less that of its products alone.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from hpc_train.bench.link import INTERFACE, start_apart, stop
from hpc_train.bench.local import leaving_when_told, wait
from hpc_train.errors import EXIT_DONE, UserError

RANKS = 2
MEASURED = "measured.json"
"""File in which rank 0 leaves what it measured."""


@dataclass(frozen=True)
class Options:
    """What is measured; every size in numbers of elements."""

    rounds: int
    """Interleaved rounds of all sides."""
    steps: int
    """A round and side."""
    tokens: int
    hidden: int
    ratio: float
    """Communication over compute that the rate of the link is chosen for."""
    rate: float | None
    """Mbit/s of the link instead."""
    threads: int = 1

    @property
    def feed_forward(self) -> int:
        """Features between the two layers."""
        return 4 * self.hidden


@dataclass(frozen=True)
class Measured:
    """What the ranks report."""

    mbit_per_second: float
    link_bytes: int
    """What a rank has to send in a step."""
    sent_bytes: dict[str, int]
    """What it did send, with all headers, by side."""
    seconds: dict[str, list[float]]
    """A step of the slower rank, by side and round."""


@dataclass(frozen=True)
class Way:
    """One of the two kinds; seconds a step, medians over rounds."""

    step_seconds: float
    communication_seconds: float
    """The same transfers with nothing to compute."""
    exposed_seconds: float
    """Step less compute of the same round."""
    exposed_quartiles: tuple[float, float]
    hidden: float
    """Share of the communication that took no time of the step's: 1 - exposed / communication."""
    sent_bytes: int
    """A step and rank, with all headers."""


@dataclass(frozen=True)
class Result:
    """What `bench overlap --json` prints."""

    options: Options
    mbit_per_second: float
    """Of the link, in each direction."""
    link_bytes: int
    """What a rank has to send in a step."""
    compute_seconds: float
    """The products and copies of a step alone, median over rounds."""
    synchronous: Way
    asynchronous: Way
    cpus: int
    load_average: float
    """Of the last minute, at the end: above `cpus`, others had a part of the machine."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def overlap_command(options: Options, as_json: bool) -> int:
    """Measure and print. Returns the exit code; raises UserError where a namespace or a link cannot be made."""
    _check(options)
    with leaving_when_told(), tempfile.TemporaryDirectory(prefix="hpc_train-bench-") as folder:
        code = _run_ranks(options, folder)
        if code:
            return code
        measured = Measured(**json.loads((Path(folder) / MEASURED).read_text()))
    result = summarise(options, measured)
    print(result.to_json() if as_json else text(result))
    return EXIT_DONE


def _check(options: Options) -> None:
    for name, least in (("rounds", 2), ("steps", 1), ("hidden", 1)):
        if getattr(options, name) < least:
            raise UserError(f"--{name} {getattr(options, name)}: must be at least {least}")
    if options.tokens < RANKS or options.tokens % RANKS:
        raise UserError(f"--tokens {options.tokens}: must be a multiple of the {RANKS} ranks")
    for name in ("ratio", "rate"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"--{name} {value}: must be above 0")


def _run_ranks(options: Options, folder: str) -> int:
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "GLOO_SOCKET_IFNAME": INTERFACE}
    base = [sys.executable, "-m", "hpc_train.bench.overlap_rank"]
    commands = [[*base, str(rank), json.dumps(asdict(options)), folder] for rank in range(RANKS)]
    processes = start_apart(commands, environment)
    try:
        return wait(processes)
    finally:
        stop(processes)


def summarise(options: Options, measured: Measured) -> Result:
    """From rounds to medians; the exposed wait is a median of differences, so that a slow round cancels."""
    return Result(
        options=options,
        mbit_per_second=measured.mbit_per_second,
        link_bytes=measured.link_bytes,
        compute_seconds=float(np.median(measured.seconds["compute_alone"])),
        synchronous=_way(measured, "synchronous", "collectives_alone"),
        asynchronous=_way(measured, "asynchronous", "ring_alone"),
        cpus=os.cpu_count() or 1,
        load_average=os.getloadavg()[0],
    )


def _way(measured: Measured, name: str, alone: str) -> Way:
    step, communication = np.array(measured.seconds[name]), float(np.median(measured.seconds[alone]))
    low, exposed, high = np.quantile(step - np.array(measured.seconds["compute_alone"]), (0.25, 0.5, 0.75))
    return Way(
        step_seconds=float(np.median(step)),
        communication_seconds=communication,
        exposed_seconds=float(exposed),
        exposed_quartiles=(float(low), float(high)),
        hidden=1 - float(exposed) / communication,
        sent_bytes=measured.sent_bytes[name],
    )


def text(result: Result) -> str:
    """The result for a person."""
    options, plain, overlapping = result.options, result.synchronous, result.asynchronous
    lines = [
        f"{options.tokens} tokens, {options.hidden} -> {options.feed_forward} -> {options.hidden}, float32, "
        f"{RANKS} ranks of {options.threads} thread on {result.cpus} CPUs (load {result.load_average:.1f}); "
        f"{options.rounds} interleaved rounds",
        f"link {result.mbit_per_second:.0f} Mbit/s, {result.link_bytes / 2**20:.1f} MiB a rank and step; "
        f"compute {result.compute_seconds * 1e3:.1f} ms",
        f"{'':12} {'step ms':>9} {'alone ms':>9} {'exposed ms (quartiles)':>27} {'hidden':>7} {'sent MiB':>9}",
        _line("synchronous", plain),
        _line("asynchronous", overlapping),
    ]
    return "\n".join(lines)


def _line(name: str, way: Way) -> str:
    low, high = (f"{seconds * 1e3:.1f}" for seconds in way.exposed_quartiles)
    exposed = f"{way.exposed_seconds * 1e3:.1f} ({low} - {high})"
    return (
        f"{name:12} {way.step_seconds * 1e3:9.1f} {way.communication_seconds * 1e3:9.1f} {exposed:>27} "
        f"{way.hidden:7.0%} {way.sent_bytes / 2**20:9.2f}"
    )
