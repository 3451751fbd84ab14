"""Account for the node-seconds of a run from what it left in its directory: attempts, events and goodput.jsonl."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_train.cluster.hostlist import expand_hostlist
from hpc_train.errors import UserError
from hpc_train.launch.recovery.restarting import RESTARTED
from hpc_train.launch.state.attempts import Attempt, read_attempts, read_tail_text
from hpc_train.launch.state.run_facts import read_events
from hpc_train.resilience.ledger import GOODPUT, Ledger, LedgerLine, Period, account_run, parse_ledger

_NOTICED = ("hang", "lost_node", "failure")
"""Events whose time is when a fault of an attempt was noticed."""


def account_run_directory(run: Path) -> Ledger:
    """Account for all time since the run was submitted; a run that is going on, up to now."""
    attempts = [attempt for attempt in read_attempts(run) if attempt.begun is not None]
    if not attempts:
        return Ledger()
    events = read_events(run)
    lines = parse_ledger(read_tail_text(run / GOODPUT))
    periods: list[Period] = []
    for index, attempt in enumerate(attempts):
        following = attempts[index + 1] if index + 1 < len(attempts) else None
        periods.append(_make_period(attempt, following, events, lines, periods))
    submitted = [float(event["time"]) for event in events if event["event"] == "submit"]
    return account_run(periods, min([*submitted, periods[0].began]), _find_newest_step(events, attempts[-1], lines))


def _make_period(
    attempt: Attempt,
    following: Attempt | None,
    events: Sequence[Mapping[str, Any]],
    lines: Sequence[LedgerLine],
    before: Sequence[Period],
) -> Period:
    """Describe an attempt. before: periods of earlier attempts; a restart goes on in the job of the last."""
    assert attempt.begun is not None
    of_attempt = [event for event in events if event["attempt"] == attempt.number]
    restarted = before and any(
        event["event"] == "restart" and event.get("action") == RESTARTED
        for event in events
        if event["attempt"] == before[-1].attempt
    )
    job = before[-1].job if restarted else attempt.begun.job_id or f"attempt {attempt.number}"
    noticed = [float(event["time"]) for event in of_attempt if event["event"] in _NOTICED]
    resumed = [int(event["step"]) for event in of_attempt if event["event"] in ("start", "resume")]
    return Period(
        attempt.number,
        job,
        attempt.begun.time,
        _end_time(attempt, following),
        nodes=_count_nodes(attempt.begun.nodes),
        spares=attempt.begun.spares,
        noticed=min(noticed, default=None),
        resumed=resumed[0] if resumed else None,
        lines=[line for line in lines if line.attempt == attempt.number],
    )


def _end_time(attempt: Attempt, following: Attempt | None) -> float:
    """Return when an attempt ended; one that left no result ended before the next one, or is going on."""
    if attempt.result is not None:
        return attempt.result.time
    return following.begun.time if following is not None and following.begun is not None else time.time()


def _count_nodes(hosts: str) -> int:
    try:
        return max(1, len(list(expand_hostlist(hosts)))) if hosts else 1
    except UserError:
        return 1


def _find_newest_step(events: Sequence[Mapping[str, Any]], newest: Attempt, lines: Sequence[LedgerLine]) -> int:
    """Return the last step that counts: of a run that is done or going on all, else the newest that was saved."""
    if newest.result is None or newest.result.done:
        return max((line.step for line in lines if line.attempt == newest.number), default=0)
    return max((int(event["step"]) for event in events if event["event"] == "checkpoint"), default=0)
