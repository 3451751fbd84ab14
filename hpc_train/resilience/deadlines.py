"""Learn how long each phase of a rank takes, and after which time a rank in it counts as hung.

What one attempt has learned about steps is left in the run directory for the next: ranks that hang soon after a restart
would otherwise have the deadline of a first step, which may compile for minutes. Standard library only.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hpc_train.regular_files import read_json, write_private_file
from hpc_train.resilience.heartbeat import Phase

DEADLINES_FILE = "deadlines.json"
"""File in a run directory: seconds by phase."""
_LEARNED_PHASES = (Phase.FIRST_STEP, Phase.STEP, Phase.DATA, Phase.EVALUATE)
"""Phases that take as long in the next attempt. Imports and loading depend on caches, and keep their own deadlines."""
_FIRST_STEP_FLOOR = 20.0
"""Least deadline of a first step, however quick those of earlier attempts were: it opens connections between ranks."""
_COMPILED_FIRST_STEP_FLOOR = 60.0
"""As above where first steps compile: a new node may have to compile what an earlier one found in its cache."""

_LAST_TRY_FACTOR = 9.0
"""Factor on the deadlines of steps if one more hang would end the run: ranks that are only slow at one place would
otherwise be killed there in every attempt."""
_MIN_OBSERVATIONS = 5
"""Observations of a phase that are needed before its deadline is learned from them."""
_MAX_OBSERVATIONS = 500
"""Number of observations of a phase that count, the latest ones."""
_SUFFICIENT_OBSERVATIONS = 101
"""Number of observations from which on those of earlier attempts do not count any more: a single slow one among them
does not change their 99th percentile."""


@dataclass(frozen=True)
class HangLimits:
    """Least deadlines in seconds, and the factor; see conf/resilience (hang)."""

    factor: float = 5.0
    step: float = 10.0
    first_step: float = 900.0
    start: float = 900.0
    load: float = 1800.0
    save: float = 900.0
    known_first_step: float = _COMPILED_FIRST_STEP_FLOOR
    """Least deadline of a first step in a run whose earlier attempts have made one."""
    patience: float = 1.0
    """Factor of the deadlines of steps, batches and evaluations, however they were learned."""

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
    earlier: Mapping[Phase, float] = field(default_factory=dict)
    """Typical seconds by phase, learned in earlier attempts."""
    _seconds: dict[Phase, deque[float]] = field(default_factory=dict)
    """Observed durations by phase."""

    def observe(self, phase: Phase, seconds: float) -> None:
        """Add how long a rank stayed in a phase between two entries."""
        self._seconds.setdefault(phase, deque(maxlen=_MAX_OBSERVATIONS)).append(seconds)

    def seconds(self, phase: Phase) -> float:
        """Return after how many seconds without a new entry a rank in this phase counts as hung."""
        return self._find_deadline(phase) * (self.limits.patience if phase in _LEARNED_PHASES else 1.0)

    def _find_deadline(self, phase: Phase) -> float:
        """Return the deadline of a phase.

        Until a phase has been seen five times, or is known from an earlier attempt, it has the deadline of a first
        step, or its own if that is longer.
        """
        floor, seen = self.limits.floor(phase), self._seconds.get(phase, ())
        if phase in self.earlier:
            if phase is Phase.FIRST_STEP:
                # The configured deadline of a first step allows for a slow compilation. An attempt that has seen one
                # need not wait that long again.
                floor = min(floor, self.limits.known_first_step)
            earlier = 0.0 if len(seen) >= _SUFFICIENT_OBSERVATIONS else self.earlier[phase]
            typical = max(earlier, _find_typical(seen))
        elif len(seen) < _MIN_OBSERVATIONS:
            # Too little is known: be patient, since ending a healthy run is worse than waiting.
            return max(floor, self.limits.first_step)
        else:
            typical = _find_typical(seen)
        return max(floor, self.limits.factor * typical)

    def learned(self) -> dict[Phase, float]:
        """Return what the next attempt should know: seconds of phases that were seen."""
        learned = dict(self.earlier)
        for phase in _LEARNED_PHASES:
            seen = self._seconds.get(phase, ())
            if len(seen) >= (1 if phase is Phase.FIRST_STEP else _MIN_OBSERVATIONS):
                earlier = 0.0 if len(seen) >= _SUFFICIENT_OBSERVATIONS else learned.get(phase, 0.0)
                learned[phase] = max(earlier, _find_typical(seen))
        return learned


def _find_typical(seen: Iterable[float]) -> float:
    """Return the 99th percentile; 0 of nothing."""
    ordered = sorted(seen)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] if ordered else 0.0


def merge_learned(parts: Iterable[Mapping[Phase, float]]) -> dict[Phase, float]:
    """Return the longest time of each phase. parts: what each node has learned."""
    merged: dict[Phase, float] = {}
    for part in parts:
        for phase, seconds in part.items():
            merged[phase] = max(merged.get(phase, 0.0), seconds)
    return merged


def write_learned(run: Path, learned: Mapping[Phase, float]) -> None:
    """Save what was learned for the next attempt, which starts from nothing if the disk is full."""
    with suppress(OSError):
        values = {phase.name: round(seconds, 3) for phase, seconds in learned.items()}
        write_private_file(run / DEADLINES_FILE, json.dumps(values) + "\n")


def read_learned(run: Path) -> dict[Phase, float]:
    """Return what earlier attempts have left; {} if there is nothing, or it is damaged."""
    try:
        learned = {Phase[name]: float(seconds) for name, seconds in read_json(run / DEADLINES_FILE).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {phase: seconds for phase, seconds in learned.items() if phase in _LEARNED_PHASES and 0 <= seconds < 1e6}


def make_hang_limits(settings: Mapping[str, float], compiles: bool, last_try: bool = False) -> HangLimits:
    """Make the limits from `resilience.hang` of a configuration, as a mapping.

    compiles: whether the first steps of each process compile (parallel.compile). last_try: whether one more hang would
    end the run.
    """
    return HangLimits(
        factor=settings["factor"],
        step=settings["step_seconds"],
        first_step=settings["first_step_seconds"],
        start=settings["start_seconds"],
        load=settings["load_seconds"],
        save=settings["save_seconds"],
        known_first_step=_COMPILED_FIRST_STEP_FLOOR if compiles else _FIRST_STEP_FLOOR,
        patience=_LAST_TRY_FACTOR if last_try else 1.0,
    )
