"""`hpc-train cancel RUN`: ask for confirmation, then let a run save and end."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hpc_train.cli.output import TERMINAL
from hpc_train.launch.cancel.cancel_runs import CancelCandidate, cancel_runs, describe_states, find_runs


def cancel_command(target: str, yes: bool, now: bool, wait: bool) -> int:
    """Cancel a run, a point or all of a sweep, or a job, and return the exit code. On a terminal it asks first.

    yes: without asking. now: without a save. wait: until everything has ended.
    """
    runs = find_runs(target)
    open_runs = [run for run in runs if not run.status.state.ended]
    if not open_runs:
        print(f"nothing to cancel: {describe_states(runs)}")
        return 0
    if not yes and sys.stdin.isatty() and not _ask_user(open_runs):
        print("left as it is")
        return 1
    return cancel_runs(open_runs, now, wait, TERMINAL)


def _ask_user(runs: Sequence[CancelCandidate]) -> bool:
    return input(f"{describe_states(runs)}: cancel? [y/N] ").strip().lower() in ("y", "yes")
