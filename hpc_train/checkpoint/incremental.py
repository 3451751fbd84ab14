"""Saves that write what has changed since the last committed step, and give the files of all else one more name.

Every writer compares digests of what it is about to write with those of the step before: what is the same stays where
it is, in a file of an earlier step, which becomes a file of this one too (see links). So a step is as complete as any
other: it is read, moved and removed alone, and there is no chain to follow.

A file is shared as long as at least half of it is still wanted, and of those the few that have most; what else has not
changed is written anew, into a file of its own, so that from then on it can be shared whole.

Only what this process has itself written, in a step that it saw committed, is ever shared: after a resume the first
save is whole. What is shared is on the disk once, and damage to it is damage to all steps that share it; who wants more
copies of it than that has every so many saves written whole.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from hpc_train.checkpoint.delta import Base, Delta, Stored, Workshop, store
from hpc_train.checkpoint.errors import CheckpointError, one_line
from hpc_train.checkpoint.holdings import Held
from hpc_train.checkpoint.links import CANNOT, Older, link
from hpc_train.checkpoint.manifest import ShardFile
from hpc_train.checkpoint.poison import all_finite, spans
from hpc_train.checkpoint.runs import LENGTH, digests_of, runs_of
from hpc_train.checkpoint.shard import Staged
from hpc_train.checkpoint.storage.policy import Behaviour


@dataclass(frozen=True)
class Limits:
    """What is worth sharing."""

    files: int = 4
    """Of earlier steps, that a writer shares at most."""
    live: float = 0.5
    """Part of a file that must still be wanted."""
    least: int = 1 << 20
    """Bytes that must: for less a file is not worth its names."""
    run: int = LENGTH
    """Bytes of a run, about."""


@dataclass
class Changes:
    """One writer's part of one save: what of it is new, and once it is written, where all of it is."""

    delta: Delta
    base: Base | None
    size: int
    """Bytes that will be written."""
    shop: Workshop
    warning: str | None = None
    """Why something is written anew that could have been shared."""
    refused: bool = False
    """The file system has no such links."""
    stored: Stored | None = None
    finite: bool = False

    def is_finite(self, staged: Staged) -> bool:
        """As `Staged.is_finite`, with no look at tensors that are as they were when there was none."""
        if isinstance(staged.image, memoryview) and self.base is not None and self.base.finite:
            rows = sorted({self.delta.runs[index].row for index in self.delta.changed})
            held = staged.held
            new = Held(tuple(held.rows[row] for row in rows), tuple(held.places[row] for row in rows))
            self.finite = all_finite(staged.image, spans(staged.image, new))
        else:
            self.finite = staged.is_finite()
        return self.finite

    def write(self, directory: Path, name: str, staged: Staged, how: Behaviour) -> tuple[tuple[ShardFile, Held], ...]:
        """Link and write; see `delta.store`. What cannot be linked is written."""
        delta = self.delta
        for older in delta.files:
            if self.refused or not self._is_linked(directory, older):
                delta = delta.without(older)
        if self.refused:
            delta = Delta(delta.step, delta.held, delta.runs, delta.digests, {})
        self.stored = store(delta, directory, name, staged, how, self.shop)
        return self.stored.files

    def _is_linked(self, directory: Path, older: Older) -> bool:
        assert self.base is not None
        try:
            link(self.base.path, directory, older, self.base.step, self.delta.step)
        except (OSError, CheckpointError) as error:
            self.refused = isinstance(error, OSError) and error.errno in CANNOT
            why = str(error.strerror) if isinstance(error, OSError) else one_line(error)
            kind = "saves are whole ones" if self.refused else "what it has is written anew"
            self.warning = f"checkpoint.incremental: a file of step {older.step} cannot be shared ({why}); {kind}"
            return False
        return True


@dataclass
class Incremental:
    """One writer's memory of what it has on the disk."""

    limits: Limits = Limits()
    whole_every: int = 0
    """Of so many saves one shares nothing; 0: the first one only."""
    _base: Base | None = None
    _since: int = 0
    """Saves that were committed after the last that was to be whole; the same on every rank that writes."""
    _shop: Workshop = field(default_factory=Workshop)
    _refused: bool = False

    def compare(self, staged: Staged, step: int) -> Changes | None:
        """What of a shard is new; None where there is no use in knowing, as nothing can be shared here.

        Raises as `image.make_image`.
        """
        if self._refused:
            return None
        assert isinstance(staged.image, memoryview)
        if self._base is not None and step <= self._base.step:
            self._base = None  # training went back: names of files would no longer tell them apart
        runs = runs_of(staged.held, self.limits.run)
        delta = Delta(step, staged.held, runs, digests_of(staged.image, runs), {})
        base = None if 0 < self.whole_every <= self._since + 1 else self._base
        if base is not None:
            delta = self._shared(delta, base)
        size = staged.size if delta.is_whole else sum(self._shop.image(delta.rows(it)).size for it in delta.groups())
        return Changes(delta, base, size, self._shop)

    def adopt(self, changes: Changes, path: Path) -> None:
        """The step that they were written with is committed, and lies in this directory."""
        self._since = 0 if changes.base is None else self._since + 1
        if changes.stored is not None:
            self._base = Base(path, changes.delta.step, changes.stored.runs, changes.finite)
        self._refused |= changes.refused
        if self._refused:
            self._base = None

    def _shared(self, delta: Delta, base: Base) -> Delta:
        known = ((index, base.runs.get(delta.key(run))) for index, run in enumerate(delta.runs))
        same = {index: it for index, it in known if it is not None and it.digest == delta.digests[index]}
        live: Counter[Older] = Counter()
        for index, it in same.items():
            live[it.file] += delta.runs[index].size
        kept = set(self._worth(live))
        stays = {index: it for index, it in same.items() if it.file in kept}
        moves = same.keys() - stays.keys()
        few = sum(delta.runs[index].size for index in moves) < self.limits.least
        return Delta(delta.step, delta.held, delta.runs, delta.digests, stays, frozenset(() if few else moves))

    def _worth(self, live: Counter[Older]) -> list[Older]:
        """The files to share; live: bytes of each that are still wanted."""
        limits = self.limits
        worth = [it for it, size in live.items() if size >= max(limits.least, limits.live * it.data)]
        return sorted(worth, key=lambda it: live[it], reverse=True)[: limits.files]
