"""Decide whether a run continues when some of its ranks are lost: with parallel.sync.lost_after_seconds, copies of the
model train on without any copy but the first.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from pathlib import Path

from hpc_train.resilience.heartbeat import Phase
from hpc_train.resilience.watch import RankView
from hpc_train.training.records.run_records import LOSS_ALLOWED

LEFT_TO_OTHERS = "left to the other copies: parallel.sync.lost_after_seconds"
"""Action in the report of a lost node if the ranks on the other nodes continue."""
_UNNOTICED_SECONDS = 120.0
"""How long ranks may take to find out that a node is lost: its connections are not closed, they only fall silent."""


class AllowedLosses:
    """Tells whether the ranks that are left go on when others are lost."""

    def __init__(self, logs: Path, lost_after: float | None, hosts: Sequence[str]) -> None:
        """logs: of the attempt. lost_after: parallel.sync.lost_after_seconds. hosts: the node of each task."""
        self._logs, self._hosts, self._known = logs, hosts, False
        self._seconds = None if lost_after is None else max(lost_after, _UNNOTICED_SECONDS)
        self._noticed_by = 0.0

    def cover(self, views: Sequence[RankView], lost: Collection[str] = ()) -> bool:
        """Return whether the others go on without the ranks that have failed, and those on the nodes `lost`.

        Task 0 serves the store, without which no rank goes on. Before all ranks train, none may be lost.
        """
        if self._seconds is None or self._hosts[0] in lost:
            return False
        self._known = self._known or (self._logs / LOSS_ALLOWED).exists()
        return self._known and not any(view.task == 0 and view.ended and view.phase is not Phase.END for view in views)

    def count_tasks(self, hosts: Collection[str]) -> int:
        """Return the number of tasks on these nodes."""
        return sum(host in hosts for host in self._hosts)

    def begin_to_wait(self) -> None:
        """Give the ranks time to find out that a node is lost."""
        self._noticed_by = time.monotonic() + (self._seconds or 0.0)

    def may_be_unnoticed(self) -> bool:
        """Return whether ranks that hang may only wait for those of a lost node, as long as they may."""
        return time.monotonic() < self._noticed_by
