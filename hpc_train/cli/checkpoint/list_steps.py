"""`hpc-train checkpoint ls`: list the steps of a directory, and what saves that failed have left.

It reads manifests only, unless --verify asks for every byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR
from typing import Any

from hpc_train.checkpoint.storage.step_directory import (
    WEIGHTS_FOLDER,
    explain_bad_step,
    find_steps,
    holds_weights_only,
    list_committed_steps,
    try_read_manifest,
)
from hpc_train.checkpoint.storage.step_selection import (
    CheckpointTarget,
    Leftover,
    find_leftovers,
    find_target,
)
from hpc_train.cli.output import print_json, print_table
from hpc_train.units import format_bytes

_LEFTOVER_STATES = {"tmp": "unfinished", "trash": "being deleted", "old": "replaced"}


@dataclass(frozen=True)
class ListedStep:
    """A line of `checkpoint ls`."""

    step: int
    committed: bool
    verified: bool | None
    """None: not verified."""
    bytes: int
    path: str
    state: str
    """sound, damaged, committed; of leftovers unfinished, replaced, being deleted."""
    weights_only: bool | None = None
    """None where the manifest cannot be read."""
    bad: str | None = None
    """Why checkpoint.resume=auto passes the step over, though it may be sound; None if it does not."""
    shared: int = 0
    """Bytes, among those of `bytes`, in files that earlier steps have written."""
    saved_at: float | None = None
    """Seconds since the epoch by the clock of the node that saved it, for people to read: clocks differ, so the list is
    ordered by commits instead."""
    attempt: int | None = None
    """Attempt of the run that saved the step."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields of `ls --json`."""
        return dict(vars(self))


def print_steps(where: str, with_verify: bool, json: bool) -> int:
    """Print the steps in order of commit, then leftovers; returns 0. with_verify: read and check every byte."""
    listed = list_entries(find_target(where), with_verify)
    if json:
        print_json([entry.to_json() for entry in listed])
        return 0
    columns = ("step", "state", "size", "holds", "path")
    rows = [(step.step, step.state, _format_size(step), _describe_content(step), step.path) for step in listed]
    print_table(columns, rows, numbers=("step", "size"))
    return 0


def list_entries(place: CheckpointTarget, with_verify: bool) -> list[ListedStep]:
    """List the steps of the directory, or the one step that was named."""
    steps = list_committed_steps(place.directory) if place.step is None else [place.step]
    paths = find_steps(place.directory)
    listed = [_list_committed(place.directory, paths[step], step, with_verify) for step in steps]
    if place.step is not None:
        return listed
    weights = place.directory / WEIGHTS_FOLDER
    listed += [_list_committed(weights, path, step, with_verify) for step, path in sorted(find_steps(weights).items())]
    return listed + [
        _list_leftover(leftover) for folder in (place.directory, weights) for leftover in find_leftovers(folder)
    ]


def sum_file_sizes(path: Path) -> int:
    """Sum the sizes of all files in a directory; files that disappear meanwhile are skipped."""
    total = 0
    for entry in path.rglob("*"):
        try:
            status = entry.lstat()
            total += status.st_size if not S_ISDIR(status.st_mode) else 0
        except OSError:
            continue
    return total


def _list_committed(directory: Path, path: Path, step: int, with_verify: bool) -> ListedStep:
    verified = _is_sound(directory, step) if with_verify else None
    manifest = try_read_manifest(path, step)
    if manifest is None:
        bad = explain_bad_step(path, None)
        return ListedStep(step, True, verified, sum_file_sizes(path), str(path), "damaged", bad=bad)
    times, origin = manifest.times, manifest.origin
    return ListedStep(
        step=step,
        committed=True,
        verified=verified,
        bytes=manifest.size,
        path=str(path),
        state={None: "committed", True: "sound", False: "damaged"}[verified],
        weights_only=holds_weights_only(manifest.extra),
        bad=explain_bad_step(path, manifest),
        shared=manifest.shared,
        saved_at=times.at if times is not None else None,
        attempt=origin.attempt if origin is not None else None,
    )


def _is_sound(directory: Path, step: int) -> bool:
    # It imports torch; listing without it takes a tenth of the time.
    from hpc_train.checkpoint.load.verify import verify_step

    return not verify_step(directory, step)


def _list_leftover(leftover: Leftover) -> ListedStep:
    return ListedStep(
        leftover.step, False, None, sum_file_sizes(leftover.path), str(leftover.path), _LEFTOVER_STATES[leftover.kind]
    )


def _format_size(entry: ListedStep) -> str:
    return format_bytes(entry.bytes) + (f" ({format_bytes(entry.shared)} shared)" if entry.shared else "")


def _describe_content(entry: ListedStep) -> str:
    holds = {None: "", True: "weights", False: "everything"}[entry.weights_only]
    return f"{holds} ({entry.bad})" if entry.bad else holds
