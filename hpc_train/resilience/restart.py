"""Decide what follows a fault: start the ranks again here, give the job back to the queue, or give up. Pure functions.

A killed process, a hanging rank or a silent node may not happen again, so the run is restarted, up to
`resilience.restarts` times in a row without a newer checkpoint. The same fault three times in a row at the same place
is not an accident: then the run ends and says why. An exception of the program will occur again at the same place
unless something has changed, so it is retried only if the attempt has saved a checkpoint, or if it came while the ranks
loaded one. An error that the user has to fix is never retried, nor is a run that reached its end with a bad result.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum


class Cause(Enum):
    """Why an attempt ended before its time."""

    USER = "a mistake in the input"
    INCOMPLETE = "its result is bad or not saved"
    CHECKPOINT = "a checkpoint cannot be read or written"
    STOPPED = "it stopped without a save"
    REFUSED = "its ranks cannot run here"
    CANCELLED = "it was cancelled"
    EXCEPTION = "an exception"
    MEMORY = "no memory left"
    KILLED = "a rank was killed"
    HANG = "a hang"
    LAUNCH = "ranks that did not start"
    LOST_NODE = "a lost node"
    CONNECTION = "a lost connection"
    TIME_LIMIT = "the time limit came before a save"
    PREEMPTED = "it was preempted before a save"
    SLOW_NODE = "a slow node"
    NUMBERS = "numbers that were not finite"
    DISAGREE = "ranks that did not agree"
    UNKNOWN = "ranks that left no reason"


_MAY_NOT_COME_AGAIN = (
    Cause.KILLED,
    Cause.HANG,
    Cause.LAUNCH,
    Cause.LOST_NODE,
    Cause.CONNECTION,
    Cause.TIME_LIMIT,
    Cause.PREEMPTED,
    Cause.SLOW_NODE,
    Cause.NUMBERS,
    Cause.DISAGREE,
)
_WOULD_COME_AGAIN = (
    Cause.USER,
    Cause.INCOMPLETE,
    Cause.CHECKPOINT,
    Cause.STOPPED,
    Cause.REFUSED,
    Cause.CANCELLED,
)
"""These are never retried, whatever was saved: a person has to look first."""
SAME_FAULTS = 3
"""Number of faults with one signature, without a newer checkpoint in between, after which the run ends."""
_CHANGING_TEXT = re.compile(r"0x[0-9a-f]+|\d+|/\S+")


@dataclass(frozen=True)
class Fault:
    """The fault that ended an attempt."""

    cause: Cause
    host: str = ""
    """The node that it happened on, if one stands out; of nodes that were lost together, all, separated by commas."""
    text: str = ""
    """The error, in one line."""

    @property
    def signature(self) -> str:
        """Key under which two faults count as the same: cause, node, and error without its numbers.

        An error of the program counts as the same on any node.
        """
        if self.cause in _MAY_NOT_COME_AGAIN:
            return f"{self.cause.value} on {self.host}" if self.host else self.cause.value
        return f"{self.cause.value}: {_CHANGING_TEXT.sub('#', self.text)[:200]}"


class Action(Enum):
    """Reaction to a fault."""

    RESTART = "restarted"
    """The ranks start again in the same allocation."""
    REQUEUE = "requeued"
    """The job goes back to the queue, to get other nodes."""
    GIVE_UP = "given up"
    """The fault has come too often: the job must not run again."""
    END = "ended"
    """Trying again is of no use, or not wanted."""


@dataclass(frozen=True)
class History:
    """The faults in a row, without a newer checkpoint between them, before the current one."""

    signatures: tuple[str, ...] = ()
    saved: int | None = None
    """The newest committed step when the last attempt began; None: none."""

    def after(self, saved: int | None) -> History:
        """Return what still counts if `saved` is the newest committed step now: nothing, if it is newer."""
        advanced = saved is not None and (self.saved is None or saved > self.saved)
        return History((), saved) if advanced else self


@dataclass(frozen=True)
class Policy:
    """Limits on what a run may do about faults."""

    restarts: int
    """resilience.restarts."""
    saves: bool = True
    """Whether it makes checkpoints at all."""
    enough_nodes: bool = True
    """Whether the allocation has enough nodes that are neither lost nor to be left out."""
    fewer_nodes: str = ""
    """The nodes that are left, such as "2 of 3 nodes", if the run can go on with them; else empty."""
    can_requeue: bool = False
    """Whether the job may go back to the queue, or another one of its chain may go on."""
    by: str = "by a requeue"
    """How the run gets other nodes."""
    enough_time: bool = True
    """Whether the job is not about to be asked to stop before its time limit."""
    stopping: bool = False
    """Whether the ranks failed while they stopped on purpose: they do not start again in a job that has to end."""
    may_load_again: bool = False
    """Whether the ranks died while they loaded a checkpoint, and are to load it once more, or an older one."""


@dataclass(frozen=True)
class Decision:
    """The reaction to a fault, and the reason in one line."""

    action: Action
    why: str

    @property
    def goes_on(self) -> bool:
        """Whether the run continues automatically."""
        return self.action in (Action.RESTART, Action.REQUEUE)


def decide_after_fault(fault: Fault, history: History, saved: int | None, policy: Policy) -> Decision:
    """Decide after an attempt that failed. saved: the newest committed step now."""
    if fault.cause in _WOULD_COME_AGAIN:
        return Decision(Action.END, f"not started again: {fault.cause.value}")
    if not policy.saves:
        return Decision(Action.END, "nothing is saved to continue from (checkpoint.every=0)")
    if not policy.restarts:
        return Decision(Action.END, "resilience.restarts=0")
    place = f"from step {saved}" if saved is not None else "from the beginning"
    if fault.cause is Cause.PREEMPTED:  # that is no fault, however often it comes
        if policy.can_requeue:
            return Decision(Action.REQUEUE, f"going on {place} after a preemption, {policy.by}")
        return Decision(Action.END, "preempted, and the job may not be requeued (launch.max_attempts)")
    counted = history.after(saved)
    advanced = counted is not history
    used, same = len(counted.signatures), counted.signatures.count(fault.signature) + 1
    # First what ends the run for good, whatever else is possible: the job script must not requeue it either.
    if same >= SAME_FAULTS:
        why = f"{same} times in a row without a newer checkpoint: {fault.signature}"
        return Decision(Action.GIVE_UP, why)
    if used >= policy.restarts:
        why = f"{used} restarts in a row brought no newer checkpoint (resilience.restarts={policy.restarts})"
        return Decision(Action.GIVE_UP, why)
    # An exception at the same step with the same data: computing it again gives the same exception.
    would_come_again = fault.cause not in _MAY_NOT_COME_AGAIN and not policy.may_load_again
    if would_come_again and not advanced and not policy.stopping:
        return Decision(Action.END, "it would fail the same way again: no checkpoint was saved since the last start")
    count = f"restart {used + 1} of {policy.restarts} without a newer save"
    if fault.cause is Cause.TIME_LIMIT and not policy.can_requeue:
        return Decision(Action.END, "no time is left, and the job may not be requeued (launch.max_attempts)")
    # Restarting here saves the wait in the queue. Near the time limit that gains nothing, unless there is no queue to
    # go to.
    if policy.enough_nodes and not policy.stopping and (policy.enough_time or not policy.can_requeue):
        fewer = f" on {policy.fewer_nodes}" if policy.fewer_nodes else ""
        return Decision(Action.RESTART, f"starting again {place}{fewer} ({count})")
    if policy.can_requeue:
        return Decision(Action.REQUEUE, f"going on {place} {_explain_requeue(policy)}, {policy.by} ({count})")
    lacks = "the ranks were to stop" if policy.stopping else "too few nodes are left"
    return Decision(Action.END, f"{lacks}, and the job may not be requeued (launch.max_attempts)")


def _explain_requeue(policy: Policy) -> str:
    """Return why the ranks do not start again in the same job."""
    if not policy.enough_nodes:
        return "on other nodes"
    return "as its ranks were to stop" if policy.stopping else "as the time limit of this job is near"
