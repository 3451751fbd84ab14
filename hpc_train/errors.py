"""Exceptions and exit codes that every room shares (a leaf: it imports nothing of ours, and no torch)."""

from __future__ import annotations

from collections.abc import Sequence

EXIT_DONE = 0
EXIT_FAILED = 1
"""Exit code of a run that made its last step but failed: its result is bad, or is not on the disk."""
EXIT_USER_ERROR = 2
"""The user's input is wrong: one line on stderr says what, where and what to do."""
EXIT_REQUEUE = 75
"""Stopped on purpose with everything saved: run the same job again to continue it."""
EXIT_NO_REQUEUE = 93
"""Do not run this job again: it would fail the same way."""

SHOWN_POINTS = 3
"""Points of a sweep that an error names."""


class UserError(Exception):
    """Wrong input by the user. Its text is one line: what is wrong, where, and what to do instead."""


class SweepError(UserError):
    """A sweep directory was given where one run is expected. Its text names points, one of which to give."""

    def __init__(self, name: str, points: Sequence[object], what: str = "one of them") -> None:
        """points: run directories of points that can be given. what: which points those are."""
        shown = ", ".join(map(str, points[:SHOWN_POINTS]))
        more = f", ...; `hpc-train status {name}` lists all" if len(points) > SHOWN_POINTS else ""
        super().__init__(f"{name}: is a sweep, not a run; give {what}: {shown}{more}")


class MissingRanksError(UserError):
    """Raised by a rank that waited in vain for others when the ranks were to meet.

    Its text is one line, as of any other UserError; but a rank that is stuck, or its node, may as well be to blame.
    """

    def __init__(self, text: str, tasks: Sequence[int] = (), hosts: Sequence[str] = ()) -> None:
        """tasks: those that did not come. hosts: their nodes, as far as they are known."""
        super().__init__(text)
        self.tasks, self.hosts = tuple(tasks), tuple(hosts)


class IncompleteRun(Exception):
    """Raised when all steps are made but the run is not done; one line says what is missing and what to do."""


class RunFailed(RuntimeError):
    """Raised by `hpc_train.train` when ranks failed. Its text is the first error and where its log is."""


class RemoteError(RuntimeError):
    """An error of some rank, raised on all ranks once they have agreed on it; the text names the rank."""


class LostRanksError(RuntimeError):
    """A rank is gone, or did not come in time, so the process group no longer works."""
