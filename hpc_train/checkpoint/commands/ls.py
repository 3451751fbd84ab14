"""`hpc-train checkpoint ls`: the steps of a directory, committed or not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR
from typing import Any

from hpc_train.checkpoint.catalogue import committed, found, readable
from hpc_train.checkpoint.commands.show import print_json, print_table, size
from hpc_train.checkpoint.commands.target import Leftover, Target, leftovers, target
from hpc_train.checkpoint.poison import poison_of
from hpc_train.checkpoint.weights import WEIGHTS, holds_weights_only

_KINDS = {"tmp": "unfinished", "trash": "being deleted", "old": "replaced"}


@dataclass(frozen=True)
class Entry:
    """A line of the listing."""

    step: int
    committed: bool
    verified: bool | None
    """None: nobody looked."""
    bytes: int
    path: str
    state: str
    """sound, damaged, committed; of leftovers unfinished, replaced, being deleted."""
    weights_only: bool | None = None
    """None where the manifest cannot be read."""
    bad: str | None = None
    """Why checkpoint.resume=auto passes it over, though it may be sound."""
    shared: int = 0
    """Of `bytes`, those of files that were written with earlier steps."""
    saved_at: float | None = None
    """Seconds since the epoch by the clock of the node that saved it: for people, the order is that of the commits."""
    attempt: int | None = None
    """Of the run."""

    def to_json(self) -> dict[str, Any]:
        """The contract of `ls --json`, and the state."""
        return dict(vars(self))


def ls(where: str, with_verify: bool, json: bool) -> int:
    """Print the steps in the order of their commits, then what is left of others; returns 0."""
    listed = entries(target(where), with_verify)
    if json:
        print_json([entry.to_json() for entry in listed])
        return 0
    columns = ("step", "state", "size", "holds", "path")
    rows = [(it.step, it.state, _size(it), _holds(it), it.path) for it in listed]
    print_table(columns, rows, numbers=("step", "size"))
    return 0


def entries(place: Target, with_verify: bool) -> list[Entry]:
    """Of the directory, or of the one step that was named."""
    steps = committed(place.directory) if place.step is None else [place.step]
    paths = found(place.directory)
    listed = [_committed(place.directory, paths[step], step, with_verify) for step in steps]
    if place.step is not None:
        return listed
    weights = place.directory / WEIGHTS
    listed += [_committed(weights, path, step, with_verify) for step, path in sorted(found(weights).items())]
    return listed + [_leftover(it) for folder in (place.directory, weights) for it in leftovers(folder)]


def bytes_of(path: Path) -> int:
    """Of all files in a directory; of those that are still there when it is their turn."""
    total = 0
    for entry in path.rglob("*"):
        try:
            found = entry.lstat()
            total += found.st_size if not S_ISDIR(found.st_mode) else 0
        except OSError:
            continue
    return total


def _committed(directory: Path, path: Path, step: int, with_verify: bool) -> Entry:
    manifest = readable(path, step)
    verified = _verifies(directory, step) if with_verify else None
    states = {None: "committed", True: "sound", False: "damaged"}
    state = states[verified] if manifest is not None else "damaged"
    holds = holds_weights_only(manifest.extra) if manifest is not None else None
    count = manifest.size if manifest is not None else bytes_of(path)
    shared = manifest.shared if manifest is not None else 0
    times, origin = (manifest.times, manifest.origin) if manifest is not None else (None, None)
    when = (times.at if times is not None else None, origin.attempt if origin is not None else None)
    return Entry(step, True, verified, count, str(path), state, holds, poison_of(path, manifest), shared, *when)


def _verifies(directory: Path, step: int) -> bool:
    from hpc_train.checkpoint.verification import verify  # imports torch; listing without it takes a tenth of the time

    return not verify(directory, step)


def _leftover(it: Leftover) -> Entry:
    return Entry(it.step, False, None, bytes_of(it.path), str(it.path), _KINDS[it.kind])


def _size(entry: Entry) -> str:
    return size(entry.bytes) + (f" ({size(entry.shared)} shared)" if entry.shared else "")


def _holds(entry: Entry) -> str:
    holds = {None: "", True: "weights", False: "everything"}[entry.weights_only]
    return f"{holds} ({entry.bad})" if entry.bad else holds
