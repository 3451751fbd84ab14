"""Decide which files of earlier steps a save shares, and remember where every run is stored."""

from __future__ import annotations

import errno
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from hpc_train.checkpoint.errors import CheckpointError, format_error
from hpc_train.checkpoint.format.manifest import ShardFile
from hpc_train.checkpoint.format.shard_layout import FileLayout
from hpc_train.checkpoint.save.incremental.delta_files import DeltaCache, StoredStep, link_file, write_delta
from hpc_train.checkpoint.save.incremental.row_runs import RUN_BYTES, digest_runs, split_runs
from hpc_train.checkpoint.save.incremental.step_delta import EarlierFile, RunKey, StepDelta, StoredRun
from hpc_train.checkpoint.save.shard_file import StagedShard
from hpc_train.checkpoint.save.staging import are_spans_finite, find_float_spans
from hpc_train.checkpoint.storage.file_system import WritePolicy

LINK_UNSUPPORTED = (errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)
"""Errors of link(2) if the file system has no hard links. EMLINK is not one: it means that one file has too many."""


@dataclass(frozen=True)
class BaseStep:
    """The last step that this writer saw committed, and where its runs are stored."""

    path: Path
    step: int
    runs: dict[RunKey, StoredRun]
    finite: bool = False
    """Whether all of its tensors were free of NaN and infinity."""


@dataclass(frozen=True)
class SharingLimits:
    """Limits that decide whether a file of an earlier step is shared."""

    files: int = 4
    """Maximum number of shared files of a rank."""
    live: float = 0.5
    """Fraction of a file that must still be used."""
    least: int = 1 << 20
    """Bytes of it that must still be used."""
    run: int = RUN_BYTES
    """Approximate bytes of a run."""


@dataclass
class StepChanges:
    """A rank's save compared with the base step; after `write`, also where all of its runs are stored."""

    delta: StepDelta
    base: BaseStep | None
    size: int
    """Bytes that will be written."""
    cache: DeltaCache
    warning: str | None = None
    """Why unchanged runs had to be written again, if they had."""
    refused: bool = False
    """Whether the file system has no hard links."""
    stored: StoredStep | None = None
    finite: bool = False

    def is_finite(self, shard: StagedShard) -> bool:
        """Return whether the shard is finite, looking only at changed tensors if the base was finite."""
        if isinstance(shard.image, memoryview) and self.base is not None and self.base.finite:
            rows = sorted({self.delta.runs[index].row for index in self.delta.changed_runs})
            layout = shard.layout
            new = FileLayout(tuple(layout.rows[row] for row in rows), tuple(layout.places[row] for row in rows))
            self.finite = are_spans_finite(shard.image, find_float_spans(shard.image, new))
        else:
            self.finite = shard.is_finite()
        return self.finite

    def write(
        self, directory: Path, name: str, shard: StagedShard, policy: WritePolicy
    ) -> tuple[tuple[ShardFile, FileLayout], ...]:
        """Link the shared files and write the rest. Runs of a file that cannot be linked are written again."""
        delta = self.delta
        for older in delta.shared_files:
            if self.refused or not self._is_linked(directory, older):
                delta = delta.without_file(older)
        # Without hard links everything is written as one file, as if there were no base step.
        if self.refused:
            delta = StepDelta(delta.step, delta.layout, delta.runs, delta.digests, {})
        self.stored = write_delta(delta, directory, name, shard, policy, self.cache)
        return self.stored.files

    def _is_linked(self, directory: Path, older: EarlierFile) -> bool:
        assert self.base is not None
        try:
            link_file(self.base.path, directory, older, self.base.step, self.delta.step)
        except (OSError, CheckpointError) as error:
            self.refused = isinstance(error, OSError) and error.errno in LINK_UNSUPPORTED
            why = str(error.strerror) if isinstance(error, OSError) else format_error(error)
            kind = "nothing is shared from now on" if self.refused else "its content is written again"
            self.warning = f"checkpoint.incremental: a file of step {older.step} cannot be shared ({why}); {kind}"
            return False
        return True


@dataclass
class IncrementalWriter:
    """Decides what to write of each step, and remembers where all runs are stored."""

    limits: SharingLimits = SharingLimits()
    whole_every: int = 0
    """Number of saves of which one is written whole; 0: only the first."""
    _base: BaseStep | None = None
    _saves_since_whole: int = 0
    """Saves committed since the last whole one; the same on every rank that writes."""
    _cache: DeltaCache = field(default_factory=DeltaCache)
    _refused: bool = False

    def compare(self, shard: StagedShard, step: int) -> StepChanges | None:
        """Compare a staged shard with the base step; None if files cannot be shared here. Raises as make_image."""
        if self._refused:
            return None
        assert isinstance(shard.image, memoryview)
        if self._base is not None and step <= self._base.step:
            self._base = None  # a rollback: two files of the same step number would get the same name
        runs = split_runs(shard.layout, self.limits.run)
        delta = StepDelta(step, shard.layout, runs, digest_runs(shard.image, runs), {})
        # Every `whole_every`-th save has no base, so that it shares nothing with older steps.
        base = None if 0 < self.whole_every <= self._saves_since_whole + 1 else self._base
        if base is not None:
            delta = self._choose_shared_runs(delta, base)
        size = (
            shard.size
            if delta.is_whole
            else sum(self._cache.get_image(delta.make_rows(group)).size for group in delta.written_groups())
        )
        return StepChanges(delta, base, size, self._cache)

    def adopt(self, changes: StepChanges, path: Path) -> None:
        """Make a committed step, in the directory `path`, the base of the next comparison."""
        self._saves_since_whole = 0 if changes.base is None else self._saves_since_whole + 1
        if changes.stored is not None:
            self._base = BaseStep(path, changes.delta.step, changes.stored.runs, changes.finite)
        self._refused |= changes.refused
        if self._refused:
            self._base = None

    def _choose_shared_runs(self, delta: StepDelta, base: BaseStep) -> StepDelta:
        stored = ((index, base.runs.get(delta.run_key(run))) for index, run in enumerate(delta.runs))
        same = {index: run for index, run in stored if run is not None and run.digest == delta.digests[index]}
        live: Counter[EarlierFile] = Counter()
        for index, run in same.items():
            live[run.file] += delta.runs[index].size
        files = set(self._choose_files(live))
        shared = {index: run for index, run in same.items() if run.file in files}
        rewritten = same.keys() - shared.keys()
        if sum(delta.runs[index].size for index in rewritten) < self.limits.least:
            rewritten = set()  # too few bytes for a file of their own: they go with the changed runs
        return StepDelta(delta.step, delta.layout, delta.runs, delta.digests, shared, frozenset(rewritten))

    def _choose_files(self, live: Counter[EarlierFile]) -> list[EarlierFile]:
        """Return the files to share. live: bytes of each that are still used."""
        limits = self.limits
        worth = [file for file, size in live.items() if size >= max(limits.least, limits.live * file.data)]
        return sorted(worth, key=lambda file: live[file], reverse=True)[: limits.files]
