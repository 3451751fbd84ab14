"""Decide after an attempt that failed whether its ranks are started again, from what they left in the run directory.

A batch script runs this module (`python -m hpc_train.launch.restarting RUN ATTEMPT CODE`): 0 means that they are.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hpc_train.config.run import RunConfig
from hpc_train.errors import EXIT_NO_REQUEUE, EXIT_USER_ERROR
from hpc_train.launch.failures import find_first_error
from hpc_train.launch.job_spec import read_spec
from hpc_train.launch.state.run_facts import read_events
from hpc_train.resilience.incident import read_hang
from hpc_train.resilience.restart import Budget, Cause, Decision, decide_restart
from hpc_train.training.run_directory import RunDirectory
from hpc_train.training.run_records import append_event, read_first_failure

RESTARTED = "restarted"
"""In a `restart` event: it was not only said."""
_MEMORY = re.compile(r"out of memory|MemoryError|cannot allocate memory|oom-kill", re.IGNORECASE)
_KILLED = re.compile(r"was killed by SIG|was ended from outside")


def decide_after_failure(config: RunConfig, folder: RunDirectory, attempt: int, code: int, budget: Budget) -> Decision:
    """Decide whether to start the ranks again, and record that in events.jsonl. code: of the attempt that failed."""
    cancelled = any(event["event"] == "cancel" and event["attempt"] == attempt for event in read_events(folder.path))
    cause = Cause.CANCELLED if cancelled else find_cause(folder.logs(attempt), code)
    decision = decide_restart(cause, find_newest_step(folder), budget, config.checkpoint.every > 0)
    settings = config.resilience
    if decision.restart:
        action = RESTARTED if settings.act else "left: resilience.act=false"
        append_event(folder.events, "restart", attempt, cause=cause.value, why=decision.why, action=action)
    return decision


def find_newest_step(folder: RunDirectory) -> int | None:
    """Return the newest committed checkpoint step; None if there is none."""
    return max(folder.steps(), default=None)


def find_cause(logs: Path, code: int) -> Cause:
    """Return why the attempt with these logs failed. code: its exit code."""
    if read_hang(logs) is not None:
        return Cause.HANG
    if code in (EXIT_USER_ERROR, EXIT_NO_REQUEUE):
        return Cause.USER
    error = find_first_error(logs)
    if error is None:
        return Cause.UNKNOWN
    if _MEMORY.search(error.line):
        return Cause.MEMORY
    if _KILLED.search(error.text):
        return Cause.KILLED
    failure = read_first_failure(logs)
    if failure is None:
        return Cause.UNKNOWN
    return Cause.USER if failure.user_error else Cause.EXCEPTION


def read_budget(events: Iterable[Mapping[str, Any]], attempt: int, limit: int) -> Budget:
    """Return what is left of the restarts of a job, from the events of its run.

    A checkpoint, a submission and a requeue start the count anew. limit: resilience.restarts.
    """
    used, began = 0, None
    for event in events:
        kind = event["event"]
        if kind in ("checkpoint", "submit", "requeue"):
            used = 0
        elif kind == "restart" and event.get("action") == RESTARTED:
            used += 1
        elif kind in ("start", "resume") and event["attempt"] == attempt:
            began = int(event["step"])
    return Budget(limit, used, began)


def main(run: str, attempt: str, code: str) -> int:
    """Decide, say so, and return 0 if the ranks are to be started again."""
    spec = read_spec(Path(run) / "job.json")
    config, folder = spec.run_config(), spec.folder()
    budget = read_budget(read_events(Path(run)), int(attempt), config.resilience.restarts)
    if budget.saved is None:  # the ranks never came to training, so that nothing can have advanced
        budget = Budget(budget.limit, budget.used, find_newest_step(folder))
    decision = decide_after_failure(config, folder, int(attempt), int(code), budget)
    print(f"hpc-train: {decision.why}", flush=True)
    return 0 if decision.restart and config.resilience.act else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
