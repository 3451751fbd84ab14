"""Resume a sweep or a run: what is missing or has failed runs again as it was frozen; the rest is left alone.

The code snapshot of the first submission is used again. With --mode force, what the run has written is moved into
a folder of its own first, so that it starts at its first step.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.errors import EXIT_DONE, UserError
from hpc_train.launch.command_output import CommandOutput
from hpc_train.launch.job_spec import JobSpec, read_spec
from hpc_train.launch.slurm.compact_nodes import ask_for_compact_nodes
from hpc_train.launch.slurm.partitions import check_partition
from hpc_train.launch.slurm.request import make_request
from hpc_train.launch.slurm.sbatch import submit_job
from hpc_train.launch.slurm.slurm_cli import delay_signals, run_client
from hpc_train.launch.slurm.waiting_time import fit_request
from hpc_train.launch.snapshot.code_snapshot import PATHS_FILE, Snapshot
from hpc_train.launch.state.job_state import decide_state
from hpc_train.launch.state.run_facts import RunFacts, gather_facts
from hpc_train.launch.state.run_lookup import RunPoint, find_points
from hpc_train.launch.state.state_names import RunStatus, State
from hpc_train.launch.submit import lock_submissions, record_submission
from hpc_train.launch.sweep import submit_sweep, sweep_directory
from hpc_train.launch.sweep.arrays import make_arrays
from hpc_train.launch.sweep.local_sweep import run_points
from hpc_train.launch.sweep.submit_sweep import describe_array
from hpc_train.launch.sweep.sweep_directory import FrozenPoint, SweepDirectory, read_chosen_points
from hpc_train.launch.train import run_local_ranks
from hpc_train.regular_files import read_json
from hpc_train.runtime.stop_request import StopRequest

RETRY, CACHED, FORCE, READ_ONLY = "retry", "cached", "force", "read-only"


@dataclass(frozen=True)
class ResumeCandidate:
    """A run, and whether it runs again."""

    facts: RunFacts
    status: RunStatus
    again: bool

    @property
    def point(self) -> RunPoint:
        return self.facts.point

    def row(self) -> dict[str, Any]:
        return {"point": self.status.point, "state": str(self.status.state), "again": self.again}


@dataclass(frozen=True)
class Resubmission:
    """Runs that Slurm has accepted once more."""

    points: tuple[str, ...]
    jobs: tuple[str, ...]
    lines: tuple[str, ...]
    """Lines for the user about these runs."""


def read_candidates(target: str, mode: str) -> list[ResumeCandidate]:
    """Return what `mode` would do with a run, a sweep, or a job; nothing is changed."""
    return find_candidates(find_points(target, run_client), mode)


def resume_runs(
    target: str,
    mode: str,
    stop: StopRequest,
    output: CommandOutput,
    on_submission: Callable[[Resubmission], None],
) -> int:
    """Run again what `mode` says of a run, a sweep, or a job; returns the exit code.

    cached: only what has never begun. retry: that, and all that has ended and is not done. force: all that has ended,
    anew from its first step. What runs or waits is left alone in every mode. on_submission: gets what Slurm has
    accepted, one call for a run or a sweep. Raises UserError, one line, where Slurm or a frozen spec does not let it.
    """
    points = find_points(target, run_client)
    with ExitStack() as stack:
        # Locked before states are read, so that two resume commands cannot both find a point missing.
        for place in dict.fromkeys(point.sweep.path if point.sweep else point.run for point in points):
            stack.enter_context(lock_submissions(place))
        return _resume(find_candidates(points, mode), mode, _ResumeContext(stop, output, on_submission))


@dataclass(frozen=True)
class _ResumeContext:
    """Options and callbacks with which one `resume` command handles all its runs."""

    stop: StopRequest
    output: CommandOutput
    on_submission: Callable[[Resubmission], None]


def _resume(candidates: Sequence[ResumeCandidate], mode: str, context: _ResumeContext) -> int:
    """Resume what is to run again, a sweep by one submission; returns the exit code."""
    chosen = [candidate for candidate in candidates if candidate.again]
    if not chosen:
        states = Counter(candidate.status.state for candidate in candidates)
        counts = ", ".join(f"{count} {state}" for state, count in states.most_common())
        context.on_submission(Resubmission((), (), (f"nothing to resume: {counts}",)))
        return EXIT_DONE
    code = EXIT_DONE
    # `or`: after the first that fails nothing more is started.
    for folder, ids in _group_by_sweep(chosen).items():
        code = code or _resume_sweep(folder, ids, mode, context)
    for candidate in chosen:
        if candidate.point.sweep is None:
            code = code or _resume_run(candidate, mode, context)
    return code


def find_candidates(points: Sequence[RunPoint], mode: str) -> list[ResumeCandidate]:
    """Find the state of each run, and whether it runs again. Raises UserError where Slurm does not answer."""
    candidates = []
    for facts in gather_facts(points, run_client):
        status = decide_state(facts)
        if facts.slurm_error is not None and not status.state.ended:
            raise UserError(f"{facts.slurm_error}; try again")
        candidates.append(ResumeCandidate(facts, status, _runs_again(facts, status, mode)))
    return candidates


def _runs_again(facts: RunFacts, status: RunStatus, mode: str) -> bool:
    # Never begun: its job has ended without an attempt, or was never submitted.
    missing = not facts.attempts and (status.state.ended or (status.state is State.UNKNOWN and not facts.jobs))
    if mode == CACHED:
        return missing
    if mode == FORCE:
        return missing or status.state.ended
    return missing or (status.state.ended and status.state is not State.DONE)


def _group_by_sweep(chosen: Sequence[ResumeCandidate]) -> dict[SweepDirectory, list[str]]:
    groups: dict[SweepDirectory, list[str]] = {}
    for candidate in chosen:
        if candidate.point.sweep is not None:
            groups.setdefault(candidate.point.sweep, []).append(candidate.point.name)
    return groups


def _resume_sweep(folder: SweepDirectory, ids: Sequence[str], mode: str, context: _ResumeContext) -> int:
    """Run the chosen points of a sweep again, here or as arrays of Slurm; returns the exit code."""
    points = read_chosen_points(folder, ids)
    if mode == FORCE:
        for point in points:
            check_can_restart(point.spec)
    if points[0].spec.config["launch"]["kind"] == "local":
        _set_points_aside(folder, points, mode)
        sweep_directory.append_ledger_event(folder.ledger, "resume", mode=mode, points=list(ids))
        return run_points(folder, points, context.stop, context.output)
    arrays = make_arrays(
        points,
        folder,
        load_snapshot(points[0].spec),
        submit_sweep.require_array_size(run_client),
        lambda point: point.spec.run_config(),
    )
    submit_sweep.check_arrays(arrays, run_client)
    jobs = submit_sweep.send_arrays(folder, arrays, run_client, hold=mode == FORCE)
    _set_points_aside(folder, points, mode)
    sweep_directory.append_ledger_event(folder.ledger, "resume", mode=mode, points=list(ids))
    submit_sweep.record_arrays(folder, arrays, jobs)
    # Held until their old results are moved away: a job that starts at once would read them.
    if mode == FORCE or len(jobs) > 1:
        submit_sweep.release_jobs(jobs, run_client)
    lines = (f"job {job}: {describe_array(array)}" for array, job in zip(arrays, jobs, strict=True))
    context.on_submission(Resubmission(tuple(ids), tuple(jobs), tuple(lines)))
    return EXIT_DONE


def _set_points_aside(folder: SweepDirectory, points: Sequence[FrozenPoint], mode: str) -> None:
    if mode == FORCE:
        for point in points:
            set_results_aside(folder.run(point.id))


def _resume_run(candidate: ResumeCandidate, mode: str, context: _ResumeContext) -> int:
    spec = read_spec(candidate.point.run / "job.json")
    if mode == FORCE:
        check_can_restart(spec)
    if spec.config["launch"]["kind"] == "local":
        return _resume_local(candidate, spec, mode, context)
    folder, config = spec.folder(), spec.run_config()
    request = make_request(config, folder, load_snapshot(spec))
    check_partition(config, request, run_client)
    request = fit_request(config, folder, request, context.output.report, run_client)
    request = ask_for_compact_nodes(config, request, context.output.report, run_client)
    with delay_signals():
        jobs = submit_job(folder, request.with_hold() if mode == FORCE else request)
        if mode == FORCE:
            set_results_aside(candidate.point.run)
        record_submission(folder, request, jobs)
        if mode == FORCE:
            submit_sweep.release_jobs(jobs, run_client)
    context.on_submission(Resubmission((candidate.status.point,), tuple(jobs), (f"job {', '.join(jobs)}",)))
    return EXIT_DONE


def _resume_local(candidate: ResumeCandidate, spec: JobSpec, mode: str, context: _ResumeContext) -> int:
    newest = candidate.facts.newest
    launcher = newest.begun.launcher if newest and newest.begun else "local"
    if launcher != "local":
        raise UserError(f"{candidate.point.run}: was started by {launcher}; start it in the same way to continue")
    if mode == FORCE:
        set_results_aside(candidate.point.run)
    context.output.report(f"{candidate.point.run} goes on here")
    return run_local_ranks(spec.run_config(), spec.folder(), spec.ranks, context.stop, context.output)


EARLIER_RESULTS = "before"
"""Folder in a run directory: what earlier starts from the first step (--mode force) set aside, a folder each time."""
_KEPT_IN_PLACE = frozenset(
    {"job.json", "config.yaml", "plan.json", "schedule.csv", ".submitit", ".lock", EARLIER_RESULTS}
)


def load_snapshot(spec: JobSpec) -> Snapshot | None:
    """Return the snapshot that a spec names; None if it names none. Raises UserError if the snapshot is gone."""
    if not spec.code:
        return None
    path = Path(spec.code)
    try:
        parts = read_json(path / PATHS_FILE)
    except (OSError, ValueError):
        raise UserError(f"{path}: the snapshot of the code is not there (any more); submit the run again") from None
    roots = [Path(row["root"]) for row in spec.sources]
    # Also the parents, from which a package is imported by its name.
    searched = frozenset({*roots, *(root.parent for root in roots)})
    return Snapshot(path.name, path, tuple(str(path / part) for part in parts), tuple(spec.sources), searched)


def check_can_restart(spec: JobSpec) -> None:
    """Raise UserError for a run whose checkpoints lie elsewhere: it would go on from them."""
    chosen = spec.config["checkpoint"]["dir"]
    if chosen:
        raise UserError(f"--mode force: {spec.run_dir} saves into checkpoint.dir={chosen}; move its steps yourself")


def set_results_aside(run: Path) -> None:
    """Move all that a run has left into a folder of its own, so that it begins at its first step again."""
    results = [entry for entry in run.iterdir() if entry.name not in _KEPT_IN_PLACE] if run.is_dir() else []
    if not results:
        return
    number = 0
    while (run / EARLIER_RESULTS / str(number)).exists():
        number += 1
    place = run / EARLIER_RESULTS / str(number)
    place.mkdir(parents=True)
    for entry in results:
        shutil.move(entry, place / entry.name)
    (run / "logs").mkdir()
