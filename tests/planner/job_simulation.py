"""Simulate a job event by event: steps, saves, interruptions, restarts, repairs. It uses none of the planner's
formulas.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hpc_train.planner.reliability.goodput import Interruption, Save


@dataclass
class Clock:
    """Draws exponential times to the next interruption of any kind."""

    kinds: Sequence[Interruption]
    random: np.random.Generator

    def next(self) -> tuple[float, Interruption]:
        """Return the seconds until the next interruption, and its kind."""
        times = [(self.random.exponential(1 / float(kind.per_second)), at) for at, kind in enumerate(self.kinds)]
        seconds, at = min(times)
        return seconds, self.kinds[at]


@dataclass
class Outcome:
    """The outcome, in seconds."""

    kept: float = 0.0
    saving: float = 0.0
    up: float = 0.0
    wall: float = 0.0


def run(interval: float, save: Save, restart: float, kinds: Sequence[Interruption], cycles: int, seed: int) -> Outcome:
    """Simulate so many interruptions of a job."""
    clock, outcome = Clock(kinds, np.random.default_rng(seed)), Outcome()
    for _ in range(cycles):
        until, kind = clock.next()
        _attempt(interval, save, until, kind.saved, outcome)
        outcome.wall += until + float(kind.down_seconds) + _restart(restart, clock)
    return outcome


def _attempt(interval: float, save: Save, until: float, saved: bool, outcome: Outcome) -> None:
    """Simulate steps and saves until the interruption."""
    now, done, whole, stalls, whole_stalls = 0.0, 0.0, 0.0, 0.0, 0.0
    writing: list[tuple[float, float, float]] = []
    while now < until:
        worked = min(interval, until - now)
        now, done = now + worked, done + worked
        if now >= until:
            break
        begun = now
        stalled = min(float(save.stall_seconds), until - now)
        now, stalls = now + stalled, stalls + stalled
        writing.append((begun + float(save.write_seconds), done, stalls))
    for at, work, stall in writing:
        if at <= until:
            whole, whole_stalls = work, stall
    outcome.kept += done if saved else whole
    outcome.saving += stalls if saved else whole_stalls
    outcome.up += until


def _restart(seconds: float, clock: Clock) -> float:
    """Return the seconds until a restart succeeds."""
    spent = 0.0
    while True:
        until, kind = clock.next()
        if until >= seconds:
            return spent + seconds
        spent += until + float(kind.down_seconds)


def waits(per_second: float, repair: Callable[[], float], spares: int, failures: int, seed: int) -> float:
    """Return the mean seconds that a job waits for a node after a failure, over so many failures."""
    random, now, waited = np.random.default_rng(seed), 0.0, 0.0
    away: list[float] = []
    for _ in range(failures):
        now += random.exponential(1 / per_second)
        while away and away[0] <= now:
            heapq.heappop(away)
        heapq.heappush(away, now + repair())
        if len(away) > spares:
            back = heapq.heappop(away)
            waited, now = waited + back - now, back
    return waited / failures
