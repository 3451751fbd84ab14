"""Submit one run to Slurm: freeze it, hand it to sbatch, return at once.

A submission is a transaction: it leaves its whole directory or nothing, it holds a lock on that directory, and it
refuses a directory in which a job still waits or runs. `--after RUN` becomes a dependency on the jobs of other
runs.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.launch.checks.files import check_cluster_files
from hpc_train.launch.checks.run_checks import check_run
from hpc_train.launch.command_output import Report
from hpc_train.launch.freeze import decide_auto_layout, freeze_run
from hpc_train.launch.slurm.compact_nodes import ask_for_compact_nodes
from hpc_train.launch.slurm.job_records import parse_scontrol, scontrol_command
from hpc_train.launch.slurm.partitions import check_partition
from hpc_train.launch.slurm.request import JobRequest, make_request, node_count
from hpc_train.launch.slurm.sbatch import render_script, submit_job
from hpc_train.launch.slurm.slurm_cli import RunClient, delay_signals, run_client
from hpc_train.launch.slurm.waiting_time import fit_request
from hpc_train.launch.snapshot.code_snapshot import remove_unused_snapshots, snapshot_code
from hpc_train.launch.state.job_state import decide_state
from hpc_train.launch.state.run_facts import gather_facts
from hpc_train.launch.state.run_lookup import RunPoint, find_points, is_job_id, is_run_directory
from hpc_train.launch.state.state_names import State, from_slurm_state
from hpc_train.launch.sweep import sweep_directory
from hpc_train.regular_files import read_text, write_private_file
from hpc_train.training.records.run_records import append_event
from hpc_train.training.run_directory import RunDirectory, check_owner, locate_run_directory


def default_to_slurm(overrides: Sequence[str]) -> list[str]:
    """Add cluster=slurm and launch=slurm where the user chose no such group."""
    chosen = {text.split("=")[0] for text in overrides}
    return [f"{group}=slurm" for group in ("cluster", "launch") if group not in chosen] + list(overrides)


@dataclass(frozen=True)
class Submission:
    """A run that Slurm has accepted, or the script that it would get."""

    run_dir: Path
    ranks: int
    jobs: tuple[str, ...] = ()
    """Job ids, of a chain in their order; empty of a dry run."""
    nodes: int = 0
    ranks_per_node: int = 0
    script: str = ""
    """The batch script, only of a dry run."""


def submit_run(
    config: RunConfig,
    report: Report,
    *,
    after: Sequence[str],
    dry_run: bool = False,
) -> Submission:
    """Freeze one run and hand it to sbatch; returns at once. If sbatch refuses, nothing is left behind.

    report: gets remarks for the user. after: runs (directories or job ids) that must succeed before this one starts.
    dry_run: only check, and return the batch script. Raises UserError if the run is invalid or Slurm refuses it.
    """
    if config.launch.kind != "slurm":
        raise UserError(
            f"launch={config.launch.kind}: `hpc-train submit` sends to Slurm; use `hpc-train train` to run here"
        )
    nodes = config.cluster.nodes
    config, why = decide_auto_layout(config, nodes * config.cluster.ranks_per_node if nodes else None, report)
    ranks = node_count(config) * config.cluster.ranks_per_node
    folder = locate_run_directory(config)
    # Both refuse much of what can be wrong, and make nothing yet: the snapshot is only stored below.
    code = snapshot_code(config, folder.path, report)
    request = make_request(config, folder, code).after(list_jobs_to_wait_for(after, run_client))
    if dry_run:
        check_run(config, ranks)
        check_cluster_files(config)
        request = ask_for_compact_nodes(config, request, report, run_client)
        return Submission(folder.path, ranks, script=render_script(folder, request))
    check_partition(config, request, run_client)
    # From here on Ctrl-C waits: between sbatch and the record of the job's number a job would be lost.
    with delay_signals(), transact_submission(folder.path):
        # Under the lock: two commands could otherwise both find no job, and both submit one.
        refuse_unfinished_job(folder.path, run_client)
        with code.stored_for(folder.path) if code else nullcontext():
            freeze_run(config, ranks, report, folder, why, code)
            request = fit_request(config, folder, request, report, run_client)
            request = ask_for_compact_nodes(config, request, report, run_client)
            jobs = submit_job(folder, request)
            record_submission(folder, request, jobs)
    if code:
        remove_unused_snapshots(code.path.parent)
    return Submission(folder.path, ranks, tuple(jobs), request.nodes, request.ranks_per_node)


def record_submission(folder: RunDirectory, request: JobRequest, jobs: Sequence[str]) -> None:
    """Append the submission to the events of the run."""
    chain = {"job_ids": jobs} if len(jobs) > 1 else {}
    if request.code:
        append_event(folder.events, "snapshot", -1, hash=request.code.hash, sources=request.code.sources)
    append_event(folder.events, "submit", -1, job_id=jobs[0], nodes=request.nodes, ranks=request.ranks, **chain)


SUBMISSION_LOCK = ".lock"
"""Name of the file in a run or sweep directory that is locked during a submission."""
_FROZEN_FILES = frozenset({"job.json", "config.yaml", "plan.json", "schedule.csv"})


@contextmanager
def transact_submission(path: Path) -> Iterator[None]:
    """Make a run or sweep directory, or take an existing one, and lock it for one submission.

    An exception inside takes back all that is new: the directory and the parents that were made for it, or the entries
    that were added to it and the changes of its frozen files. Raises UserError for whatever the system refuses, such as
    a full disk.
    """
    check_owner(path)
    new = [folder for folder in (path, *path.parents) if not folder.exists()]  # the deepest first, to be removed so
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        with lock_submissions(path), _roll_back_on_error(path):
            yield
    except BaseException as error:
        with suppress(OSError):
            for folder in new:
                folder.rmdir()  # those that are empty
        if isinstance(error, OSError):
            raise UserError(f"run_dir={path}: {error.strerror}; choose a directory that can be written") from error
        raise


@contextmanager
def _roll_back_on_error(path: Path) -> Iterator[None]:
    """On an exception inside, remove new entries of a directory and restore its frozen files."""
    names = {entry.name for entry in path.iterdir()}
    frozen = {name: read_text(path / name) for name in _FROZEN_FILES & names}
    try:
        yield
    except BaseException:
        for entry in path.iterdir():
            if entry.name not in names:
                _remove_entry(entry)
        for name, text in frozen.items():
            if read_text(path / name) != text:
                write_private_file(path / name, text)
        raise


def _remove_entry(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)


@contextmanager
def lock_submissions(path: Path) -> Iterator[None]:
    """Lock this directory against other submissions. Raises UserError while another command submits from it.

    On file systems without locks no command is refused.
    """
    lock = path / SUBMISSION_LOCK
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; nothing can be submitted from there") from None
    try:
        if not _take_lock(descriptor, lock):
            raise UserError(f"{path}: another command submits from it right now; see `hpc-train status {path}`")
        try:
            yield
        finally:
            # Before the close, which gives the lock up: another command could then hold the very file that is removed.
            lock.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _take_lock(descriptor: int, lock: Path) -> bool:
    """Take the lock; return whether it is ours, and still the file that others find."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The holder before may have deleted the file between our open
        # and our lock; then others make and lock a new one.
        return os.fstat(descriptor).st_ino == lock.stat().st_ino
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError:
        return True  # a file system without locks: see lock_submissions


