"""Sharded HDF5 checkpoints: whole or absent, keyed by parameter name, loadable in any layout.

format/    what the bytes of a step mean: manifest, shard files, digests, HDF5 structure
save/      write a step: stage tensors in memory, write shard files, commit by one rename
load/      read a step into any layout, verify it, choose the one to resume from
storage/   directories of checkpoints: names, lock, retention; file systems, Lustre
convert/   steps from and to other layouts and other libraries' files

checkpoints/step-<n>/manifest.json                 what is in it and where, sizes, checksums, `extra`
checkpoints/step-<n>/index.h5                      a list of the tensors for HDF5 tools, without values
checkpoints/step-<n>/shards/<folder>/<rank>.h5     one contiguous dataset a shard, readable by any HDF5 tool
checkpoints/step-<n>/shards/<folder>/<rank>.h5.digests   a digest of every block of it
checkpoints/step-<n>/shards/<folder>/<first>-<last>.h5   the same of several ranks (checkpoint.ranks_per_file)
checkpoints/step-<n>/shards/<folder>/<rank>.step-<m>.h5  a file of step m that is one of this step too (incremental)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_train.checkpoint.errors import CheckpointError, Problem
    from hpc_train.checkpoint.load.load_step import ResumedStep, load_step, resume_from_checkpoint
    from hpc_train.checkpoint.load.verify import find_newest_verified, verify_step
    from hpc_train.checkpoint.save.incremental import IncrementalWriter
    from hpc_train.checkpoint.save.save_step import SaveResult, save_step
    from hpc_train.checkpoint.save.saver import Saver
    from hpc_train.checkpoint.storage.retention import prune_steps
    from hpc_train.checkpoint.storage.step_directory import list_committed_steps, mark_bad, unmark_bad

_MODULES = {
    "errors": ("CheckpointError", "Problem"),
    "load.load_step": ("ResumedStep", "load_step", "resume_from_checkpoint"),
    "load.verify": ("find_newest_verified", "verify_step"),
    "save.incremental": ("IncrementalWriter",),
    "save.save_step": ("SaveResult", "save_step"),
    "save.saver": ("Saver",),
    "storage.retention": ("prune_steps",),
    "storage.step_directory": ("list_committed_steps", "mark_bad", "unmark_bad"),
}
"""Module of each public name. Names are imported on first use: most need torch, which `ls` and `prune` do not."""

__all__ = [
    "CheckpointError",
    "IncrementalWriter",
    "Problem",
    "ResumedStep",
    "SaveResult",
    "Saver",
    "find_newest_verified",
    "list_committed_steps",
    "load_step",
    "mark_bad",
    "prune_steps",
    "resume_from_checkpoint",
    "save_step",
    "unmark_bad",
    "verify_step",
]


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value
