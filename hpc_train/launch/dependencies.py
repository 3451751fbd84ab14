"""`submit --after RUN`: the jobs that a new one waits for."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_train.errors import UserError
from hpc_train.launch.clients import Ask
from hpc_train.launch.state import scontrol
from hpc_train.launch.state.decide import decide
from hpc_train.launch.state.facts import gather
from hpc_train.launch.state.points import Point, find, is_job_id
from hpc_train.launch.state.states import State, ours
from hpc_train.launch.sweep import ledger


def jobs_to_wait_for(runs: Sequence[str], ask: Ask) -> list[str]:
    """Job ids of these runs (run directories, sweep directories, job ids); those that are done need no waiting.

    Raises UserError for a run that has ended badly: what waits for it would never start.
    """
    return [job for name in runs for job in (_of_job(name, ask) if is_job_id(name) else _of_runs(name, ask))]


def _of_job(job_id: str, ask: Ask) -> list[str]:
    """Any job of Slurm's, whoever submitted it."""
    said = ask(scontrol.command(job_id))
    records = scontrol.parse(said.out)
    if said.code or not records:
        raise UserError(f"--after {job_id}: {said.reason}; give a run directory, or a job that Slurm knows")
    states = {ours(record.state) for record in records}
    if bad := next((state for state in states if state.ended and state is not State.DONE), None):
        raise UserError(f"--after {job_id}: it is {bad}; submit it again first")
    return [] if states == {State.DONE} else [job_id]


def _of_runs(name: str, ask: Ask) -> list[str]:
    jobs: list[str] = []
    points = find(name, ask)
    for facts in gather(points, ask):
        status = decide(facts)
        if status.state is State.DONE:
            continue
        if status.state.ended or not facts.jobs:
            why = f" ({status.reason})" if status.reason else ""
            raise UserError(f"--after {name}: {facts.point.name} is {status.state}{why}; submit it again first")
        if len(facts.jobs) > 1:
            raise UserError(
                f"--after {name}: a chain of jobs, of which those left over are cancelled when the run is done; "
                "submit this one when it is"
            )
        jobs += facts.jobs
    return _as_arrays(jobs, points)


def _as_arrays(jobs: Sequence[str], points: Sequence[Point]) -> list[str]:
    """Whole arrays in place of the elements of a sweep; but elements, where another one of theirs has failed and was
    submitted again, so that the array will never have ended well.
    """
    sweeps = {point.sweep.path: point.sweep for point in points if point.sweep}
    left = {array for sweep in sweeps.values() for array in ledger.left(ledger.read(sweep.ledger))}
    if not sweeps:
        return list(jobs)
    arrays = [(job.partition("_")[0], job) for job in jobs]
    return list(dict.fromkeys(job if array in left else array for array, job in arrays))
