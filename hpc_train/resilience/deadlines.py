"""Learn how long each phase of a rank takes, and from when on a rank in it counts as hung."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from hpc_train.resilience.heartbeat import Phase

_FIRST = 5
"""Observations of a phase before its deadline is learned."""
_REMEMBERED = 500
"""Latest observations that count."""


@dataclass(frozen=True)
class HangLimits:
    """Least deadlines in seconds, and the factor; see conf/resilience (hang)."""

    factor: float = 5.0
    step: float = 10.0
    first_step: float = 900.0
    start: float = 900.0
    load: float = 1800.0
    save: float = 900.0

    def floor(self, phase: Phase) -> float:
        """Return the least deadline of a phase."""
        return {
            Phase.START: self.start,
            Phase.LOAD: self.load,
            Phase.FIRST_STEP: self.first_step,
            Phase.SAVE: self.save,
            Phase.END: self.save,
        }.get(phase, self.step)


@dataclass
class Deadlines:
    """Deadlines of all phases, learned from how long they have taken on any rank of a node."""

    limits: HangLimits
    _seconds: dict[Phase, deque[float]] = field(default_factory=dict)

    def observe(self, phase: Phase, seconds: float) -> None:
        """Add how long a rank stayed in a phase between two entries."""
        self._seconds.setdefault(phase, deque(maxlen=_REMEMBERED)).append(seconds)

    def seconds(self, phase: Phase) -> float:
        """Return after how many seconds without a new entry a rank in this phase counts as hung.

        Until a phase has been seen five times it has the deadline of a first step, or its own if that is longer.
        """
        floor, seen = self.limits.floor(phase), self._seconds.get(phase, ())
        if len(seen) < _FIRST:
            return max(floor, self.limits.first_step)
        ordered = sorted(seen)
        return max(floor, self.limits.factor * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))])


def limits_from_settings(settings: Mapping[str, float]) -> HangLimits:
    """Return the limits from the `resilience.hang` part of a configuration, as a mapping."""
    return HangLimits(
        settings["factor"],
        settings["step_seconds"],
        settings["first_step_seconds"],
        settings["start_seconds"],
        settings["load_seconds"],
        settings["save_seconds"],
    )
