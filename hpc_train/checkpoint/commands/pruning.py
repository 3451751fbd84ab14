"""`hpc-train checkpoint prune`: the retention that a run does itself, by hand."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_train.checkpoint.catalogue import committed, found
from hpc_train.checkpoint.commands.show import print_json
from hpc_train.checkpoint.commands.target import leftovers, target
from hpc_train.checkpoint.retention import Also, condemned, is_dead
from hpc_train.checkpoint.retention import prune as prune_now
from hpc_train.errors import UserError


@dataclass(frozen=True)
class Options:
    """Of the command; see checkpoint.keep, keep_every and keep_best."""

    keep: int
    every: int
    best: int
    dry_run: bool


def prune(where: str, options: Options, json: bool) -> int:
    """Keep the newest good steps; print what was removed, or would be; returns 0, or 1 if something would not go."""
    place = target(where)
    if place.step is not None:
        raise UserError(f"{where}: is one step; give the directory of checkpoints that is to keep {options.keep}")
    directory, also = place.directory, Also(options.every, options.best)
    steps, wanted = committed(directory), condemned(directory, options.keep, also)
    dead = [it.path for it in leftovers(directory) if it.kind == "old" or is_dead(it.path)]
    if not options.dry_run:
        prune_now(directory, options.keep, also)
    left = set() if options.dry_run else set(found(directory))
    removed = [step for step in wanted if step not in left]
    gone = [path.name for path in dead if options.dry_run or not path.exists()]
    kept = [step for step in steps if step not in removed]
    if json:
        print_json({"removed": removed, "kept": kept, "leftovers": gone, "dry_run": options.dry_run})
    else:
        verb = "would remove" if options.dry_run else "removed"
        print(f"{verb} {', '.join([*(f'step {it}' for it in removed), *gone]) or 'nothing'}")
        print(f"kept {', '.join(f'step {it}' for it in kept) or 'nothing'}")
    return int(bool(set(wanted) - set(removed)))
