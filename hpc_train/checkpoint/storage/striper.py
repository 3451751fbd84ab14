"""Sets the layouts of a step's directories on Lustre, by `lfs` or without. That never fails a save: it warns once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_train.checkpoint.storage.kind import FileSystem
from hpc_train.checkpoint.storage.lfs import SECONDS, LfsError, count_osts, set_layout
from hpc_train.checkpoint.storage.lov import set_attribute
from hpc_train.checkpoint.storage.striping import Layout, shard_layout, step_layouts
from hpc_train.config.train import LustreConfig

_log = logging.getLogger(__name__)


@dataclass
class Striper:
    """The striping of one directory of checkpoints, and what was learnt of its servers."""

    wishes: LustreConfig = field(default_factory=LustreConfig)
    seconds: float = SECONDS
    """That `lfs` is given."""
    osts: int | None = None
    """None: not known, or not asked yet."""
    given_up: bool = False
    """It failed once, and was told; it is not tried again."""
    _asked: bool = False
    _for_steps: list[Layout] = field(default_factory=list)

    def for_shards(self, directory: Path, system: FileSystem, needs: Sequence[int]) -> Layout:
        """The layout for shard files of so many bytes, 0 where a rank has none, all under `directory`."""
        if not self._asked and self.wishes.stripe_count is None:
            self.osts = count_osts(directory, system.source, self.wishes.pool, self.seconds)
        self._asked = True
        return shard_layout(max(needs, default=0), sum(need > 0 for need in needs), self.osts, self.wishes)

    def stripe_step(self, path: Path) -> None:
        """The directory of a step, in the best layout that its servers take."""
        worked = self._first_that_works(path, self._for_steps or step_layouts(self.wishes))
        self._for_steps = [worked] if worked else []

    def stripe(self, path: Path, layout: Layout) -> None:
        """A directory that has no files yet."""
        self._first_that_works(path, [layout])

    def elsewhere(self, directory: Path, kind: str) -> None:
        """The directory is not on Lustre: a warning, once, if somebody thinks it is."""
        wanted = self.wishes.stripe_count is not None or self.wishes.pool is not None
        if wanted and not self.given_up:
            _log.warning("checkpoint.lustre has no effect: %s is not on Lustre but on %s", directory, kind)
        self.given_up = True

    def _first_that_works(self, path: Path, layouts: Sequence[Layout]) -> Layout | None:
        """The layout that was set; None if none was, after a warning."""
        why = ""
        for layout in () if self.given_up else layouts:
            try:
                why = set_layout(path, layout, self.seconds)
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


def _set_without_command(path: Path, layout: Layout, why: str) -> str:
    """Why that failed too; nothing if it did not."""
    try:
        set_attribute(path, layout)
    except (OSError, ValueError) as error:
        return f"{why}, and the attribute lustre.lov cannot be set ({error})"
    return ""
