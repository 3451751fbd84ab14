"""What a run finds out about the directory of its checkpoints, once, and does there before every save. On rank 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_train.checkpoint.storage.kind import MOUNTS, FileSystem, file_system, magic_number
from hpc_train.checkpoint.storage.policy import Behaviour, behaviour
from hpc_train.checkpoint.storage.space import check_space
from hpc_train.checkpoint.storage.striper import Striper
from hpc_train.checkpoint.storage.striping import round_bytes


@dataclass
class Place:
    """One directory of checkpoints."""

    io: str = "auto"
    """auto, direct or buffered."""
    striper: Striper = field(default_factory=Striper)
    mounts: Path = MOUNTS
    magic: Callable[[Path], int] = magic_number
    """Tells the file system of a directory."""
    _behaviour: Behaviour | None = None

    def check(self, directory: Path, needs: Sequence[int]) -> FileSystem:
        """What the directory is on. needs: bytes of every rank's file. Raises CheckpointError if they do not fit."""
        system = file_system(directory, self.mounts, self.magic)
        check_space(system, directory, needs)
        return system

    def make(self, step: Path, shards: Path, system: FileSystem, needs: Sequence[int]) -> Behaviour:
        """Make the directory of a step and that of its shards, both striped; how to write there. Raises OSError.

        A file or a directory gets the layout that its directory has when it is made: so the outer one is set first.
        """
        step.mkdir(mode=0o700)
        if system.kind != "lustre":
            self.striper.elsewhere(step.parent, system.kind)
        stripe = system.kind == "lustre" and self.striper.wishes.stripe == "auto"
        layout = self.striper.for_shards(step, system, needs) if stripe else None
        if self._behaviour is None:
            wide = round_bytes(layout, self.striper.osts) if layout else None
            self._behaviour = behaviour(system, step, self.io, wide)
        if layout:
            self.striper.stripe_step(step)
        shards.mkdir(mode=0o700)
        if layout:
            self.striper.stripe(shards, layout)
        return self._behaviour
