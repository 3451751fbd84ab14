"""Check in each rank that it imports the submitted code; if not, end the job with a line that names the module."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import hpc_train
from hpc_train.errors import UserError
from hpc_train.launch.job_spec import JobSpec
from hpc_train.launch.snapshot import code_sources, snapshot_files


def guard_imports(spec: JobSpec, first: bool) -> None:
    """Check that this process runs the code of the spec, and refuse later imports from the folders it was copied from.

    first: whether this process hashes the whole snapshot; the others check paths only. Raises UserError if hpc_train
    has another version or another location, or if the snapshot has changed.
    """
    if spec.hpc_train != hpc_train.__version__:
        raise UserError(
            f"{spec.run_dir}/job.json: was submitted with hpc_train {spec.hpc_train}, and here is "
            f"{hpc_train.__version__} ({code_sources.PACKAGE_FOLDER}); install that version, or submit the run again"
        )
    if not spec.code:
        return
    path = Path(spec.code)
    if not path.is_dir():
        raise UserError(f"{path}: the snapshot of the code is not there (any more); submit the run again")
    snapshot_files.check_private_folder(path)
    if first and snapshot_files.hash_folder(path) != path.name:
        raise UserError(f"{path}: the snapshot of the code was changed; submit the run again")
    roots = [Path(row["root"]) for row in spec.sources]
    _check_own_package(path)
    sys.meta_path.insert(0, SnapshotFinder(path, roots))


def _check_own_package(path: Path) -> None:
    """Check that hpc_train itself comes from the snapshot, if it is in it: a job's PYTHONPATH may get lost."""
    if (path / "0/hpc_train/launch/snapshot").is_dir() and not code_sources.PACKAGE_FOLDER.is_relative_to(
        path.resolve()
    ):
        raise UserError(
            f"hpc_train was imported from {code_sources.PACKAGE_FOLDER}, and not from "
            f"{path}; do not change PYTHONPATH in launch.setup"
        )


class SnapshotFinder(MetaPathFinder):
    """Asks the other finders, and refuses modules that they find in a folder from which the snapshot was made."""

    def __init__(self, snapshot: Path, roots: Sequence[Path]) -> None:
        self._snapshot, self._roots = snapshot.resolve(), tuple(roots)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find a module with the other finders. Raises UserError for one that may have been edited since."""
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = None if finder is self or find is None else find(name, path, target)
            if spec is not None:
                self._check_origin(name, spec.origin if spec.has_location else None)
                return spec  # type: ignore[no-any-return]
        return None

    def _check_origin(self, name: str, origin: str | None) -> None:
        if not origin or code_sources.is_installed(Path(origin)):
            return
        place = Path(origin).resolve()
        if any(place.is_relative_to(root) for root in self._roots) and not place.is_relative_to(self._snapshot):
            raise UserError(
                f"import {name}: {place} is not in the snapshot of the code, and may have been edited since; name it "
                "in launch.snapshot_include"
            )
