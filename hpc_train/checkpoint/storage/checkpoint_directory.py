"""Prepare the directory of a step on rank 0: check that there is room, make it, stripe it on Lustre.

Striping never fails a save: it warns once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_train.checkpoint.storage.file_system import (
    MOUNTINFO,
    FileSystem,
    WritePolicy,
    check_free_space,
    choose_write_policy,
    detect_file_system,
    read_magic_number,
)
from hpc_train.checkpoint.storage.lustre import (
    LFS_TIMEOUT,
    LfsError,
    StripeLayout,
    choose_shard_layout,
    count_osts,
    list_step_layouts,
    set_lov_attribute,
    set_stripe_layout,
    stripe_round_bytes,
)
from hpc_train.config.train import LustreConfig

_log = logging.getLogger(__name__)


@dataclass
class LustreStriper:
    """The striping of one directory of checkpoints, and what was learnt of its servers."""

    wishes: LustreConfig = field(default_factory=LustreConfig)
    seconds: float = LFS_TIMEOUT
    """That `lfs` is given."""
    osts: int | None = None
    """None: not known, or not asked yet."""
    given_up: bool = False
    """It failed once, and was told; it is not tried again."""
    _asked: bool = False
    _for_steps: list[StripeLayout] = field(default_factory=list)

    def for_shards(self, directory: Path, system: FileSystem, needs: Sequence[int]) -> StripeLayout:
        """The layout for shard files of so many bytes, 0 where a rank has none, all under `directory`."""
        if not self._asked and self.wishes.stripe_count is None:
            self.osts = count_osts(directory, system.source, self.wishes.pool, self.seconds)
        self._asked = True
        return choose_shard_layout(max(needs, default=0), sum(need > 0 for need in needs), self.osts, self.wishes)

    def stripe_step(self, path: Path) -> None:
        """The directory of a step, in the best layout that its servers take."""
        worked = self._first_that_works(path, self._for_steps or list_step_layouts(self.wishes))
        self._for_steps = [worked] if worked else []

    def stripe(self, path: Path, layout: StripeLayout) -> None:
        """A directory that has no files yet."""
        self._first_that_works(path, [layout])

    def elsewhere(self, directory: Path, kind: str) -> None:
        """The directory is not on Lustre: a warning, once, if somebody thinks it is."""
        wanted = self.wishes.stripe_count is not None or self.wishes.pool is not None
        if wanted and not self.given_up:
            _log.warning("checkpoint.lustre has no effect: %s is not on Lustre but on %s", directory, kind)
        self.given_up = True

    def _first_that_works(self, path: Path, layouts: Sequence[StripeLayout]) -> StripeLayout | None:
        """The layout that was set; None if none was, after a warning."""
        why = ""
        for layout in () if self.given_up else layouts:
            try:
                why = set_stripe_layout(path, layout, self.seconds)
            except LfsError as error:
                why = str(error)
                if error.missing:
                    layout, why = layouts[-1], _set_without_command(path, layouts[-1], why)
                elif error.code is not None:
                    continue  # an older server may take the next
            if not why:
                return layout
            break
        self._give_up(path, why)
        return None

    def _give_up(self, path: Path, why: str) -> None:
        if not self.given_up:
            _log.warning(
                "checkpoints in %s keep the default striping on Lustre: %s; checkpoint.lustre.stripe=none: no warning",
                path.parent,
                why,
            )
        self.given_up = True


def _set_without_command(path: Path, layout: StripeLayout, why: str) -> str:
    """Why that failed too; nothing if it did not."""
    try:
        set_lov_attribute(path, layout)
    except (OSError, ValueError) as error:
        return f"{why}, and the attribute lustre.lov cannot be set ({error})"
    return ""


@dataclass
class CheckpointDirectory:
    """One directory of checkpoints."""

    io: str = "auto"
    """auto, direct or buffered."""
    striper: LustreStriper = field(default_factory=LustreStriper)
    mounts: Path = MOUNTINFO
    magic: Callable[[Path], int] = read_magic_number
    """Tells the file system of a directory."""
    _behaviour: WritePolicy | None = None

    def check(self, directory: Path, needs: Sequence[int]) -> FileSystem:
        """What the directory is on. needs: bytes of every rank's file. Raises CheckpointError if they do not fit."""
        system = detect_file_system(directory, self.mounts, self.magic)
        check_free_space(system, directory, needs)
        return system

    def make(self, step: Path, shards: Path, system: FileSystem, needs: Sequence[int]) -> WritePolicy:
        """Make the directory of a step and that of its shards, both striped; how to write there. Raises OSError.

        A file or a directory gets the layout that its directory has when it is made: so the outer one is set first.
        """
        step.mkdir(mode=0o700)
        if system.kind != "lustre":
            self.striper.elsewhere(step.parent, system.kind)
        stripe = system.kind == "lustre" and self.striper.wishes.stripe == "auto"
        layout = self.striper.for_shards(step, system, needs) if stripe else None
        if self._behaviour is None:
            wide = stripe_round_bytes(layout, self.striper.osts) if layout else None
            self._behaviour = choose_write_policy(system, step, self.io, wide)
        if layout:
            self.striper.stripe_step(step)
        shards.mkdir(mode=0o700)
        if layout:
            self.striper.stripe(shards, layout)
        return self._behaviour
