"""Name the bottleneck of a run: a pure function of what was recorded.

A class is named if it costs at least 15 % of the step; of several, the one that costs most. Below that a run is bound
by computation if its ranks compute for at least 80 % of the time, else balanced. Without enough data no class is named.
findings.py measures what each loss costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpc_train.report.advice import Setting, advise
from hpc_train.report.efficiency import StepLosses, split_step
from hpc_train.report.findings import LEAST_BINS, Facts, Finding, list_findings
from hpc_train.report.step_table import StepTable
from hpc_train.units import format_seconds

CRITICAL_FROM = 0.30
"""Share of a step from which a loss is critical, and not just a warning."""
COMPUTE_FROM = 0.80
"""Share of a step that ranks compute, from which a run without a loss is bound by computation."""

CLASSES = {
    "compute": "the ranks compute most of the time",
    "network": "collectives block all ranks",
    "input": "ranks wait for data",
    "memory": "memory grows",
    "launch": "operations are too small: starting them takes the time",
    "straggler": "others wait for a slow rank",
    "imbalance": "others wait for a slow rank, another one in each step",
    "bubble": "pipeline stages are idle",
    "checkpoint": "training waits for saves",
    "balanced": "no single cause stands out",
    "not enough data": "too little was recorded",
}
"""Class of a verdict, and what it means."""


@dataclass(frozen=True)
class Verdict:
    """The one class that matters most, with its evidence and what to try."""

    name: str
    """A key of CLASSES."""
    share_lost: float | None
    """Share of the step that this cause takes; None if nothing is lost to a single cause."""
    severity: str
    """ok, warning or critical."""
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    advice: tuple[Setting, ...] = ()
    further: tuple[Finding, ...] = ()
    """Other losses that would be named alone, the largest first."""

    @property
    def line(self) -> str:
        """Return the verdict in one line."""
        of_what = "what it uses" if self.name == "memory" else "the step"
        share = f", {self.share_lost:.0%} of {of_what}" if self.share_lost else ""
        location = ""
        if self.ranks:
            nodes = f" on {', '.join(self.nodes)}" if self.nodes else ""
            location = f" (rank {', '.join(map(str, self.ranks[:4]))}{' ...' if len(self.ranks) > 4 else ''}{nodes})"
        return f"{self.name}: {CLASSES[self.name]}{location}{share}"

    def as_json(self, state: str) -> dict[str, Any]:
        """Return the object of report.json. state: of the run."""
        return {
            "state": state,
            "class": self.name,
            "severity": self.severity,
            "share_lost": self.share_lost,
            "ranks": list(self.ranks),
            "nodes": list(self.nodes),
            "evidence": list(self.evidence),
            "advice": [asdict(setting) for setting in self.advice],
            "further": [asdict(finding) for finding in self.further],
        }


def judge_run(table: StepTable | None, facts: Facts) -> tuple[Verdict, StepLosses | None]:
    """Return the verdict on a run, and where the time of its steps went; None if that was not measured."""
    if table is None:
        return _abstain("no steps were recorded (train.record_steps)"), None
    losses = split_step(table, facts.pipeline) if facts.waits_measured else None
    if table.bins < LEAST_BINS:
        return _abstain(f"{table.bins} steps after the warm-up; {LEAST_BINS} are needed"), losses
    findings = list_findings(table, losses, facts)
    if not findings and losses is None:
        reason = "the parts of steps were not measured, which takes ranks on processors" if facts.accelerator else ""
        reason = reason or ("" if facts.waits_measured else "waits for parameter servers are not measured")
        return _abstain(reason or "no step was recorded by every rank"), None
    if findings and findings[0].name == "network" and (silent := find_silent_ranks(table, facts)):
        # All recorded ranks may wait for a rank that recorded nothing.
        return _abstain(f"{format_ranks(silent)} recorded nothing, and may be what the others wait for"), losses
    if findings:
        first, *other_findings = findings
        severity = "critical" if first.share >= CRITICAL_FROM else "warning"
        return Verdict(
            name=first.name,
            share_lost=first.share,
            severity=severity,
            ranks=first.ranks,
            nodes=first.nodes,
            evidence=(first.evidence,),
            advice=advise(first, facts),
            further=tuple(other_findings),
        ), losses
    assert losses is not None
    useful = losses.useful / losses.total if losses.total else 0.0
    name = "compute" if useful >= COMPUTE_FROM else "balanced"
    evidence = f"the ranks compute for {useful:.0%} of a step of {format_seconds(losses.total)}"
    return Verdict(name, None, "ok", evidence=(evidence,), advice=advise(Finding(name, 0.0), facts)), losses


def find_silent_ranks(table: StepTable, facts: Facts) -> list[int]:
    """List the ranks of the newest attempt of which no step was recorded."""
    return sorted(set(facts.node_of_rank) - set(table.ranks))


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as "rank 3", "ranks 3, 4" or "9 ranks (3, 4, 5, 6, ...)"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    first = ", ".join(map(str, ranks[:4]))
    return f"ranks {first}" if len(ranks) <= 4 else f"{len(ranks)} ranks ({first}, ...)"


def _abstain(reason: str) -> Verdict:
    return Verdict("not enough data", None, "ok", evidence=(reason,))
