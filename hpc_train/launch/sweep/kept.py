"""What a run was frozen with, found again: its code, and a place for what an earlier go has left."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from hpc_train.errors import UserError
from hpc_train.launch.code.snapshot import PATHS, Snapshot
from hpc_train.launch.spec import JobSpec
from hpc_train.regular_files import read_text

BEFORE = "before"
"""In a run directory: what is there no more since the run was done all anew, a folder each time."""
_FROZEN = frozenset({"job.json", "config.yaml", "plan.json", "schedule.csv", ".submitit", ".lock", BEFORE})


def kept_code(spec: JobSpec) -> Snapshot | None:
    """The snapshot that a spec names; None if it names none. Raises UserError if it is gone."""
    if not spec.code:
        return None
    path = Path(spec.code)
    try:
        parts = json.loads(read_text(path / PATHS))
    except (OSError, ValueError):
        raise UserError(f"{path}: the snapshot of the code is not there (any more); submit the run again") from None
    roots = [Path(row["root"]) for row in spec.sources]
    searched = frozenset({*roots, *(root.parent for root in roots)})
    return Snapshot(path.name, path, tuple(str(path / part) for part in parts), tuple(spec.sources), searched)


def check_aside(spec: JobSpec) -> None:
    """Raise UserError for a run whose checkpoints lie elsewhere: `set_aside` would leave them, and it would go on."""
    chosen = spec.config["checkpoint"]["dir"]
    if chosen:
        raise UserError(f"--mode force: {spec.run_dir} saves into checkpoint.dir={chosen}; move what is there yourself")


def set_aside(run: Path) -> None:
    """Move all that a run has left into a folder of its own, so that it begins at its first step again."""
    left = [entry for entry in run.iterdir() if entry.name not in _FROZEN] if run.is_dir() else []
    if not left:
        return
    number = 0
    while (run / BEFORE / str(number)).exists():
        number += 1
    place = run / BEFORE / str(number)
    place.mkdir(parents=True)
    for entry in left:
        shutil.move(entry, place / entry.name)
    (run / "logs").mkdir()
