"""What a checkpoint of ours weighs, and how long it stops a job."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_train.config.run import RunConfig
from hpc_train.planner.goodput import Save

_LEAST_STALL = 1.0
"""Seconds. MegaScale tells of several for copying to the host (Jiang et al. 2024, arXiv:2402.15627, section 4.4)."""
_WRITE = "plan.checkpoint_seconds and cluster.filesystem.write_gb_s"


def checkpoint_bytes(config: RunConfig, parameters: float) -> float:
    """Of a whole job: parameters and both of AdamW's moments in fp32, in fp64 for precision=fp64. Copies on several
    ranks are written once."""
    return 3 * parameters * (8 if config.precision.name == "fp64" else 4)


@dataclass(frozen=True)
class Saving:
    """What is known of a save."""

    save: Save
    """What is not known counts as no time."""
    known: bool
    """How long it takes until a job can be resumed from it."""
    unknown: tuple[str, ...]
    """One line each."""


def saving_of(config: RunConfig, parameters: float, ranks: int) -> Saving:
    """Stall and duration of a save, as plan.checkpoint_stall_seconds and plan.checkpoint_seconds say.

    Where they do not: in the background the job stops while state is copied to the host, and the file system takes the
    rest of the time; else it stops for all of it. Every rank has an equal part, and the figures of cluster.filesystem
    and cluster.node are taken as reached, except that ranks on several nodes stop for a second at least.
    """
    plan, system = config.plan, config.cluster.filesystem
    size = checkpoint_bytes(config, parameters)
    write = size / (system.write_gb_s * 1e9) if system.write_gb_s else None
    stall, told = _stall(config, size, ranks, write)
    whole = plan.checkpoint_seconds if plan.checkpoint_seconds is not None else write and stall + write
    if not config.checkpoint.background and plan.checkpoint_seconds is None:
        whole = whole and stall
    if whole is None:
        told = (*told, f"{_WRITE}: writing counts as no time")
    return Saving(Save(stall, max(stall, whole or 0.0)), whole is not None, told)


def _stall(config: RunConfig, size: float, ranks: int, write: float | None) -> tuple[float, tuple[str, ...]]:
    """Seconds, and what is not known of them."""
    plan, node = config.plan, config.cluster.node
    if plan.checkpoint_stall_seconds is not None:
        return plan.checkpoint_stall_seconds, ()
    if not config.checkpoint.background:
        return plan.checkpoint_seconds or write or 0.0, ()
    least = _LEAST_STALL if node.gpus and ranks > config.cluster.ranks_per_node else 0.0
    if not node.gpus:
        return least, ()
    if not node.pcie_gb_s:
        return least, ("cluster.node.pcie_gb_s: copying a checkpoint to the host counts as no time",)
    return max(least, size / ranks / (node.pcie_gb_s * 1e9)), ()


def kept_bytes(config: RunConfig, parameters: float) -> float:
    """On storage all the time: the checkpoints kept, and one that is being written."""
    kept = config.checkpoint.keep + config.checkpoint.keep_best + 1
    return kept * checkpoint_bytes(config, parameters) if config.checkpoint.every else 0.0
