"""Go back to a good checkpoint when loss or gradient are not finite for several steps in a row.

Skipping a step helps where its samples are to blame. Where the parameters are, every further step is lost, and so is
every checkpoint since they went wrong. A checkpoint is therefore *good* only when some steps after it had finite
numbers. Going back marks all checkpoints newer than the good one as bad, records the samples of the failed steps, so
that they are skipped when training reaches them again, and ends the attempt. The launcher starts the ranks again
(hpc_train.launch.recovery.restarting), and they resume as usual: from the newest checkpoint that is not marked.

A run that is given the final skipped.json from its beginning computes the same, bit for bit.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpc_train.checkpoint import mark_bad
from hpc_train.checkpoint.format.manifest import read_manifest
from hpc_train.checkpoint.storage.step_directory import find_steps
from hpc_train.errors import IncompleteRun
from hpc_train.regular_files import read_json, write_private_file
from hpc_train.training.numerics.anomalies import SkippedSteps

log = logging.getLogger(__name__)

ROLLBACKS = "rollbacks.json"
"""File in a run directory: the good step, how often the run went back, and the samples to skip."""
MAX_ROLLBACKS = 3
"""So often a run goes back to the same step; then something is wrong that skipping samples does not mend."""


class WentBack(IncompleteRun):
    """Raised on all ranks when the attempt ends in order to go on from an earlier checkpoint."""


@dataclass
class RollbackState:
    """The good checkpoints of a run, and its rollbacks, across attempts; the same on every rank."""

    good_after: int
    """Finite steps in a row that make the checkpoint before them good."""
    good: int | None = None
    """Step of the newest good checkpoint."""
    times: int = 0
    """How often the run has gone back to `good`."""
    entries: list[SkippedSteps] = field(default_factory=list)
    """Steps whose samples are to be skipped, because the run went back after them."""
    _waiting: list[int] = field(default_factory=list)
    _finite_steps: int = 0

    def add_checkpoint(self, step: int) -> None:
        """Wait for the steps after a checkpoint, which was saved or resumed just now."""
        self._waiting.append(step)

    def count_step(self, step: int, finite: bool) -> bool:
        """Count a step; returns whether there is a newer good checkpoint now."""
        self._finite_steps = self._finite_steps + 1 if finite else 0
        if self._finite_steps < self.good_after:
            return False
        proved = [saved for saved in self._waiting if saved <= step - self.good_after]
        self._waiting = [saved for saved in self._waiting if saved not in proved]
        if not proved or max(proved) == self.good:
            return False
        self.good, self.times = max(proved), 0
        return True

    def write(self, path: Path) -> bool:
        """Write what later attempts need, in one rename; returns whether that was possible, and warns if not."""
        entries = [asdict(entry) for entry in self.entries]
        state = {"good": self.good, "times": self.times, "entries": entries}
        try:
            write_private_file(path, json.dumps(state, indent=1) + "\n")
        except OSError as error:
            log.warning("%s: %s; what a rollback needs is not written", path, error.strerror)
            return False
        return True

    def restore(self, value: dict[str, Any] | None) -> None:
        """Continue from what `read_rollbacks` returned."""
        if value is not None:
            self.good, self.times = value["good"], value["times"]
            self.entries = [SkippedSteps(**entry) for entry in value["entries"]]


def read_rollbacks(path: Path) -> dict[str, Any] | None:
    """Read what an earlier attempt wrote; None if the file is missing or damaged."""
    try:
        value = read_json(path)
        entries = [asdict(SkippedSteps(**entry)) for entry in value["entries"]]
        good = None if value["good"] is None else int(value["good"])
        return {"good": good, "times": int(value["times"]), "entries": entries}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def mark_newer_bad(checkpoints: Path, good: int, reason: str) -> list[int] | None:
    """Mark all checkpoints that were committed after the good one; returns their steps, None if `good` is not there.

    Raises CheckpointError if a mark cannot be written, OSError if a step cannot be read.
    """
    steps = find_steps(checkpoints)
    if good not in steps:
        return None
    order = {step: read_manifest(path, step).sequence for step, path in steps.items()}
    newer_steps = sorted(step for step in steps if order[step] > order[good])
    for step in newer_steps:
        mark_bad(checkpoints, step, reason)
    return newer_steps
