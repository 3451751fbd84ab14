"""Decide whether ranks that failed are started again in the same allocation: a pure function, and its budget.

A process that was killed, a rank that hangs, a node's hiccup: these may not come again, so the ranks are started again,
up to `resilience.restarts` times in a row without a newer checkpoint. An exception of the program comes again at the
same place unless something has changed: it is tried again only if the attempt has saved a checkpoint. What the user has
to mend is never tried again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Cause(Enum):
    """Why an attempt ended before its time."""

    USER = "a mistake in the input"
    CANCELLED = "it was cancelled"
    EXCEPTION = "an exception"
    MEMORY = "no memory left"
    KILLED = "a rank was killed"
    HANG = "a hang"
    UNKNOWN = "ranks that left no reason"


_MAY_NOT_COME_AGAIN = (Cause.KILLED, Cause.HANG)


@dataclass(frozen=True)
class Budget:
    """What restarts are left."""

    limit: int
    """resilience.restarts."""
    used: int = 0
    """Restarts in a row without a newer checkpoint."""
    saved: int | None = None
    """The newest committed step when the last attempt began; None: none."""


@dataclass(frozen=True)
class Decision:
    """Whether to start the ranks again, why, and the budget after that."""

    restart: bool
    why: str
    budget: Budget


def decide_restart(cause: Cause, saved: int | None, budget: Budget, saves: bool) -> Decision:
    """Decide after an attempt that failed.

    saved: the newest committed step now. saves: whether the run makes checkpoints at all.
    """
    advanced = saved is not None and (budget.saved is None or saved > budget.saved)
    used = 0 if advanced else budget.used
    again = Budget(budget.limit, used + 1, saved)
    if cause in (Cause.USER, Cause.CANCELLED):
        return Decision(False, f"not started again: {cause.value}", budget)
    if not saves:
        return Decision(False, "nothing is saved that it could go on from (checkpoint.every=0)", budget)
    if used >= budget.limit:
        why = f"{used} restarts in a row brought no newer checkpoint (resilience.restarts={budget.limit})"
        return Decision(False, why if budget.limit else "resilience.restarts=0", budget)
    if cause in _MAY_NOT_COME_AGAIN or advanced:
        place = f"from step {saved}" if saved is not None else "from the beginning"
        count = f"restart {used + 1} of {budget.limit} without a newer save"
        return Decision(True, f"starting again {place} ({count})", again)
    return Decision(False, "the same would come again: no checkpoint was saved since the last start", budget)
