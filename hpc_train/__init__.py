"""hpc_train: describe, plan, submit, place, train, checkpoint and resume PyTorch runs on Slurm clusters.

Importing this package is cheap: each public name is imported on first use, and torch only by what needs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_train.api import Run, compose, parallelize, place, plan, submit, train
    from hpc_train.checkpoint.checkpointer import Checkpointer
    from hpc_train.checkpoint.errors import CheckpointError
    from hpc_train.data.sample_sampler import SampleOrder
    from hpc_train.errors import RunFailed, UserError
    from hpc_train.launch.loop_recorder import LoopRecorder
    from hpc_train.runtime.preemption import Preemption
    from hpc_train.runtime.start import init

__version__ = "0.1.0"
__all__ = [
    "CheckpointError",
    "Checkpointer",
    "LoopRecorder",
    "Preemption",
    "Run",
    "RunFailed",
    "SampleOrder",
    "UserError",
    "compose",
    "init",
    "parallelize",
    "place",
    "plan",
    "submit",
    "train",
]

_MODULES = {
    "hpc_train.api": ("Run", "compose", "parallelize", "place", "plan", "submit", "train"),
    "hpc_train.checkpoint.checkpointer": ("Checkpointer",),
    "hpc_train.checkpoint.errors": ("CheckpointError",),
    "hpc_train.data.sample_sampler": ("SampleOrder",),
    "hpc_train.errors": ("RunFailed", "UserError"),
    "hpc_train.runtime.start": ("init",),
    "hpc_train.runtime.preemption": ("Preemption",),
    "hpc_train.launch.loop_recorder": ("LoopRecorder",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            value = getattr(import_module(module), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names too before they are imported, for completion in notebooks."""
    return sorted({*globals(), *__all__})
