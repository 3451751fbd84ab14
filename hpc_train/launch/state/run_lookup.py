"""Resolve RUN of the command line: a run directory, a sweep directory, or a job id. A sweep is a list of runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.errors import SweepError, UserError
from hpc_train.launch.slurm.job_records import UNKNOWN_JOB, parse_scontrol_fields, scontrol_command
from hpc_train.launch.slurm.slurm_cli import RunClient
from hpc_train.launch.sweep import sweep_directory
from hpc_train.launch.sweep.sweep_directory import SweepDirectory, find_sweep, list_point_ids

_JOB_ID = re.compile(r"\d{1,12}(_\d{1,7})?")


@dataclass(frozen=True)
class RunPoint:
    """One run: a point of a sweep, or a run of its own."""

    name: str
    run: Path
    """Run directory; that of a point is made when it begins."""
    sweep: SweepDirectory | None = None
    placed: sweep_directory.PointPlacement | None = None
    """The job to which a sweep's point was last sent."""
    cancels: tuple[tuple[str, float], ...] = ()
    """(job, time) of each cancellation that was asked for while it waited."""

    @property
    def packed(self) -> bool:
        """Whether it shares its job with other points."""
        return self.placed is not None and self.placed.packed

    @property
    def events(self) -> list[dict[str, Any]]:
        """Return what the sweep's ledger says of it, in the form of events.jsonl."""
        events: list[dict[str, Any]] = []
        if self.placed and self.placed.job:
            events.append({"event": "submit", "time": self.placed.time, "attempt": -1, "job_id": self.placed.job})
        for job, time in self.cancels:
            events.append({"event": "cancel", "time": time, "attempt": -1, "job_id": job})
        return events

    @property
    def job_logs(self) -> Path:
        """Folder of what the batch scripts print."""
        return self.sweep.logs if self.sweep else self.run / "logs"


def is_run_directory(path: Path) -> bool:
    """Whether a directory is a run's."""
    return (path / "job.json").exists() or (path / "logs").is_dir()


def is_job_id(name: str) -> bool:
    """Whether this is an id of a Slurm job, and not the name of a directory here."""
    return bool(_JOB_ID.fullmatch(name)) and not Path(name).is_dir()


def find_points(name: str, ask: RunClient) -> list[RunPoint]:
    """Return the points that `name` stands for, in order. Raises UserError, one line, if it is no run, sweep or job."""
    path = Path(name).expanduser().absolute()
    if sweep := find_sweep(path):
        return list_points_of_sweep(sweep) if path == sweep.path else [_find_point_of_sweep(sweep, path)]
    if path.is_dir():
        return _find_points_in_directory(path)
    if is_job_id(name):
        return _find_points_of_job(name, ask)
    raise UserError(f"{name}: no such run directory; give a run directory, a sweep directory, or a job id")


def list_points_of_sweep(sweep: SweepDirectory) -> list[RunPoint]:
    """Return all points of a sweep, including those that have not begun."""
    events = sweep_directory.read_ledger(sweep.ledger)
    placed, cancels = sweep_directory.find_latest_placements(events), sweep_directory.find_cancellations(events)
    return [
        RunPoint(name, sweep.run(name), sweep, placed.get(name), tuple(cancels.get(name, ())))
        for name in list_point_ids(sweep)
    ]


def require_single(points: Sequence[RunPoint], name: str) -> RunPoint:
    """Return the only point, for commands that take one run. Raises UserError if there are several."""
    if len(points) == 1:
        return points[0]
    raise SweepError(name, [point.run for point in points])


def _find_point_of_sweep(sweep: SweepDirectory, path: Path) -> RunPoint:
    for point in list_points_of_sweep(sweep):
        if point.run == path:
            return point
    raise UserError(f"{path}: the sweep has no such point; `hpc-train status {sweep.path}` lists them")


def _find_points_in_directory(path: Path) -> list[RunPoint]:
    if (path / "points").is_dir():
        runs = sorted(entry for entry in (path / "points").iterdir() if is_run_directory(entry))
        if runs:
            return [RunPoint(run.name, run) for run in runs]
        raise UserError(f"{path}: a sweep without points; was it submitted?")
    if is_run_directory(path):
        return [RunPoint(path.name, path)]
    raise UserError(f"{path}: neither a run directory (no job.json) nor a sweep directory (no points/)")


def _find_points_of_job(job_id: str, ask: RunClient) -> list[RunPoint]:
    """Find a job's run by asking Slurm where its log and its script are: in folders of its run or sweep directory."""
    answer = ask(scontrol_command(job_id))
    if answer.code != 0:
        why = "Slurm does not know it (any more)" if UNKNOWN_JOB in answer.err else answer.reason
        raise UserError(f"job {job_id}: {why}; give its run directory")
    shown = [parse_scontrol_fields(line) for line in answer.out.splitlines() if line.startswith("JobId=")]
    files = [Path(values.get(key, "")) for values in shown for key in ("Command", "StdOut")]
    places = dict.fromkeys(place for file in files for place in file.parents[1:2])
    if points := _find_points_of_array(job_id, filter(None, map(find_sweep, places))):
        return points
    runs = [place for place in places if is_run_directory(place)]
    if not runs:
        where = shown[0].get("WorkDir", "an unknown folder") if shown else "an unknown folder"
        raise UserError(f"job {job_id}: was not submitted by hpc-train (but from {where})")
    return [RunPoint(run.name, run) for run in runs]


def _find_points_of_array(job_id: str, sweeps: Iterable[SweepDirectory]) -> list[RunPoint]:
    """Return the points whose last job is the array `12`, or its element `12_3`."""

    def belongs(point: RunPoint) -> bool:
        job = point.placed.job if point.placed and point.placed.job else ""
        return job == job_id or job.startswith(f"{job_id}_")

    return [point for sweep in sweeps for point in list_points_of_sweep(sweep) if belongs(point)]
