"""`hpc-train resume SWEEP|RUN`: what is missing or failed runs again, as it was frozen; the rest is left alone."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from hpc_train.errors import EXIT_DONE, UserError
from hpc_train.launch.clients import answered, ask
from hpc_train.launch.partitions import check_partition
from hpc_train.launch.request import make_request
from hpc_train.launch.slurm import submit
from hpc_train.launch.spec import JobSpec, read_spec
from hpc_train.launch.state.decide import decide
from hpc_train.launch.state.facts import Facts, gather
from hpc_train.launch.state.points import Point, find
from hpc_train.launch.state.states import State, Status
from hpc_train.launch.submit import record
from hpc_train.launch.sweep import ledger, sending
from hpc_train.launch.sweep.frozen import FrozenPoint, SweepFolder, read_some
from hpc_train.launch.sweep.kept import check_aside, kept_code, set_aside
from hpc_train.launch.sweep.pool import run_points
from hpc_train.launch.sweep.shapes import make_arrays
from hpc_train.launch.sweep.submit import describe
from hpc_train.launch.train import run_here
from hpc_train.launch.whole import alone
from hpc_train.runtime.stop import StopRequest

RETRY, CACHED, FORCE, READ_ONLY = "retry", "cached", "force", "read-only"
MODES = (RETRY, CACHED, FORCE, READ_ONLY)


@dataclass(frozen=True)
class Seen:
    """A run, and whether it runs again."""

    facts: Facts
    status: Status
    again: bool

    @property
    def point(self) -> Point:
        return self.facts.point

    def row(self) -> dict[str, Any]:
        return {"point": self.status.point, "state": str(self.status.state), "again": self.again}


def resume_command(target: str, mode: str, as_json: bool, stop: StopRequest) -> int:
    """Run again what `mode` says of a run, a sweep, or a job; returns the exit code.

    cached: only what has never begun. retry: that, and all that has ended and is not done. force: all that has ended,
    anew from its first step. read-only: says what retry would do. What runs or waits is left alone in every mode.
    Raises UserError, one line, where Slurm or a frozen spec does not let it.
    """
    points = find(target, ask)
    if mode == READ_ONLY:
        return _show(look(points, mode), as_json)
    with ExitStack() as stack:
        for place in dict.fromkeys(point.sweep.path if point.sweep else point.run for point in points):
            stack.enter_context(alone(place))
        return _resume(look(points, mode), mode, as_json, stop)


def _resume(seen: Sequence[Seen], mode: str, as_json: bool, stop: StopRequest) -> int:
    chosen = [it for it in seen if it.again]
    if not chosen:
        states = Counter(it.status.state for it in seen)
        said = ", ".join(f"{count} {state}" for state, count in states.most_common())
        print(json.dumps({"points": [], "jobs": []}) if as_json else f"nothing to resume: {said}")
        return EXIT_DONE
    code = EXIT_DONE
    for folder, ids in _sweeps(chosen).items():
        code = code or _resume_sweep(folder, ids, mode, as_json, stop)
    for it in chosen:
        if it.point.sweep is None:
            code = code or _resume_run(it, mode, as_json, stop)
    return code


def look(points: Sequence[Point], mode: str) -> list[Seen]:
    """What each of them is, and whether it is to run again. Raises UserError where Slurm does not answer."""
    found = []
    for facts in gather(points, ask):
        status = decide(facts)
        if facts.silent is not None and not status.state.ended:
            raise UserError(f"{facts.silent}; try again")
        found.append(Seen(facts, status, _chosen(facts, status, mode)))
    return found


def _chosen(facts: Facts, status: Status, mode: str) -> bool:
    missing = not facts.attempts and (status.state.ended or (status.state is State.UNKNOWN and not facts.jobs))
    if mode == CACHED:
        return missing
    if mode == FORCE:
        return missing or status.state.ended
    return missing or (status.state.ended and status.state is not State.DONE)


def _show(seen: Sequence[Seen], as_json: bool) -> int:
    if as_json:
        print(json.dumps([it.row() for it in seen]))
        return EXIT_DONE
    for it in seen:
        print(f"{it.status.point}: {it.status.state}, {'would run again' if it.again else 'left alone'}")
    print(f"{sum(it.again for it in seen)} of {len(seen)} would run again")
    return EXIT_DONE


def _sweeps(chosen: Sequence[Seen]) -> dict[SweepFolder, list[str]]:
    found: dict[SweepFolder, list[str]] = {}
    for it in chosen:
        if it.point.sweep is not None:
            found.setdefault(it.point.sweep, []).append(it.point.name)
    return found


def _resume_sweep(folder: SweepFolder, ids: Sequence[str], mode: str, as_json: bool, stop: StopRequest) -> int:
    points = read_some(folder, ids)
    if mode == FORCE:
        for point in points:
            check_aside(point.spec)
    if points[0].spec.config["launch"]["kind"] == "local":
        _set_aside(folder, points, mode)
        ledger.append(folder.ledger, "resume", mode=mode, points=list(ids))
        return run_points(folder, points, stop)
    arrays = make_arrays(
        points, folder, kept_code(points[0].spec), sending.most_elements(ask), lambda point: point.spec.run_config()
    )
    sending.check(arrays, ask)
    jobs = sending.send(folder, arrays, ask, hold=mode == FORCE)
    _set_aside(folder, points, mode)
    ledger.append(folder.ledger, "resume", mode=mode, points=list(ids))
    sending.record(folder, arrays, jobs)
    if mode == FORCE or len(jobs) > 1:
        sending.release(jobs, ask)
    if as_json:
        print(json.dumps({"points": list(ids), "jobs": jobs}))
        return EXIT_DONE
    for array, job in zip(arrays, jobs, strict=True):
        print(f"job {job}: {describe(array)}")
    return EXIT_DONE


def _set_aside(folder: SweepFolder, points: Sequence[FrozenPoint], mode: str) -> None:
    if mode == FORCE:
        for point in points:
            set_aside(folder.run(point.id))


def _resume_run(it: Seen, mode: str, as_json: bool, stop: StopRequest) -> int:
    spec = read_spec(it.point.run / "job.json")
    if mode == FORCE:
        check_aside(spec)
    if spec.config["launch"]["kind"] == "local":
        return _resume_here(it, spec, mode, stop)
    folder, config = spec.folder(), spec.run_config()
    request = make_request(config, folder, kept_code(spec))
    check_partition(config, request, ask)
    with answered():
        jobs = submit(folder, request.held() if mode == FORCE else request)
        if mode == FORCE:
            set_aside(it.point.run)
        record(folder, request, jobs)
        if mode == FORCE:
            sending.release(jobs, ask)
    print(json.dumps({"points": [it.status.point], "jobs": jobs}) if as_json else f"job {', '.join(jobs)}")
    return EXIT_DONE


def _resume_here(it: Seen, spec: JobSpec, mode: str, stop: StopRequest) -> int:
    newest = it.facts.newest
    launcher = newest.begun.launcher if newest and newest.begun else "local"
    if launcher != "local":
        raise UserError(f"{it.point.run}: was started by {launcher}; start it in the same way, and it goes on")
    if mode == FORCE:
        set_aside(it.point.run)
    print(f"hpc-train: {it.point.run} goes on here", file=sys.stderr)
    return run_here(spec.run_config(), spec.folder(), spec.ranks, stop)
