"""Runs that are slow, but do not hang, are left alone."""

from __future__ import annotations

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from jobs import LONG, Workshop

ALARMS = {"hang", "lost_node", "restart", "transient", "disagree", "slow_node", "skipped", "rollback"}
DEADLINES = ("resilience.hang.first_step_seconds=30", "resilience.hang.save_seconds=30")
"""Of the others the default is used: 10 seconds for a step."""
LONGEST = {"build": 12, "train": 6, "eval": 6, "save": 12}
"""Seconds that a rank may sleep at each moment, on a machine whose cores are all busy."""


def draw_delays(draw: random.Random, ranks: int) -> str:
    """Return where ranks of a run are late, as faulty_model reads it: nowhere, or at one or two moments."""
    faults = []
    for _ in range(draw.choice((0, 1, 1, 2))):
        moment = draw.choice(list(LONGEST))
        times = {"build": 1, "train": 12, "eval": 8, "save": 3}[moment]
        how = draw.choice(("nap", "nap", "pause"))
        seconds = draw.uniform(0.5, LONGEST[moment] if how == "nap" else 5.0)
        faults.append(f"{draw.randrange(ranks)}:{moment}:{draw.randint(1, times)}:{how}{seconds:.1f}")
    return " ".join(faults)


def find_alarms(workshop: Workshop, seed: int) -> str | None:
    """Train with delays, and return what was wrong with the run; None if nothing was."""
    draw = random.Random(seed)
    ranks = draw.choice((1, 1, 2))
    faults = draw_delays(draw, ranks)
    workshop.folder.mkdir()
    ended = workshop.train("run", *LONG, *DEADLINES, f"launch.ranks={ranks}", faults=faults)
    events = [json.loads(line) for line in (workshop.folder / "run" / "events.jsonl").read_text().splitlines()]
    alarms = [event for event in events if event["event"] in ALARMS]
    return f"seed {seed} ({faults}): {ended}, {alarms}" if ended.code or alarms else None


def find_alarms_in_runs(folder: Path, store: Path, runs: int) -> list[str]:
    """Train so many runs, as many at a time as there are cores; returns those that ended badly or raised an alarm."""
    workshops = [Workshop(folder / str(seed), store) for seed in range(runs)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [found for found in pool.map(find_alarms, workshops, range(runs)) if found is not None]


def test_a_few_slow_runs_raise_no_alarm(tmp_path: Path, store: Path) -> None:
    assert find_alarms_in_runs(tmp_path, store, 2) == []


@pytest.mark.long
@pytest.mark.timeout(3 * 3600)
def test_a_thousand_slow_runs_raise_no_alarm(tmp_path: Path, store: Path) -> None:
    assert find_alarms_in_runs(tmp_path, store, 1000) == []
