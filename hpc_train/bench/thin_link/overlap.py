"""`hpc-train bench overlap`: measure how much communication asynchronous tensor parallelism hides.

Two ranks in two network namespaces compute a column- and a row-parallel layer, forward and backward, over a link of
limited rate. The result is the exposed communication: the time of a step less that of its matrix products alone.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from hpc_train.bench.local_ranks import exit_on_sigterm
from hpc_train.bench.thin_link.link import MEASURED_FILE, RANKS, run_linked_ranks
from hpc_train.errors import EXIT_DONE, UserError

_RANK_MODULE = "hpc_train.bench.thin_link.overlap_rank"


@dataclass(frozen=True)
class OverlapOptions:
    """Options of `bench overlap`; sizes are numbers of elements."""

    rounds: int
    """Number of interleaved rounds of all sides."""
    steps: int
    """Steps of each side in a round."""
    tokens: int
    hidden: int
    ratio: float
    """Ratio of communication to compute time; sets the rate of the link."""
    rate: float | None
    """Rate of the link in Mbit/s; None: from `ratio`."""
    threads: int = 1

    @property
    def feed_forward(self) -> int:
        """Number of features between the two layers."""
        return 4 * self.hidden


@dataclass(frozen=True)
class OverlapMeasurement:
    """Measurements of both ranks."""

    mbit_per_second: float
    link_bytes: int
    """Payload bytes that a rank sends in a step."""
    sent_bytes: dict[str, int]
    """Bytes actually sent in a step, with all protocol headers, by side."""
    seconds: dict[str, list[float]]
    """Seconds of a step on the slower rank, by side and round."""


@dataclass(frozen=True)
class OverlapKind:
    """Result of synchronous or asynchronous communication: seconds of a step, medians over rounds."""

    step_seconds: float
    communication_seconds: float
    """Seconds of the same transfers without compute."""
    exposed_seconds: float
    """Step time less the compute time of the same round."""
    exposed_quartiles: tuple[float, float]
    hidden: float
    """Fraction of the communication that is hidden: 1 - exposed / communication."""
    sent_bytes: int
    """Bytes that a rank sends in a step, with all protocol headers."""


@dataclass(frozen=True)
class OverlapResult:
    """The result that `bench overlap --json` prints."""

    options: OverlapOptions
    mbit_per_second: float
    """Rate of the link in each direction."""
    link_bytes: int
    """Payload bytes that a rank sends in a step."""
    compute_seconds: float
    """Seconds of the products and copies of a step alone, median over rounds."""
    synchronous: OverlapKind
    asynchronous: OverlapKind
    cpus: int
    load_average: float
    """Load average of the last minute, at the end; above `cpus` other work used the machine too."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def run_overlap_command(options: OverlapOptions, as_json: bool) -> int:
    """Measure and print. Returns the exit code; raises UserError if a namespace or the link cannot be made."""
    _check_options(options)
    with exit_on_sigterm(), tempfile.TemporaryDirectory(prefix="hpc_train-bench-") as folder:
        if code := run_linked_ranks(_RANK_MODULE, [json.dumps(asdict(options)), folder], options.threads):
            return code
        measured = OverlapMeasurement(**json.loads((Path(folder) / MEASURED_FILE).read_text()))
    result = summarise_overlap(options, measured)
    print(result.to_json() if as_json else format_overlap(result))
    return EXIT_DONE


def _check_options(options: OverlapOptions) -> None:
    for name, least in (("rounds", 2), ("steps", 1), ("hidden", 1)):
        if getattr(options, name) < least:
            raise UserError(f"--{name} {getattr(options, name)}: must be at least {least}")
    if options.tokens < RANKS or options.tokens % RANKS:
        raise UserError(f"--tokens {options.tokens}: must be a multiple of the {RANKS} ranks")
    for name in ("ratio", "rate"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"--{name} {value}: must be above 0")


def summarise_overlap(options: OverlapOptions, measured: OverlapMeasurement) -> OverlapResult:
    """Summarise the rounds by medians. The exposed time is a median of differences, in which a slow round cancels."""
    return OverlapResult(
        options=options,
        mbit_per_second=measured.mbit_per_second,
        link_bytes=measured.link_bytes,
        compute_seconds=float(np.median(measured.seconds["compute_alone"])),
        synchronous=_summarise_kind(measured, "synchronous", "collectives_alone"),
        asynchronous=_summarise_kind(measured, "asynchronous", "ring_alone"),
        cpus=os.cpu_count() or 1,
        load_average=os.getloadavg()[0],
    )


def _summarise_kind(measured: OverlapMeasurement, name: str, alone: str) -> OverlapKind:
    step, communication = np.array(measured.seconds[name]), float(np.median(measured.seconds[alone]))
    low, exposed, high = np.quantile(step - np.array(measured.seconds["compute_alone"]), (0.25, 0.5, 0.75))
    return OverlapKind(
        step_seconds=float(np.median(step)),
        communication_seconds=communication,
        exposed_seconds=float(exposed),
        exposed_quartiles=(float(low), float(high)),
        hidden=1 - float(exposed) / communication,
        sent_bytes=measured.sent_bytes[name],
    )


def format_overlap(result: OverlapResult) -> str:
    """Format the result as text."""
    options, plain, overlapping = result.options, result.synchronous, result.asynchronous
    lines = [
        f"{options.tokens} tokens, {options.hidden} -> {options.feed_forward} -> {options.hidden}, float32, "
        f"{RANKS} ranks of {options.threads} thread on {result.cpus} CPUs (load {result.load_average:.1f}); "
        f"{options.rounds} interleaved rounds",
        f"link {result.mbit_per_second:.0f} Mbit/s, {result.link_bytes / 2**20:.1f} MiB a rank and step; "
        f"compute {result.compute_seconds * 1e3:.1f} ms",
        f"{'':12} {'step ms':>9} {'alone ms':>9} {'exposed ms (quartiles)':>27} {'hidden':>7} {'sent MiB':>9}",
        _format_kind("synchronous", plain),
        _format_kind("asynchronous", overlapping),
    ]
    return "\n".join(lines)


def _format_kind(name: str, way: OverlapKind) -> str:
    low, high = (f"{seconds * 1e3:.1f}" for seconds in way.exposed_quartiles)
    exposed = f"{way.exposed_seconds * 1e3:.1f} ({low} - {high})"
    return (
        f"{name:12} {way.step_seconds * 1e3:9.1f} {way.communication_seconds * 1e3:9.1f} {exposed:>27} "
        f"{way.hidden:7.0%} {way.sent_bytes / 2**20:9.2f}"
    )
