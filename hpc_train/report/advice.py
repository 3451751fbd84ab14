"""Advise what to change about the loss that a report names: our own settings first, then what to look at."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from hpc_train.config.keys.overrides import format_override_value
from hpc_train.report.findings import SMALL_KIB, Facts, Finding

_NEW_BATCH = "with another batch it learns differently"


@dataclass(frozen=True)
class Setting:
    """A change to try."""

    override: str
    """Overrides in Hydra's syntax, with spaces between them; empty if it is none."""
    why: str
    planned_gain: float | None = None
    """Tokens a second with it, over those without, less 1, as the planner expects; None where it cannot say."""

    @property
    def words(self) -> str:
        """Return the overrides as a shell takes them."""
        return " ".join(map(shlex.quote, self.override.split()))


def advise(finding: Finding, facts: Facts) -> tuple[Setting, ...]:
    """Return what to try next, our own settings first."""
    return tuple(_ADVICE[finding.name](finding, facts)) if finding.name in _ADVICE else ()


def has_other_nodes(nodes: Sequence[str], facts: Facts) -> bool:
    """Return whether some ranks of the run are on other nodes than these, so that a job could do without them."""
    return bool(nodes) and not set(facts.node_of_rank.values()) <= set(nodes)


def _format_doubled_batch(facts: Facts) -> str:
    return f"train.global_batch={2 * facts.global_batch}"


def _advise_network(finding: Finding, facts: Facts) -> list[Setting]:
    advice = []
    if facts.micro_batches == 1:
        advice.append(Setting(_format_doubled_batch(facts), f"more work between two reductions; {_NEW_BATCH}"))
    if facts.strategy == "zero3":
        advice.append(Setting("parallel.strategy=zero2", "gathers parameters once per step, if memory allows it"))
        advice.append(Setting("parallel.prefetch=2", "gathers further ahead of the computation"))
    if facts.strategy == "ddp":
        advice.append(Setting("parallel.compression.method=bf16", "halves what is sent"))
    if facts.degrees.get("tp", 1) > 1:
        advice.append(Setting("parallel.tensor.asynchronous=true", "overlaps the exchange of activations"))
    advice.append(Setting("", "hpc-train bench collectives: compares the links with what they should carry"))
    return advice


def _advise_straggler(finding: Finding, facts: Facts) -> list[Setting]:
    look = _advise_profile(finding.ranks[:4], "shows which operators it spends its time in", facts)
    if not has_other_nodes(finding.nodes, facts):
        return [look]
    excluded = ",".join(filter(None, (facts.excluded_nodes, *finding.nodes)))
    return [
        Setting(f"launch.exclude={format_override_value(excluded)}", "leaves out the node of the slow rank"),
        Setting("resilience.preflight=full", "measures nodes before training and leaves slow ones out"),
        look,
    ]


def _advise_imbalance(finding: Finding, facts: Facts) -> list[Setting]:
    advice = []
    if facts.micro_batches > 1 and facts.degrees.get("pp", 1) == 1:
        advice.append(Setting(f"train.micro_batch={facts.micro_batch * 2}", "samples of unequal cost even out"))
    advice.append(Setting("", "look for other processes on the nodes: top, or hpc-train doctor in a job"))
    return [*advice, _advise_profile((0,), "shows what differs between the steps of a rank", facts)]


def _advise_profile(ranks: Sequence[int], why: str, facts: Facts) -> Setting:
    """Advise a trace: of the run itself while that goes on, else of the next one."""
    listed = ",".join(map(str, ranks))
    if facts.live:
        return Setting("", f"hpc-train profile {facts.live} --ranks {listed}: {why}")
    return Setting(f"profile.steps=10:14 profile.ranks=[{listed}]", why)


def _advise_launch(finding: Finding, facts: Facts) -> list[Setting]:
    advice = []
    if facts.collective_kib is not None and facts.collective_kib <= SMALL_KIB:
        advice.append(
            Setting("parallel.strategy=ddp", "one reduction a step: the model is small enough for each rank to keep it")
        )
    if facts.micro_batches > 1:
        advice.append(Setting(f"train.micro_batch={facts.micro_batch * 2}", "half as many operations per step"))
    else:
        advice.append(
            Setting(
                f"{_format_doubled_batch(facts)} train.micro_batch={facts.micro_batch * 2}",
                f"larger operations; {_NEW_BATCH}",
            )
        )
    if not facts.compile:
        advice.append(Setting("parallel.compile=true", "fuses operations"))
    return advice


def _advise_bubble(finding: Finding, facts: Facts) -> list[Setting]:
    advice = []
    if facts.micro_batch > 1:
        advice.append(
            Setting(f"train.micro_batch={max(1, facts.micro_batch // 2)}", "more micro-batches fill the pipeline")
        )
    advice.append(Setting("parallel.pipeline.schedule=zbv", "fills idle time with weight gradients"))
    advice.append(Setting("parallel.pipeline.resplit=true", "splits the stages by measured times"))
    return advice


def _advise_checkpoint(finding: Finding, facts: Facts) -> list[Setting]:
    advice = []
    if not facts.background_saves:
        advice.append(Setting("checkpoint.background=true", "writes while training goes on"))
    if facts.checkpoint_every:
        advice.append(Setting(f"checkpoint.every={facts.checkpoint_every * 4}", "saves less often"))
    advice.append(Setting("", "hpc-train bench checkpoint: says what the file system can take"))
    return advice


def _advise_input(finding: Finding, facts: Facts) -> list[Setting]:
    return [
        Setting("", "hpc-train data build: tokens are then mapped from a file, and no sample is computed in a step"),
        Setting("", "put the data on a local disk of the nodes, or on a faster file system"),
    ]


def _advise_memory(finding: Finding, facts: Facts) -> list[Setting]:
    return [Setting("", "look for tensors that outlive their step: a list of losses without .item(), a growing cache")]


def _advise_compute(finding: Finding, facts: Facts) -> list[Setting]:
    return [] if facts.compile else [Setting("parallel.compile=true", "fuses operations")]


_ADVICE = {
    "network": _advise_network,
    "straggler": _advise_straggler,
    "imbalance": _advise_imbalance,
    "launch": _advise_launch,
    "bubble": _advise_bubble,
    "checkpoint": _advise_checkpoint,
    "input": _advise_input,
    "memory": _advise_memory,
    "compute": _advise_compute,
}
