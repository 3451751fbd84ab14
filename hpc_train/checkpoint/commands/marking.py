"""`hpc-train checkpoint mark`: a step that is sound and still no good, or good after all."""

from __future__ import annotations

from pathlib import Path

from hpc_train.checkpoint.catalogue import locate
from hpc_train.checkpoint.commands.show import plain, print_json
from hpc_train.checkpoint.commands.target import Target, target
from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.manifest import read
from hpc_train.checkpoint.poison import mark_bad, poison_of, unmark
from hpc_train.errors import UserError

NO_REASON = "no reason given"


def mark(where: str, step: int | None, bad: str | None, json: bool) -> int:
    """Mark a step bad, for the reason `bad`, or take its mark away (None); print what holds of it now; returns 0."""
    place = _meant(where, step)
    assert place.step is not None
    path = locate(place.directory, place.step)
    if bad is None:
        unmark(place.directory, place.step)
    else:
        mark_bad(place.directory, place.step, " ".join(bad.split()) or NO_REASON)
    why = _poison(path, place.step)
    if json:
        print_json({"step": place.step, "path": str(path), "bad": why})
    elif why is None:
        print(plain(f"{path}: is good: checkpoint.resume=auto takes it"))
    else:
        print(plain(f"{path}: {why}: checkpoint.resume=auto passes it over"))
    return 0


def _meant(where: str, step: int | None) -> Target:
    """One step, that was named: nobody marks the newest by mistake."""
    if where.isdecimal() and step is None and not Path(where).exists():
        where, step = ".", int(where)
    place = target(where)
    if place.step is None and step is None:
        raise UserError(f"{where}: say which step of it: --step N, or the path of a step-<n>")
    if place.step is not None and step not in (None, place.step):
        raise UserError(f"{where}: is one step already; leave --step out, or give the directory of several")
    if place.step is None and step is not None:
        locate(place.directory, step)
        return Target(place.directory, step)
    return place


def _poison(path: Path, step: int) -> str | None:
    """Also of a damaged one, which can be marked as any other."""
    try:
        return poison_of(path, read(path, step))
    except CheckpointError:
        return poison_of(path, None)
