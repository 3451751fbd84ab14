"""The words for the state of a run, and which of Slurm's words is which."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """All there are."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    REQUEUED = "REQUEUED"
    DONE = "DONE"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    PREEMPTED = "PREEMPTED"
    CANCELLED = "CANCELLED"
    UNKNOWN = "UNKNOWN"

    @property
    def waiting(self) -> bool:
        """Not started, or to be started again."""
        return self in (State.PENDING, State.REQUEUED)

    @property
    def ended(self) -> bool:
        """Nothing more will happen by itself."""
        return self not in (State.PENDING, State.RUNNING, State.REQUEUED, State.UNKNOWN)


@dataclass(frozen=True)
class Status:
    """One point of a sweep, or the one of a single run."""

    point: str
    job_id: str | None
    """`12`, or `12_3` of an array; None of a run without Slurm."""
    attempt: int | None
    """The newest that began; None before the first."""
    state: State
    reason: str = ""
    nodes: tuple[str, ...] = ()
    exit_code: int | None = None
    """None until it ended; 128 + n where signal n ended it."""
    step: int | None = None
    """Last step made; None before the first."""
    steps: int | None = None
    """Steps of the whole run; None until its ranks have reported them."""
    loss: float | None = None
    """Loss of the last step; None also if it is not finite."""
    seconds_since_step: float | None = None
    """Seconds since the last step of a running run, or since its attempt began."""

    warnings: tuple[str, ...] = ()
    """What ranks of the newest attempt have warned of, each text once."""

    def row(self) -> dict[str, Any]:
        """As `hpc-train status --json` prints it."""
        return {**asdict(self), "state": str(self.state), "nodes": list(self.nodes), "warnings": list(self.warnings)}


# Slurm's words of any version (squeue(1), JOB STATE CODES); those of a job that holds nodes count as running.
_OURS = {
    "PENDING": State.PENDING,
    "CONFIGURING": State.PENDING,
    "POWER_UP_NODE": State.PENDING,
    "RESV_DEL_HOLD": State.PENDING,
    "REQUEUED": State.REQUEUED,
    "REQUEUE_FED": State.REQUEUED,
    "REQUEUE_HOLD": State.REQUEUED,
    "SPECIAL_EXIT": State.REQUEUED,
    "EXPEDITING": State.REQUEUED,
    "RUNNING": State.RUNNING,
    "COMPLETING": State.RUNNING,
    "RESIZING": State.RUNNING,
    "SIGNALING": State.RUNNING,
    "STAGE_OUT": State.RUNNING,
    "STOPPED": State.RUNNING,
    "SUSPENDED": State.RUNNING,
    "UPDATE_DB": State.RUNNING,
    "COMPLETED": State.DONE,
    "FAILED": State.FAILED,
    "LAUNCH_FAILED": State.FAILED,
    "RECONFIG_FAIL": State.FAILED,
    "TIMEOUT": State.TIMEOUT,
    "DEADLINE": State.TIMEOUT,
    "NODE_FAIL": State.NODE_FAIL,
    "BOOT_FAIL": State.NODE_FAIL,
    "OUT_OF_MEMORY": State.OUT_OF_MEMORY,
    "PREEMPTED": State.PREEMPTED,
    "CANCELLED": State.CANCELLED,
    "REVOKED": State.CANCELLED,
}


def ours(word: str) -> State:
    """Our word for one of Slurm's, also as sacct has it (`CANCELLED by 1000`, `CANCELLED+`); UNKNOWN for a new one."""
    return _OURS.get(word.split(" ")[0].split(",")[0].rstrip("+"), State.UNKNOWN)
