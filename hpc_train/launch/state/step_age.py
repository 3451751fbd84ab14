"""Find out how long ago a run has made its last step, whatever the clocks of machines say.

Times of files come from the clock of the machine that wrote them or of the file server, and a clock may have been set
since. Where the ranks run on this machine, their heartbeats have the time on a clock that nobody can set.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_train.processes import read_process_age
from hpc_train.resilience.heartbeat import Beat, Phase, read_beats
from hpc_train.units import format_age

LARGEST_SKEW_SECONDS = 60.0
"""Seconds by which the clock here may be behind that of a file, as clocks of different machines are."""
_IN_A_STEP = (Phase.STEP, Phase.DATA)
"""Phases that begin as the step before ends."""


@dataclass(frozen=True)
class StepAge:
    """The time since the last step, as far as that can be known here."""

    seconds: float | None = None
    """None: not known."""
    why_unknown: str = ""
    """Why it cannot be told, in one line."""


def measure_step_age(logs: Path, last: float) -> StepAge:
    """Return the time since the last step of the attempt with these logs.

    last: when it was made, or when the attempt began, in seconds since 1970 by the clock of whoever wrote that.
    """
    age = time.time() - last
    if beats := read_beats(logs):
        return StepAge(_correct_age(age, beats))
    if age < -LARGEST_SKEW_SECONDS:
        why = f"the clock here is {format_age(-age)} behind that of its files"
        return StepAge(None, f"the age of its last step is not known: {why}")
    return StepAge(max(0.0, age))


def _correct_age(age: float, beats: Sequence[Beat]) -> float:
    """Return the age of a step that agrees with the heartbeats of ranks on this machine.

    age: by the clock of this machine, which may have been set.
    """
    newest = max(beats, key=lambda beat: beat.seconds)
    silent = max(0.0, time.monotonic() - newest.seconds)
    if newest.phase in _IN_A_STEP:
        return silent
    # It has trained no longer than it has run, and made no step since its last entry.
    longest = read_process_age(newest.process)
    return max(silent, age if longest is None else min(age, longest))
