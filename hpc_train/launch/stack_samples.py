"""Sample which lines of Python the ranks of a running job execute: take faulthandler's stacks several times and count.

This does not need torch, and ranks that hang in a collective or in a loop of C code also answer.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hpc_train.errors import UserError
from hpc_train.launch.rank_signals import ANSWER_SECONDS, address_ranks, find_job_steps
from hpc_train.launch.rank_stacks import STACK_SIGNAL, collect_stacks
from hpc_train.launch.slurm.slurm_cli import RunClient
from hpc_train.launch.state.run_facts import RunFacts

_PAUSE_SECONDS = 0.3
"""Between two samples, so that a rank that works is found in another place."""
NO_ANSWER = "(no answer)"


@dataclass(frozen=True)
class PlaceCount:
    """A line of Python, and how often ranks were found in it."""

    name: str
    count: int
    ranks: tuple[str, ...]


@dataclass(frozen=True)
class StackSamples:
    """Counts of the stacks that several samples of all ranks found."""

    places: tuple[PlaceCount, ...]
    """The most frequent first."""
    answers: int
    logs: Path


def sample_stacks(facts: RunFacts, samples: int, ask: RunClient) -> StackSamples:
    """Look `samples` times at the stacks of all ranks. Raises UserError for ranks of a launcher that passes no signal.

    Each look appends the stacks to the logs of the ranks.
    """
    newest = facts.newest
    if newest is None or newest.begun is None or (not facts.jobs and newest.begun.launcher != "local"):
        raise UserError(f"{facts.point.name}: was started neither by Slurm nor by hpc-train, so no signal reaches it")
    send = address_ranks(facts, newest.begun, bool(find_job_steps(facts, ask)), ask)
    logs = facts.point.run / "logs" / str(newest.number)
    counts: dict[str, list[str]] = defaultdict(list)
    for index in range(samples):
        if index:
            time.sleep(_PAUSE_SECONDS)
        for stack in collect_stacks(logs, partial(send, STACK_SIGNAL), ANSWER_SECONDS[bool(facts.jobs)]):
            counts[stack.place or NO_ANSWER].append(stack.name.partition(" (")[0])
    places = [PlaceCount(name, len(ranks), tuple(dict.fromkeys(ranks))) for name, ranks in counts.items()]
    places.sort(key=lambda place: place.count, reverse=True)
    return StackSamples(tuple(places), sum(place.count for place in places), logs)
