"""`hpc-train checkpoint prune` and `mark`: remove old steps, and mark a step bad."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.format.manifest import read_manifest
from hpc_train.checkpoint.storage.retention import KeepRules, is_dead_leftover, list_prunable_steps
from hpc_train.checkpoint.storage.retention import prune_steps as prune_now
from hpc_train.checkpoint.storage.step_directory import (
    explain_bad_step,
    find_steps,
    list_committed_steps,
    locate_step,
    mark_bad,
    unmark_bad,
)
from hpc_train.checkpoint.storage.step_selection import CheckpointTarget, find_leftovers, find_target
from hpc_train.cli.output import print_json
from hpc_train.errors import UserError
from hpc_train.terminal import one_line


@dataclass(frozen=True)
class PruneOptions:
    """Options of `prune`; see checkpoint.keep, keep_every and keep_best."""

    keep: int
    every: int
    best: int
    dry_run: bool


def prune_command(where: str, options: PruneOptions, json: bool) -> int:
    """Remove all but the newest good steps, and print them; returns 1 if one could not be removed, else 0."""
    place = find_target(where)
    if place.step is not None:
        raise UserError(f"{where}: is one step; give the directory of checkpoints that is to keep {options.keep}")
    directory, keep_rules = place.directory, KeepRules(options.every, options.best)
    steps, prunable = list_committed_steps(directory), list_prunable_steps(directory, options.keep, keep_rules)
    dead = [
        leftover.path
        for leftover in find_leftovers(directory)
        if leftover.kind == "old" or is_dead_leftover(leftover.path)
    ]
    if not options.dry_run:
        prune_now(directory, options.keep, keep_rules)
    remaining = set() if options.dry_run else set(find_steps(directory))
    removed = [step for step in prunable if step not in remaining]
    removed_leftovers = [path.name for path in dead if options.dry_run or not path.exists()]
    kept_steps = [step for step in steps if step not in removed]
    if json:
        print_json({"removed": removed, "kept": kept_steps, "leftovers": removed_leftovers, "dry_run": options.dry_run})
    else:
        verb = "would remove" if options.dry_run else "removed"
        print(f"{verb} {', '.join([*(f'step {step}' for step in removed), *removed_leftovers]) or 'nothing'}")
        print(f"kept {', '.join(f'step {step}' for step in kept_steps) or 'nothing'}")
    return int(bool(set(prunable) - set(removed)))


NO_REASON = "no reason given"


def mark_command(where: str, step: int | None, bad: str | None, json: bool) -> int:
    """Mark a step bad for the reason `bad`, or remove its mark (None); print its state; returns 0."""
    place = _find_marked_step(where, step)
    assert place.step is not None
    path = locate_step(place.directory, place.step)
    if bad is None:
        unmark_bad(place.directory, place.step)
    else:
        mark_bad(place.directory, place.step, " ".join(bad.split()) or NO_REASON)
    reason = _explain_mark(path, place.step)
    if json:
        print_json({"step": place.step, "path": str(path), "bad": reason})
    elif reason is None:
        print(one_line(f"{path}: is good: checkpoint.resume=auto takes it"))
    else:
        print(one_line(f"{path}: {reason}: checkpoint.resume=auto passes it over"))
    return 0


def _find_marked_step(where: str, step: int | None) -> CheckpointTarget:
    """Find the step, which must be named, so that the newest is not marked by mistake."""
    if where.isdecimal() and step is None and not Path(where).exists():
        where, step = ".", int(where)
    place = find_target(where)
    if place.step is None and step is None:
        raise UserError(f"{where}: say which step of it: --step N, or the path of a step-<n>")
    if place.step is not None and step not in (None, place.step):
        raise UserError(f"{where}: is one step already; leave --step out, or give the directory of several")
    if place.step is None and step is not None:
        locate_step(place.directory, step)
        return CheckpointTarget(place.directory, step)
    return place


def _explain_mark(path: Path, step: int) -> str | None:
    """Return why the step is bad, or None; a damaged step can be marked too."""
    try:
        return explain_bad_step(path, read_manifest(path, step))
    except CheckpointError:
        return explain_bad_step(path, None)
