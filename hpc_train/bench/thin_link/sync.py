"""`hpc-train bench sync`: compare tokens/s of loosely synchronised copies and of ddp over the same slow link.

Two ranks in two network namespaces train a transformer on random tokens over a link of limited rate. In each round ddp
makes some steps, then the loose copies make all steps from one exchange to the next, with the exchange.
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

_RANK_MODULE = "hpc_train.bench.thin_link.sync_rank"


@dataclass(frozen=True)
class SyncOptions:
    """Options of `bench sync`."""

    overrides: list[str]
    """Overrides of the run's configuration; parallel.sync.* for the loose copies."""
    rounds: int
    steps: int
    """Steps of ddp in a round."""
    every: int
    """Steps of the loose copies from one exchange to the next, and in a round."""
    rate: float
    """Rate of the link, Mbit/s."""


@dataclass(frozen=True)
class SyncMeasurement:
    """Measurements of a run; those of ranks are of the slower one."""

    parameters: int
    tokens: int
    """Tokens of a step, of both ranks together."""
    seconds: dict[str, list[float]]
    """Seconds of a step, by side and round."""
    sent_bytes: dict[str, float]
    """Bytes that rank 0 sends over the link in a step, with all protocol headers, by side."""
    formula_bytes: dict[str, float]
    """Bytes of the parameters, outer or plain gradients, that a ring of both ranks sends in a step, without headers."""


@dataclass(frozen=True)
class SyncResult:
    """The result that `bench sync --json` prints."""

    options: SyncOptions
    measured: SyncMeasurement
    tokens_per_second: dict[str, float]
    """Medians over rounds, by side."""
    speedup: float
    """Median over rounds of the ratio of loose to ddp."""
    cpus: int
    load_average: float

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def run_sync_command(options: SyncOptions, as_json: bool) -> int:
    """Measure and print. Returns the exit code; raises UserError if a namespace or the link cannot be made."""
    _check_options(options)
    with exit_on_sigterm(), tempfile.TemporaryDirectory(prefix="hpc_train-bench-") as folder:
        if code := run_linked_ranks(_RANK_MODULE, [json.dumps(asdict(options)), folder], threads=1):
            return code
        measured = SyncMeasurement(**json.loads((Path(folder) / MEASURED_FILE).read_text()))
    result = summarise_sync(options, measured)
    print(result.to_json() if as_json else format_sync(result))
    return EXIT_DONE


def _check_options(options: SyncOptions) -> None:
    for name in ("rounds", "steps", "every"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name} {getattr(options, name)}: must be at least 1")
    if not 0 < options.rate < float("inf"):
        raise UserError(f"--rate {options.rate}: must be above 0")


def summarise_sync(options: SyncOptions, measured: SyncMeasurement) -> SyncResult:
    """Summarise the rounds by medians."""
    seconds = {side: np.array(samples) for side, samples in measured.seconds.items()}
    return SyncResult(
        options,
        measured,
        {side: float(measured.tokens / np.median(samples)) for side, samples in seconds.items()},
        float(np.median(seconds["ddp"] / seconds["loose"])),
        os.cpu_count() or 1,
        os.getloadavg()[0],
    )


def format_sync(result: SyncResult) -> str:
    """Format the result as text."""
    options, measured = result.options, result.measured
    lines = [
        f"{measured.parameters:,} parameters, {measured.tokens} tokens per step, {RANKS} ranks of 1 thread on "
        f"{result.cpus} CPUs (load {result.load_average:.1f}), link {options.rate:g} Mbit/s, {options.rounds} rounds",
        f"{'':6} {'tokens/s':>9} {'s per step':>10} {'sent MB per step':>17} {'by formula':>11}",
    ]
    for side, seconds in measured.seconds.items():
        lines.append(
            f"{side:6} {result.tokens_per_second[side]:9.0f} {np.median(seconds):10.3f} "
            f"{measured.sent_bytes[side] / 1e6:17.3f} {measured.formula_bytes[side] / 1e6:11.3f}"
        )
    return "\n".join([*lines, f"loose / ddp: {result.speedup:.1f}x, an exchange every {options.every} steps"])
