"""Sharded HDF5 checkpoints: whole or absent, keyed by parameter name, loadable in any layout.

checkpoints/step-<n>/manifest.json                 what is in it and where, sizes, checksums, `extra`
checkpoints/step-<n>/index.h5                      a list of the tensors for HDF5 tools, without values
checkpoints/step-<n>/shards/<folder>/<rank>.h5     one contiguous dataset a piece, readable by any HDF5 tool
checkpoints/step-<n>/shards/<folder>/<rank>.h5.digests   a digest of every block of it
checkpoints/step-<n>/shards/<folder>/<first>-<last>.h5   the same of several ranks (checkpoint.ranks_per_file)
checkpoints/step-<n>/shards/<folder>/<rank>.step-<m>.h5  a file of step m that is one of this step too (incremental)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_train.checkpoint.background import Saver
    from hpc_train.checkpoint.catalogue import committed
    from hpc_train.checkpoint.errors import CheckpointError, Problem
    from hpc_train.checkpoint.incremental import Incremental
    from hpc_train.checkpoint.loading import load
    from hpc_train.checkpoint.poison import mark_bad, unmark
    from hpc_train.checkpoint.resuming import Resumed, resume
    from hpc_train.checkpoint.retention import prune
    from hpc_train.checkpoint.saving import Saved, save
    from hpc_train.checkpoint.verification import newest, verify

_MODULES = {
    "background": ("Saver",),
    "catalogue": ("committed",),
    "errors": ("CheckpointError", "Problem"),
    "incremental": ("Incremental",),
    "loading": ("load",),
    "poison": ("mark_bad", "unmark"),
    "resuming": ("Resumed", "resume"),
    "retention": ("prune",),
    "saving": ("Saved", "save"),
    "verification": ("newest", "verify"),
}
"""Module of each public name. Names are imported on first use: most need torch, which `ls` and `prune` do not."""

__all__ = [
    "CheckpointError",
    "Incremental",
    "Problem",
    "Resumed",
    "Saved",
    "Saver",
    "committed",
    "load",
    "mark_bad",
    "newest",
    "prune",
    "resume",
    "save",
    "unmark",
    "verify",
]


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value
