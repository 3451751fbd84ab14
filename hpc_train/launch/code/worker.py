"""In a rank: what runs here is what was submitted, or the job ends with a line that says what is not."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import hpc_train
from hpc_train.errors import UserError
from hpc_train.launch.code import sources, store
from hpc_train.launch.spec import JobSpec


def enter(spec: JobSpec, first: bool) -> None:
    """Check that this process runs the code of the spec, and see to it that no module comes from where it was.

    first: whether this is the process that reads all of the snapshot; the others look at paths alone.
    Raises UserError if hpc_train is of another version or from elsewhere, or if the snapshot is not what it was.
    """
    if spec.hpc_train != hpc_train.__version__:
        raise UserError(
            f"{spec.run_dir}/job.json: was submitted with hpc_train {spec.hpc_train}, and here is "
            f"{hpc_train.__version__} ({sources.PACKAGE}); install that version, or submit the run again"
        )
    if not spec.code:
        return
    path = Path(spec.code)
    if not path.is_dir():
        raise UserError(f"{path}: the snapshot of the code is not there (any more); submit the run again")
    store.check_owner(path)
    if first and store.contents(path) != path.name:
        raise UserError(f"{path}: the snapshot of the code was changed; submit the run again")
    roots = [Path(row["root"]) for row in spec.sources]
    _check_place(path)
    sys.meta_path.insert(0, Frozen(path, roots))


def _check_place(path: Path) -> None:
    """hpc_train must be that of the snapshot, if it was frozen, too: the path that a job is given may get lost."""
    if (path / "0/hpc_train/launch/code").is_dir() and not sources.PACKAGE.is_relative_to(path.resolve()):
        raise UserError(
            f"hpc_train was imported from {sources.PACKAGE}, and not from {path}; let launch.setup leave PYTHONPATH"
        )


class Frozen(MetaPathFinder):
    """Asks the other finders, and refuses what they find in a folder that the snapshot was made from."""

    def __init__(self, snapshot: Path, roots: Sequence[Path]) -> None:
        self._snapshot, self._roots = snapshot.resolve(), tuple(roots)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """As the other finders. Raises UserError for a module that may have been edited since."""
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            found = None if finder is self or find is None else find(name, path, target)
            if found is not None:
                self._check(name, found.origin if found.has_location else None)
                return found  # type: ignore[no-any-return]
        return None

    def _check(self, name: str, origin: str | None) -> None:
        if not origin or sources.is_installed(Path(origin)):
            return
        place = Path(origin).resolve()
        if any(place.is_relative_to(root) for root in self._roots) and not place.is_relative_to(self._snapshot):
            raise UserError(
                f"import {name}: {place} is not in the snapshot of the code, and may have been edited since; name it "
                "in launch.snapshot_include"
            )
