"""The tuning against an exhaustive search, with real runs of two ranks.

An exhaustive search has 82 runs, of about five seconds. Nothing else may run on the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from lab import BASE
from test_tuning import NO_OVERLAP, START, best_of, list_space

from hpc_train.report.tuning.search import Tuning
from hpc_train.report.tuning.trials import Trial, measure_locally

STEPS = 24
CHOSEN = ("train.global_batch", "train.micro_batch", "train.steps")
MODEL = [word for word in BASE if not word.startswith(CHOSEN)]
ROUNDS = 5
"""Runs of each of the two best, in turn, from which they are compared."""
Measure = Callable[[Mapping[str, str]], Trial]


@pytest.mark.long
@pytest.mark.timeout(2 * 3600)
@pytest.mark.parametrize("start", [START, NO_OVERLAP], ids=["wrong layout", "no overlap"])
def test_it_finds_the_best_of_real_runs(start: Sequence[str], store: Path, tmp_path: Path) -> None:
    base = [*MODEL, f"data.path={store}", "launch.ranks=2"]
    space = list_space()
    tuning = Tuning(
        [*base, *start], measure_locally([*base, *start], tmp_path / "tune", STEPS), lambda trial, best: None, 1e9, 2
    )
    found = tuning.run()
    assert found is best_of(tuning)
    assert len(tuning.trials) <= len(space) / 5
    measure = measure_locally([*base, "train.global_batch=16"], tmp_path / "all", STEPS)
    best = min((measure(describe_layout(settings)) for settings in space), key=lambda trial: trial.seconds)
    tuned = {**dict(word.split("=") for word in start), **found.settings}
    pairs = [(measure(tuned).seconds, measure(best.settings).seconds) for _ in range(ROUNDS)]
    ratio = float(np.median([here / there for here, there in pairs]))
    print(f"\n{len(tuning.trials)} runs of {len(space)}: {ratio:.3f} of the best: {tuned} beside {dict(best.settings)}")
    assert ratio <= 1.03


def describe_layout(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings with the data-parallel degrees of their layout."""
    share = 2 // (int(settings["parallel.tp"]) * int(settings["parallel.pp"]))
    replicated = settings["parallel.strategy"] == "ddp"
    return {
        **settings,
        "parallel.dp_replicate": str(share) if replicated else "1",
        "parallel.dp_shard": "1" if replicated else str(share),
    }
