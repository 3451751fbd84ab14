"""List what the steps of a run lose their time to, each loss with its share and its evidence.

A pure function of what was recorded. verdict.py chooses the loss that a report names; advice.py says what to change.
A new kind of loss is a `_find_...` here, a line in verdict.CLASSES, and what to do about it in advice.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hpc_train.report.efficiency import (
    Pipeline,
    StepLosses,
    find_stage_work,
    measure_blocked,
    measure_lateness,
    measure_unblocked_time,
    measure_work,
)
from hpc_train.report.step_table import Array, StepTable
from hpc_train.units import format_seconds

NAMED_FROM = 0.15
"""Share of a step from which a loss is named."""
_TOO_SMALL = 0.3
"""Share of what a rank computes from which starting operations means that they, and collectives too, are too small."""
SMALL_KIB, _QUICK_SECONDS = 1024.0, 0.002
"""Collectives that carry no more, and take no longer, are bound by their start: a faster link would change little."""
_LATE_SECONDS, _SLOW_LINK_KIB = 0.010, 12_200.0
"""Collectives of up to 10 ms are bound by their start, too, if a link of 100 Mbit/s (KiB per second) would carry their
data in half of that time."""
_NETWORK_OVER_STRAGGLER = 1.5
"""Times that the network must cost more than a straggler to be named before it: a rank without a processor is also late
inside collectives, while a thin link lets no rank compute longer than the others."""
LEAST_BINS = 5
"""Bins of steps below which nothing is judged."""
_SLOW_IN = 0.7
"""A straggler is slower than the others in this share of the steps."""
_LATE_IN, _OF_LATENESS = 0.2, 0.7
"""Ranks that are late in this share of the steps are named: those who have this share of all delays."""
_UNEVEN_STAGE = 1.3
"""A stage is slow, and not just large, if it takes this many times longer than its FLOPs suggest, compared with the
others."""
_GROWTH_MIB, _GROWTH_SHARE, _LEAST_RISE = 64.0, 0.10, 0.4
"""Memory grows if a rank gained both over the recorded time, at no time much slower than usual."""


@dataclass(frozen=True)
class Facts:
    """Facts about a run that a verdict needs besides the recorded steps."""

    pipeline: Pipeline | None = None
    node_of_rank: Mapping[int, str] = field(default_factory=dict)
    live: str = ""
    """Path of the run, as a shell takes it, while the run goes on; else ""."""
    steps_left: int = 0
    strategy: str = "ddp"
    degrees: Mapping[str, int] = field(default_factory=dict)
    global_batch: int = 1
    micro_batch: int = 1
    micro_batches: int = 1
    """Micro-batches that one rank computes in a step."""
    compile: bool = False
    excluded_nodes: str = ""
    """launch.exclude of the run, a host list."""
    checkpoint_every: int = 0
    background_saves: bool = True
    accelerator: bool = False
    collective_kib: float | None = None
    """Average KiB of one collective of fully_shard; None if the run has other collectives."""
    waits_measured: bool = True
    """False with parameter servers, whose waits are not measured and would count as computation."""


@dataclass(frozen=True)
class Finding:
    """A loss with its class."""

    name: str
    share: float
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    evidence: str = ""


def list_findings(table: StepTable, losses: StepLosses | None, facts: Facts) -> list[Finding]:
    """List the losses that are large enough to be named, the largest first.

    The network comes before a straggler only if it costs _NETWORK_OVER_STRAGGLER times as much.
    """
    findings = [_find_input(table, facts), _find_checkpoint(table), _find_memory(table, facts)]
    if losses is not None:
        stragglers = _find_straggler(table, losses, facts) or _find_late_ranks(table, losses, facts)
        findings += [
            *stragglers,
            *_find_network_and_launch(table, losses, facts),
            _find_bubble(losses, facts, straggler=any(straggler.share >= NAMED_FROM for straggler in stragglers)),
        ]
    named = [finding for finding in findings if finding is not None and finding.share >= NAMED_FROM]
    straggler = any(finding.name in ("straggler", "imbalance") for finding in named)

    def weigh(finding: Finding) -> float:
        return finding.share / (_NETWORK_OVER_STRAGGLER if straggler and finding.name == "network" else 1.0)

    return sorted(named, key=weigh, reverse=True)


def _compute_mean_step(table: StepTable) -> float:
    return float(np.nanmean(table["total"] - np.nan_to_num(table["evaluate"])))


def _find_input(table: StepTable, facts: Facts) -> Finding | None:
    waits, total = np.nanmean(table["data"], axis=1), _compute_mean_step(table)
    worst = float(waits.max())
    slow = [rank for rank, wait in zip(table.ranks, waits, strict=True) if wait >= 0.5 * worst]
    ranks = tuple(slow) if len(slow) <= len(waits) / 2 else ()
    subject = f"rank {ranks[0]} waits" if len(ranks) == 1 else f"{len(ranks)} ranks wait" if ranks else "ranks wait"
    evidence = f"{subject} {format_seconds(worst)} of a step of {format_seconds(total)} for the next batch"
    return Finding("input", worst / total, ranks, _list_nodes_of(ranks, facts), evidence)


def _find_checkpoint(table: StepTable) -> Finding | None:
    save, total = float(np.nanmean(table["save"])), _compute_mean_step(table)
    stalled = int((np.nanmax(table["save"], axis=0) > 0.01 * total).sum())
    evidence = f"saves stalled {stalled} of {table.bins} recorded steps, {format_seconds(save)} per step on average"
    return Finding("checkpoint", save / total, evidence=evidence)


def _find_memory(table: StepTable, facts: Facts) -> Finding | None:
    """Find a rank whose memory grows steadily. Its share is the part of its memory that it gained."""
    growth = [_measure_growth(values) for values in table["resident"]]
    gained, slope = max(growth, default=(0.0, 0.0))
    if gained <= 0:
        return None
    worst = growth.index((gained, slope))
    last = float(table["resident"][worst][-1])
    share = gained / last
    if share < _GROWTH_SHARE:
        return None
    ranks = (
        (table.ranks[worst],)
        if sum(growth_of_rank > 0.5 * gained for growth_of_rank, _ in growth) <= len(growth) / 2
        else ()
    )
    ahead = f", {last + slope * facts.steps_left:,.0f} MiB at the last step" if facts.steps_left else ""
    evidence = (
        f"rank {table.ranks[worst]} gained {gained:,.0f} MiB in {table.bins} recorded steps, to {last:,.0f} MiB{ahead}"
    )
    return Finding("memory", share, ranks, _list_nodes_of(ranks, facts), evidence)


def _measure_growth(resident: Array) -> tuple[float, float]:
    """Return what was gained (MiB) over the second half of the time, doubled, and the slope a bin; 0 if not steadily.

    The first half fills caches and allocators in any run. Steadily means that nearly every rise over a third of the
    second half is near the median one: allocators give and take some MiB from one step to the next, and memory that
    grows once leaves other parts of the time without a rise.
    """
    values = resident[np.isfinite(resident)]
    half = values[len(values) // 2 :]
    if len(half) < LEAST_BINS:
        return 0.0, 0.0
    third = -(-len(half) // 3)
    rises = (half[third:] - half[:-third]) / third
    slope = float(np.median(rises))
    gained = slope * (len(half) - 1)
    if gained < _GROWTH_MIB or np.quantile(rises, 0.1) < _LEAST_RISE * slope:
        return 0.0, 0.0
    return 2 * gained, slope


def _find_straggler(table: StepTable, losses: StepLosses, facts: Facts) -> list[Finding]:
    """Find ranks that take longer than the others in most steps; of a pipeline, than their stage lets expect."""
    if len(table.ranks) < 2:
        return []
    work = _relate_to_stage(measure_unblocked_time(table), losses, facts)
    # The lower median: where half of the ranks are slow, it is the time of one that is not.
    median_work = np.nanquantile(work, 0.5, axis=0, method="lower")
    excess = np.nanmean(work - median_work, axis=1)
    worst = float(excess.max())
    slow = [index for index, seconds in enumerate(excess) if seconds >= 0.5 * worst]
    if worst <= 0 or len(slow) > len(table.ranks) / 2:
        return []
    share_of_steps = min(float((work[index] > median_work + 0.3 * worst).mean()) for index in slow)
    if share_of_steps < _SLOW_IN:
        return []
    ranks = tuple(table.ranks[index] for index in slow)
    evidence = _describe_straggler(table, slow, worst, share_of_steps, losses.total)
    return [Finding("straggler", worst / losses.total, ranks, _list_nodes_of(ranks, facts), evidence)]


def _describe_straggler(table: StepTable, slow: list[int], seconds: float, share_of_steps: float, step: float) -> str:
    """Say by how much the slow ranks are slower, where in a step, and how the waits of all ranks agree with that."""

    def compare(values: Array) -> tuple[float, float]:
        return float(np.nanmean(values[slow])), float(np.nanmean(np.delete(values, slow, axis=0)))

    slow_seconds, other_seconds = compare(measure_unblocked_time(table) - measure_work(table))
    is_outside = slow_seconds - other_seconds > 0.5 * seconds
    outside_parts = " outside of forward, backward, gradient norm and update" if is_outside else ""
    verb = "spend" if is_outside else "compute"
    subject = f"rank {table.ranks[slow[0]]} {verb}s" if len(slow) == 1 else f"{len(slow)} ranks {verb}"
    slow_seconds, other_seconds = compare(measure_blocked(table))
    return (
        f"{subject} {format_seconds(seconds)} longer than the others{outside_parts} in a step of "
        f"{format_seconds(step)}, in {share_of_steps:.0%} of the steps; others are blocked for "
        f"{format_seconds(other_seconds)}, "
        f"{'this one' if len(slow) == 1 else 'these'} for {format_seconds(slow_seconds)}"
    )


def _find_late_ranks(table: StepTable, losses: StepLosses, facts: Facts) -> list[Finding]:
    """Find ranks that take longer than usual in some steps: the same ones, or another one in each step."""
    if len(table.ranks) < 2:
        return []
    late = np.maximum(np.nan_to_num(measure_lateness(table)), 0.0)
    latest = late.max(axis=0)
    # What is lost is a mean over all ranks, of which the late one loses nothing.
    waited = (losses.losses["load_balance"] + losses.losses["serialisation"]) * len(late) / (len(late) - 1)
    seconds = min(float(latest.mean()), waited)
    share_of_steps = float((latest > 0.5 * seconds).mean())
    if seconds <= 0 or share_of_steps < _LATE_IN:
        return []
    delays = np.bincount(late.argmax(axis=0), weights=latest, minlength=len(late)) / latest.sum()
    order = np.argsort(-delays, kind="stable")
    slow = sorted(order[: int(np.searchsorted(np.cumsum(delays[order]), _OF_LATENESS)) + 1])
    if len(slow) > len(late) / 2:
        evidence = (
            f"in {share_of_steps:.0%} of the steps one rank takes longer than it usually does, another one in each; "
            f"the others wait for it, {format_seconds(seconds)} of a step of {format_seconds(losses.total)} on average"
        )
        return [Finding("imbalance", seconds / losses.total, evidence=evidence)]
    ranks = tuple(table.ranks[index] for index in slow)
    evidence = (
        f"in {share_of_steps:.0%} of the steps {'this rank takes' if len(ranks) == 1 else 'one of these ranks takes'} "
        f"longer than usual, and the others wait, {format_seconds(seconds)} of a step of "
        f"{format_seconds(losses.total)} on average"
    )
    return [Finding("straggler", seconds / losses.total, ranks, _list_nodes_of(ranks, facts), evidence)]


def _relate_to_stage(work: Array, losses: StepLosses, facts: Facts) -> Array:
    """Return the work of each rank relative to the expectation for its stage, in seconds of a stage of mean size.

    Unequal stages are no stragglers: with replicas a rank is compared with its stage, without them with its FLOPs.
    """
    pipeline = facts.pipeline
    if pipeline is None:
        return work
    stages = np.asarray(pipeline.stage_of_rank)
    related = work.copy()
    mean = float(np.nanmean(work))
    alone = len(stages) == len(set(pipeline.stage_of_rank))
    costs = np.asarray(pipeline.costs) / np.mean(pipeline.costs)
    for stage in set(pipeline.stage_of_rank):
        members = stages == stage
        if alone:
            related[members] = work[members] / costs[stage]
        else:
            related[members] = work[members] - np.nanmedian(work[members]) + mean
    if alone:
        middle = (
            np.nanmedian(np.nanmean(related, axis=1)) if len(stages) > 2 else np.nanmin(np.nanmean(related, axis=1))
        )
        # FLOPs do not say exactly how long a stage takes.
        slow = np.nanmean(related, axis=1) >= _UNEVEN_STAGE * middle
        related = np.where(slow[:, None], related, middle)
    return np.asarray(related)


def _find_network_and_launch(table: StepTable, losses: StepLosses, facts: Facts) -> list[Finding]:
    """Find transfers, and operations that are too small: then collectives are too, and count as the same loss."""
    transfer, total = losses.losses["transfer"], losses.total
    launch = float(np.nanmean(table["launch"])) if np.isfinite(table["launch"]).any() else 0.0
    shortest_work = float(losses.work.min())  # of a rank that nothing slows
    if launch >= _TOO_SMALL * shortest_work:
        launch = min(launch, shortest_work)
        evidence = (
            f"starting the operations of a step takes about {format_seconds(launch)} of the "
            f"{format_seconds(shortest_work)} that a rank computes, and small collectives {format_seconds(transfer)} "
            "more"
        )
        return [Finding("launch", (launch + transfer) / total, evidence=evidence)]
    if small := _explain_small_collectives(table, transfer, launch, facts):
        return [Finding("launch", (launch + transfer) / total, evidence=small)]
    evidence = (
        f"collectives block every rank for {format_seconds(transfer)} of a step of {format_seconds(total)}, also the "
        "one that arrives last"
    )
    return [Finding("network", transfer / total, evidence=evidence)]


def _explain_small_collectives(table: StepTable, transfer: float, launch: float, facts: Facts) -> str:
    """Say so if collectives are so small and quick that starting them is what takes their time; else an empty text."""
    count = float(np.nanmean(table["collectives"]))
    if facts.collective_kib is None or facts.collective_kib > SMALL_KIB or count < 1:
        return ""
    seconds = transfer / count
    late = seconds <= _LATE_SECONDS and facts.collective_kib / _SLOW_LINK_KIB <= seconds / 2
    if seconds > _QUICK_SECONDS and not late:
        return ""
    return (
        f"{count:,.0f} collectives per step carry {facts.collective_kib:,.0f} KiB each and take "
        f"{format_seconds(seconds)} each, {format_seconds(transfer)} together: they are too small for any link; "
        f"starting operations takes about {format_seconds(launch)}"
    )


def _find_bubble(losses: StepLosses, facts: Facts, straggler: bool) -> Finding | None:
    """Find idle stages: by the schedule, and because stages are unequal, unless a straggler makes them so."""
    if facts.pipeline is None or losses.bubble_share is None:
        return None
    stages = find_stage_work(losses.work, facts.pipeline)
    uneven = 0.0 if straggler else max(stages) - sum(stages) / len(stages)
    evidence = (
        f"the schedule leaves ranks idle for {losses.bubble_share:.0%} of the pipeline with {facts.micro_batches} "
        f"micro-batches on {len(stages)} ranks, simulated with the measured stages"
    )
    return Finding("bubble", losses.compute_share("bubble") + uneven / losses.total, evidence=evidence)


def _list_nodes_of(ranks: Sequence[int], facts: Facts) -> tuple[str, ...]:
    """Return the nodes of these ranks, those with most of them first."""
    counts = Counter(facts.node_of_rank[rank] for rank in ranks if rank in facts.node_of_rank)
    return tuple(name for name, _ in counts.most_common())
