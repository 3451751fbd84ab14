"""RUN on the command line: a run directory, a sweep directory, or a job id. A sweep is a list of runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_train.errors import UserError
from hpc_train.launch.clients import Ask
from hpc_train.launch.state import scontrol
from hpc_train.launch.state.records import UNKNOWN_JOB

_JOB_ID = re.compile(r"\d{1,12}(_\d{1,7})?")


@dataclass(frozen=True)
class Point:
    """One run: of a sweep its point, else the one there is."""

    name: str
    run: Path
    """Run directory."""


def is_run(path: Path) -> bool:
    """Whether a directory is a run's."""
    return (path / "job.json").exists() or (path / "logs").is_dir()


def is_job_id(name: str) -> bool:
    """Whether it is Slurm's name of a job, and of no directory here."""
    return bool(_JOB_ID.fullmatch(name)) and not Path(name).is_dir()


def find(name: str, ask: Ask) -> list[Point]:
    """The points that `name` stands for, in order. Raises UserError, one line, if it is nothing that we know."""
    path = Path(name).expanduser().absolute()
    if path.is_dir():
        return _in_directory(path)
    if is_job_id(name):
        return _of_job(name, ask)
    raise UserError(f"{name}: no such run directory; give a run directory, a sweep directory, or a job id")


def one(points: Sequence[Point], name: str) -> Point:
    """The only point, for commands that take one run."""
    if len(points) == 1:
        return points[0]
    raise UserError(f"{name}: a sweep of {len(points)} points; give one of them, such as {points[0].run}")


def _in_directory(path: Path) -> list[Point]:
    if (path / "points").is_dir():
        runs = sorted(entry for entry in (path / "points").iterdir() if is_run(entry))
        if runs:
            return [Point(run.name, run) for run in runs]
        raise UserError(f"{path}: a sweep without points; was it submitted?")
    if is_run(path):
        return [Point(path.name, path)]
    raise UserError(f"{path}: neither a run directory (no job.json) nor a sweep directory (no points/)")


def _of_job(job_id: str, ask: Ask) -> list[Point]:
    """Slurm knows where a job's log and its script are: in folders of its run directory."""
    said = ask(scontrol.command(job_id))
    if said.code != 0:
        known = "Slurm does not know it (any more)" if UNKNOWN_JOB in said.err else said.reason
        raise UserError(f"job {job_id}: {known}; give its run directory")
    shown = [scontrol.fields(line) for line in said.out.splitlines() if line.startswith("JobId=")]
    files = [Path(values.get(key, "")) for values in shown for key in ("Command", "StdOut")]
    runs = dict.fromkeys(run for file in files for run in file.parents[1:2] if is_run(run))
    if not runs:
        where = shown[0].get("WorkDir", "an unknown folder") if shown else "an unknown folder"
        raise UserError(f"job {job_id}: was not submitted by hpc-train (but from {where})")
    return [Point(run.name, run) for run in runs]
