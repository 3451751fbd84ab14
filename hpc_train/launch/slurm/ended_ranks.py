"""Notice ranks that have ended without a report from srun, because slurmstepd or srun was killed or stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hpc_train.launch.failures import ENDED_TASKS
from hpc_train.regular_files import write_private_file
from hpc_train.resilience.heartbeat import Phase
from hpc_train.resilience.watch import RankView

SRUN_END_SECONDS = 30.0
"""How long srun has to end once all of its ranks have: epilogs of tasks may take some seconds."""
_LONGEST_TICK = 1.0
"""Maximum seconds that one check adds, so that time in which the watcher itself was stopped does not count."""


class EndedRanks:
    """Tells when all ranks have ended and their srun has not noticed."""

    def __init__(self, tasks: int) -> None:
        """tasks: number of tasks of the attempt."""
        self._tasks, self._seconds, self._last = tasks, 0.0, time.monotonic()

    def outlive_srun(self, views: Sequence[RankView]) -> bool:
        """Return whether srun has had enough time to end after the last rank. views: of all ranks that were seen."""
        now = time.monotonic()
        tick, self._last = min(now - self._last, _LONGEST_TICK), now
        over = len(views) == self._tasks and all(view.ended for view in views)
        self._seconds = self._seconds + tick if over else 0.0
        return self._seconds > SRUN_END_SECONDS


def write_ended_tasks(logs: Path, views: Sequence[RankView]) -> None:
    """Record, for the explanation of the failure, which ranks are gone without having finished."""
    ended = [(view.task, view.host) for view in views if view.ended and view.phase is not Phase.END]
    with suppress(OSError):
        write_private_file(logs / ENDED_TASKS, json.dumps(ended) + "\n")
