"""Sharded HDF5 checkpoints: committed whole or not at all, keyed by parameter name, loadable in any layout.

format/    file format of a step: manifest, shard files, digests, HDF5 structure
save/      write a step: stage tensors in memory, write shard files, commit by one rename
load/      read a step into any layout, verify a step, choose the step to resume from
storage/   checkpoint directories: names, lock, retention; file systems, Lustre
checkpointer.py  the face for any training loop: modules and optimizers in place of shards
convert/   reshard steps; import and export other libraries' files

checkpoints/step-<n>/manifest.json                 tensors, their places, sizes, checksums, `extra`
checkpoints/step-<n>/index.h5                      a list of the tensors for HDF5 tools, without values
checkpoints/step-<n>/shards/<folder>/<rank>.h5     one contiguous dataset per shard, readable by any HDF5 tool
checkpoints/step-<n>/shards/<folder>/<rank>.h5.digests   digest of every block of that file
checkpoints/step-<n>/shards/<folder>/<first>-<last>.h5   shard file of several ranks (checkpoint.ranks_per_file)
checkpoints/step-<n>/shards/<folder>/<rank>.step-<m>.h5  hard link to a file of step m (incremental)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_train.checkpoint.checkpointer import Checkpointer, LoadedStep
    from hpc_train.checkpoint.errors import CheckpointError, Problem
    from hpc_train.checkpoint.load.load_step import ResumedStep, load_step, resume_from_checkpoint
    from hpc_train.checkpoint.load.verify import find_newest_verified, verify_step
    from hpc_train.checkpoint.save.incremental.incremental_writer import IncrementalWriter
    from hpc_train.checkpoint.save.save_step import SaveResult, save_step
    from hpc_train.checkpoint.save.saver import Saver
    from hpc_train.checkpoint.storage.retention import prune_steps
    from hpc_train.checkpoint.storage.step_directory import list_committed_steps, mark_bad, unmark_bad

_MODULES = {
    "checkpointer": ("Checkpointer", "LoadedStep"),
    "errors": ("CheckpointError", "Problem"),
    "load.load_step": ("ResumedStep", "load_step", "resume_from_checkpoint"),
    "load.verify": ("find_newest_verified", "verify_step"),
    "save.incremental.incremental_writer": ("IncrementalWriter",),
    "save.save_step": ("SaveResult", "save_step"),
    "save.saver": ("Saver",),
    "storage.retention": ("prune_steps",),
    "storage.step_directory": ("list_committed_steps", "mark_bad", "unmark_bad"),
}
"""Module of each public name, imported on first use: most need torch, which `ls` and `prune` do without."""

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "IncrementalWriter",
    "LoadedStep",
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
