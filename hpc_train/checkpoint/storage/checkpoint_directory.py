"""Prepare the directory of a step on rank 0: check free space, make the directory, stripe it on Lustre.

A failure of striping never fails a save: it warns once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_train.checkpoint.storage.file_system import (
    FileSystem,
    WritePolicy,
    check_free_space,
    choose_write_policy,
    detect_file_system,
    read_magic_number,
)
from hpc_train.checkpoint.storage.lustre import LFS_TIMEOUT, LfsError, count_osts, set_lov_attribute, set_stripe_layout
from hpc_train.checkpoint.storage.stripe_layout import (
    StripeLayout,
    choose_shard_layout,
    count_stripe_round_bytes,
    list_step_layouts,
)
from hpc_train.cluster.filesystems import MOUNT_TABLE
from hpc_train.config.train import LustreConfig

_log = logging.getLogger(__name__)


@dataclass
class LustreStriper:
    """Stripes the steps of one checkpoint directory, and remembers which layouts its servers accept."""

    wishes: LustreConfig = field(default_factory=LustreConfig)
    seconds: float = LFS_TIMEOUT
    """Seconds that one call of `lfs` may take."""
    osts: int | None = None
    """Number of OSTs; None: unknown, or not asked yet."""
    given_up: bool = False
    """Striping failed once, with a warning, and is not tried again."""
    _asked: bool = False
    _for_steps: list[StripeLayout] = field(default_factory=list)

    def choose_layout(self, directory: Path, system: FileSystem, needs: Sequence[int]) -> StripeLayout:
        """Return the layout for the shard files of a step. needs: bytes of each, 0 where a rank has none."""
        if not self._asked and self.wishes.stripe_count is None:
            self.osts = count_osts(directory, system.source, self.wishes.pool, self.seconds)
        self._asked = True
        return choose_shard_layout(max(needs, default=0), sum(need > 0 for need in needs), self.osts, self.wishes)

    def stripe_step(self, path: Path) -> None:
        """Stripe the directory of a step in the best layout that the servers accept."""
        worked = self._set_first_that_works(path, self._for_steps or list_step_layouts(self.wishes))
        self._for_steps = [worked] if worked else []

    def stripe(self, path: Path, layout: StripeLayout) -> None:
        """Stripe a directory that has no files yet."""
        self._set_first_that_works(path, [layout])

    def warn_not_on_lustre(self, directory: Path, kind: str) -> None:
        """Warn, once, if checkpoint.lustre is set for a directory that is not on Lustre."""
        asked_for = self.wishes.stripe_count is not None or self.wishes.pool is not None
        if asked_for and not self.given_up:
            _log.warning("checkpoint.lustre has no effect: %s is not on Lustre but on %s", directory, kind)
        self.given_up = True

    def _set_first_that_works(self, path: Path, layouts: Sequence[StripeLayout]) -> StripeLayout | None:
        """Set the first layout that the servers accept and return it; None, after a warning, if they accept none."""
        reason = ""
        for layout in () if self.given_up else layouts:
            try:
                reason = set_stripe_layout(path, layout, self.seconds)
            except LfsError as error:
                reason = str(error)
                if error.missing:
                    layout, reason = layouts[-1], _set_without_command(path, layouts[-1], reason)
                elif error.code is not None:
                    continue  # an older server may accept the next one
            if not reason:
                return layout
            break
        self._give_up(path, reason)
        return None

    def _give_up(self, path: Path, reason: str) -> None:
        if not self.given_up:
            _log.warning(
                "checkpoints in %s keep the default striping on Lustre: %s; checkpoint.lustre.stripe=none: no warning",
                path.parent,
                reason,
            )
        self.given_up = True


def _set_without_command(path: Path, layout: StripeLayout, reason: str) -> str:
    """Set the layout as an attribute, since `lfs` failed for `reason`; returns why both failed, or an empty string."""
    try:
        set_lov_attribute(path, layout)
    except (OSError, ValueError) as error:
        return f"{reason}, and the attribute lustre.lov cannot be set ({error})"
    return ""


@dataclass
class CheckpointDirectory:
    """Checks, makes and stripes directories of steps, and chooses how files are written there."""

    io: str = "auto"
    """How files are written: auto, direct or buffered."""
    striper: LustreStriper = field(default_factory=LustreStriper)
    mounts: Path = MOUNT_TABLE
    magic: Callable[[Path], int] = read_magic_number
    """Returns the magic number of the file system of a directory."""
    _policy: WritePolicy | None = None

    def check_space(self, directory: Path, needs: Sequence[int]) -> FileSystem:
        """Return the file system of a directory. Raises CheckpointError if files of so many bytes do not fit."""
        system = detect_file_system(directory, self.mounts, self.magic)
        check_free_space(system, directory, needs)
        return system

    def make_step(self, step: Path, shards: Path, system: FileSystem, needs: Sequence[int]) -> WritePolicy:
        """Make and stripe the directory of a step and that of its shards; returns how to write there. Raises OSError.

        A file or directory inherits the layout of its directory when it is made, so the outer directory is set first.
        """
        step.mkdir(mode=0o700)
        if system.kind != "lustre":
            self.striper.warn_not_on_lustre(step.parent, system.kind)
        stripe = system.kind == "lustre" and self.striper.wishes.stripe == "auto"
        layout = self.striper.choose_layout(step, system, needs) if stripe else None
        if self._policy is None:
            round_bytes = count_stripe_round_bytes(layout, self.striper.osts) if layout else None
            self._policy = choose_write_policy(system, step, self.io, round_bytes)
        if layout:
            self.striper.stripe_step(step)
        shards.mkdir(mode=0o700)
        if layout:
            self.striper.stripe(shards, layout)
        return self._policy