def refuse_unfinished_job(run: Path, ask: RunClient) -> None:
    """Raise UserError if a job of this run directory waits or runs: it would read what a new submission freezes."""
    if not is_run_directory(run):
        return
    facts = gather_facts([RunPoint(run.name, run)], ask)[0]
    status = decide_state(facts)
    if status.state.ended or not (status.state.waiting or status.state is State.RUNNING or facts.slurm_error):
        return
    job = f"job {status.job_id} is" if status.job_id else "a run is"
    why = f" ({status.reason})" if status.reason else ""
    raise UserError(
        f"run_dir={run}: {job} {status.state} there{why}; `hpc-train cancel {run}` ends it, or use a new run_dir"
    )


def list_jobs_to_wait_for(runs: Sequence[str], ask: RunClient) -> list[str]:
    """Return the job ids of these runs (run directories, sweep directories, job ids), except those that are done.

    Raises UserError for a run that has failed: a job that waits for its success would never start.
    """
    return [
        job for name in runs for job in (_wait_for_job(name, ask) if is_job_id(name) else _wait_for_runs(name, ask))
    ]


def _wait_for_job(job_id: str, ask: RunClient) -> list[str]:
    """Return this job, which any user may have submitted, unless it is done. Raises UserError if it has failed."""
    answer = ask(scontrol_command(job_id))
    records = parse_scontrol(answer.out)
    if answer.code or not records:
        raise UserError(f"--after {job_id}: {answer.reason}; give a run directory, or a job that Slurm knows")
    states = {from_slurm_state(record.state) for record in records}
    if bad := next((state for state in states if state.ended and state is not State.DONE), None):
        raise UserError(f"--after {job_id}: it is {bad}; submit it again first")
    return [] if states == {State.DONE} else [job_id]


def _wait_for_runs(name: str, ask: RunClient) -> list[str]:
    """Return the jobs of a run or sweep that are not done. Raises UserError if one has failed, or cannot be awaited."""
    jobs: list[str] = []
    points = find_points(name, ask)
    for facts in gather_facts(points, ask):
        status = decide_state(facts)
        if status.state is State.DONE:
            continue
        if status.state.ended or not facts.jobs:
            why = f" ({status.reason})" if status.reason else ""
            raise UserError(f"--after {name}: {facts.point.name} is {status.state}{why}; submit it again first")
        # afterok on a cancelled job is never fulfilled, and jobs left over of a chain are cancelled.
        if len(facts.jobs) > 1:
            raise UserError(
                f"--after {name}: a chain of jobs, of which those left over are cancelled when the run is done; "
                "submit this one when it is"
            )
        jobs += facts.jobs
    return _merge_elements(jobs, points)


def _merge_elements(jobs: Sequence[str], points: Sequence[RunPoint]) -> list[str]:
    """Replace the elements of a sweep by their whole arrays.

    Elements stay where another one of their array has failed and was submitted again: that array as a whole will never
    succeed.
    """
    sweeps = {point.sweep.path: point.sweep for point in points if point.sweep}
    superseded = {
        array
        for sweep in sweeps.values()
        for array in sweep_directory.list_superseded_arrays(sweep_directory.read_ledger(sweep.ledger))
    }
    if not sweeps:
        return list(jobs)
    # Waiting for a whole array is one word; a thousand elements would exceed the length of a dependency.
    arrays = [(job.partition("_")[0], job) for job in jobs]
    return list(dict.fromkeys(job if array in superseded else array for array, job in arrays))
