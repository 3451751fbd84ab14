"""Whether one rank is slower than its like, and whether the network does what it was measured to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from hpc_train.doctor.finding import Finding, bad, ok, short, warn
from hpc_train.doctor.outliers import slow
from hpc_train.doctor.report import Report, Speed

MUCH = 0.3
"""A GPU that is slower by this share is broken; CPUs are shared with others, so they never are."""
POOR = 0.5
"""Of the predicted bandwidth; less is worth a look."""


@dataclass(frozen=True)
class Reduction:
    """An all-reduce over the groups of one axis, all of them at once."""

    axis: str
    ranks: int
    """Of a group."""
    bytes: int
    seconds: float
    """Of the slowest rank, median of several."""
    bus: float
    """Bytes/s, as nccl-tests define bus bandwidth."""
    predicted: float | None
    """Seconds, where the cluster is calibrated."""
    failed: str = ""
    """Why it did not work."""


def speeds(reports: Sequence[Report], measured: Sequence[Speed]) -> Iterator[Finding]:
    """Matrix products and copies. measured: by rank, as reports are."""
    names = [f"rank {report.rank} on {report.host}" for report in reports]
    if len({speed.device for speed in measured}) > 1:
        yield bad("speed", "some ranks compute on GPUs, others on CPUs", "see the finding about GPUs")
        return
    gpus = measured[0].device == "cuda"
    yield outliers("matrix product", names, [speed.product for speed in measured], gpus)
    yield outliers("memory copy", names, [speed.copy for speed in measured], gpus)


def outliers(name: str, names: Sequence[str], seconds: Sequence[float], firm: bool) -> Finding:
    """firm: nothing else runs on the devices, so that a large difference is a defect."""
    found = slow(seconds)
    middle = median(seconds)
    if not found:
        return ok(name, f"{1e3 * middle:.3g} ms on most ranks, {1e3 * max(seconds):.3g} on the slowest")
    odd = [f"{names[index]} {seconds[index] / middle:.2f} x" for index in found]
    text = f"{1e3 * middle:.3g} ms on most ranks, but slower: {short(odd)}"
    if firm and max(seconds) > middle * (1 + MUCH):
        return bad(name, text, "leave these nodes out (launch.exclude); clocks, heat or a failing memory module?")
    return warn(name, text, "every step waits for the slowest: is anything else running there?")


def reductions(measured: Sequence[Reduction]) -> Iterator[Finding]:
    """Beside the prediction, where there is one."""
    for it in measured:
        name = f"all-reduce {it.axis}"
        if it.failed:
            yield bad(name, it.failed, "NCCL_DEBUG=INFO says more; compare `hpc-train bench collectives`")
            continue
        text = f"{it.bytes / 2**20:g} MiB over {it.ranks} ranks: {1e3 * it.seconds:.3g} ms, {it.bus / 1e9:.3g} GB/s"
        if it.predicted is None:
            yield ok(
                name, f"{text}; nothing to compare with before `hpc-train bench collectives` (cluster.calibration)"
            )
        elif it.seconds > it.predicted / POOR:
            text = f"{text}, {it.seconds / it.predicted:.1f} x the predicted {1e3 * it.predicted:.3g} ms"
            yield warn(
                name, text, "a slow link, a wrong interface, or other jobs on the same switches; see nics, network"
            )
        else:
            yield ok(name, f"{text}, predicted {1e3 * it.predicted:.3g} ms")
