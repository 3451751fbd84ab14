"""Send signals to the ranks of a run: by scancel to those of a Slurm job or job step, directly to local ones."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from hpc_train.errors import UserError
from hpc_train.launch.slurm.slurm_cli import RunClient
from hpc_train.launch.state.attempts import AttemptStart
from hpc_train.launch.state.run_facts import RunFacts
from hpc_train.launch.state.state_names import State, from_slurm_state
from hpc_train.processes import list_child_processes

ANSWER_SECONDS = {True: 6.0, False: 3.0}
"""Seconds to wait for the ranks' stacks, by whether it is a Slurm job (True) or local (False)."""
_MAX_JOBS_PER_CALL = 200
"""Jobs of one call of scancel: it signals them one by one, and run_client gives it 30 s."""
_ALREADY_ENDED = ("already completing", "already completed", "Invalid job id", "not running")
"""Parts of scancel's messages about a job or step that there is nothing left to cancel of."""


def address_ranks(
    facts: RunFacts, begun: AttemptStart, shared: bool, ask: RunClient
) -> Callable[[signal.Signals], None]:
    """Return a function that sends a signal to the ranks. shared: other points run in the same job."""
    if not facts.jobs:
        return partial(_signal_ranks, begun)
    ids = find_job_steps(facts, ask) if shared else select_jobs_in_state(facts, running=True)
    return partial(_signal_jobs, ids, ask)


def _signal_jobs(ids: Sequence[str], ask: RunClient, number: signal.Signals) -> None:
    """Send a signal to the ranks, not to the batch script."""
    cancel_jobs([f"--signal={number.name.removeprefix('SIG')}"], ids, ask)


def _signal_ranks(begun: AttemptStart, number: signal.Signals) -> None:
    """Send a signal to the children of the local controller.

    For other launchers only the recorded process is known, and it need not answer.
    """
    if begun.launcher == "local":
        processes = list_child_processes(begun.process)
    else:
        # SIGUSR1, which asks ranks for their stacks, would end a launcher that does not handle it.
        processes = [begun.process] if number == signal.SIGKILL else []
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def cancel_jobs(options: Sequence[str], jobs: Sequence[str], ask: RunClient) -> None:
    """Cancel these jobs. Raises UserError, unless they have already ended."""
    for first in range(0, len(jobs), _MAX_JOBS_PER_CALL):
        answer = ask(["scancel", *options, *jobs[first : first + _MAX_JOBS_PER_CALL]])
        # A job that has ended by itself meanwhile is as good as cancelled.
        if answer.code and not any(word in answer.err for word in _ALREADY_ENDED):
            raise UserError(f"scancel: {answer.reason}")


def find_job_steps(facts: RunFacts, ask: RunClient) -> list[str]:
    """Return the job step of a point that runs beside others; it has the point's name."""
    jobs = select_jobs_in_state(facts, running=True)
    if not jobs:
        return []
    answer = ask(["squeue", "--steps", "--noheader", f"--jobs={','.join(jobs)}", "--format=%i|%j"])
    rows = (line.strip().partition("|") for line in answer.out.splitlines())
    return [step for step, _, name in rows if name == facts.point.name]


def select_jobs_in_state(facts: RunFacts, running: bool) -> list[str]:
    """Return a run's running jobs, or its waiting ones."""
    states = {record.job_id: from_slurm_state(record.state) for record in facts.records}
    return [job for job in facts.jobs if job in states and (states[job] is State.RUNNING) == running]
