"""Write only what has changed since the last committed step, and hard-link the files with everything else.

Every rank splits its tensors into runs of rows and compares their digests with those of the step before. Unchanged runs
stay in a file of an earlier step, which gets a hard link in the new step. So every step is complete: it can be read,
moved and removed alone, and the file system counts the links.

A file is shared only while at least half of its bytes are still used, and a step shares at most the few files that are
used most. Other unchanged runs are written again into a file of their own, which later steps can share whole.

A process shares only files that it has written itself, in a step that it saw committed, so the first save after a
resume writes everything. Damage to a shared file damages all steps that share it; checkpoint.whole_every limits that:
one save in so many writes everything.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path, PurePosixPath

import torch

from hpc_train.checkpoint.errors import CheckpointError, format_error
from hpc_train.checkpoint.format.block_digests import find_digest_table
from hpc_train.checkpoint.format.hdf5_layout import DatasetRow, ShardImage, count_earlier_occurrences, make_image
from hpc_train.checkpoint.format.manifest import ShardFile
from hpc_train.checkpoint.format.rectangle import Rectangle
from hpc_train.checkpoint.format.shard_layout import EnclosingDataset, FileLayout, make_file_layout
from hpc_train.checkpoint.load.verified_reader import read_digest_table
from hpc_train.checkpoint.save.file_writer import GatherBuffers, GatherSource, WriteStream, list_extents, write_stream
from hpc_train.checkpoint.save.row_runs import RUN_BYTES, RowRun, digest_runs, merge_runs, split_runs
from hpc_train.checkpoint.save.shard_file import StagedShard, write_compressed_shard, write_digest_table, write_shard
from hpc_train.checkpoint.save.staging import are_spans_finite, find_float_spans
from hpc_train.checkpoint.storage.file_system import WritePolicy

LINK_UNSUPPORTED = (errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)
"""Errors of link(2) if the file system has no hard links. EMLINK is not one: it means that one file has too many."""


@dataclass(frozen=True)
class EarlierFile:
    """A shard file that this process has written, in a step that it saw committed."""

    file: ShardFile
    """The file as it was in that step."""
    step: int
    inode: int
    data: int
    """Bytes of tensors in it, used or not."""

    def name_in(self, step: int) -> str:
        """Return its path within the directory of its own step, or of a later one that shares it."""
        if step == self.step:
            return self.file.name
        path = PurePosixPath(self.file.name)
        return path.with_name(f"{path.stem}.step-{self.step}{path.suffix}").as_posix()

    def as_in(self, step: int) -> ShardFile:
        """Return its entry in the manifest of a later step."""
        return replace(self.file, name=self.name_in(step), written_at=self.step)


def record_written_file(directory: Path, file: ShardFile, step: int, data: int) -> EarlierFile:
    """Return a record of a file that was just written. Raises OSError."""
    return EarlierFile(file, step, (directory / file.name).stat().st_ino, data)


def link_file(source: Path, target: Path, older: EarlierFile, base: int, step: int) -> None:
    """Link a file of step `base` (directory `source`) and its table of digests into `step` (directory `target`).

    The folder must exist; it is not synchronised. Raises OSError, and CheckpointError if the file was replaced since it
    was written; then the links are removed, if possible.
    """
    old, new = source / older.name_in(base), target / older.name_in(step)
    try:
        os.link(old, new)
        os.link(find_digest_table(old), find_digest_table(new))
        # Somebody may have replaced the file in the meantime: check that the link leads to what this process wrote.
        status = new.stat()
        if (status.st_ino, status.st_size) != (older.inode, older.file.bytes):
            raise CheckpointError(f"{old} is not the file that was written there")
        read_digest_table(target, older.as_in(step))
    except (OSError, CheckpointError):
        for name in (new, find_digest_table(new)):
            with suppress(OSError):
                name.unlink()
        raise


RunKey = tuple[str, tuple[int, ...], torch.dtype, Rectangle]
"""Identity of a run from step to step: name, shape and dtype of its tensor, and its rectangle."""


@dataclass(frozen=True)
class StoredRun:
    """Location of a run's bytes on the disk."""

    digest: bytes
    file: EarlierFile
    place: int
    """Byte of the file."""
    number: int
    """Number of its dataset; see EnclosingDataset."""
    dataset: Rectangle
    """Rectangle of the whole dataset."""


@dataclass(frozen=True)
class BaseStep:
    """The last step that this writer saw committed, and where its runs are stored."""

    path: Path
    step: int
    runs: dict[RunKey, StoredRun]
    finite: bool = False
    """Whether all of its tensors were free of NaN and infinity."""


@dataclass(frozen=True)
class StepDelta:
    """The runs of a rank's shard: which are shared with earlier steps, and which are written."""

    step: int
    layout: FileLayout
    """Layout of the staged shard."""
    runs: Sequence[RowRun]
    digests: Sequence[bytes]
    shared_runs: dict[int, StoredRun]
    """Unchanged runs, by index, that stay in files of earlier steps."""
    rewritten_runs: frozenset[int] = frozenset()
    """Unchanged runs that are written again, because too little of their files is still used."""

    @property
    def shared_files(self) -> list[EarlierFile]:
        """Files of earlier steps that this step shares."""
        return list(dict.fromkeys(stored.file for stored in self.shared_runs.values()))

    @property
    def is_whole(self) -> bool:
        """Whether nothing is shared and all is written as one file."""
        return not self.shared_runs and len(self.written_groups()) < 2

    @property
    def changed_runs(self) -> list[int]:
        """Indices of the runs that have changed."""
        return [
            index
            for index in range(len(self.runs))
            if index not in self.shared_runs and index not in self.rewritten_runs
        ]

    def written_groups(self) -> list[list[int]]:
        """Return the runs of each file to write: changed runs and rewritten ones go into separate files."""
        return [group for group in (self.changed_runs, sorted(self.rewritten_runs)) if group]

    def without_file(self, file: EarlierFile) -> StepDelta:
        """Return this delta without sharing a file: its runs are written again."""
        shared_runs = {index: stored for index, stored in self.shared_runs.items() if stored.file != file}
        return replace(
            self,
            shared_runs=shared_runs,
            rewritten_runs=self.rewritten_runs | (self.shared_runs.keys() - shared_runs.keys()),
        )

    def merge_group(self, group: Sequence[int]) -> list[tuple[RowRun, list[RowRun]]]:
        """Merge a group of runs into as few rectangles as possible, in memory order."""
        return merge_runs([self.runs[index] for index in group])

    def make_row(self, run: RowRun) -> DatasetRow:
        """Return the dataset row of a run."""
        return replace(self.layout.rows[run.row], offset=run.rectangle.offset, local_shape=run.rectangle.shape)

    def make_rows(self, group: Sequence[int]) -> tuple[DatasetRow, ...]:
        """Return the dataset rows of a file with these runs."""
        return tuple(self.make_row(run) for run, _ in self.merge_group(group))

    def run_key(self, run: RowRun) -> RunKey:
        """Return what identifies a run from step to step."""
        row = self.layout.rows[run.row]
        return row.name, row.shape, row.dtype, run.rectangle

    def layout_in(self, file: EarlierFile) -> FileLayout:
        """Return the layout of this step's part of a shared file."""
        runs_in_file = [(stored, self.runs[index]) for index, stored in self.shared_runs.items() if stored.file == file]
        runs_in_file.sort(key=lambda pair: pair[0].place)
        rows, places, within = [], [], []
        for (_, number), of_dataset in groupby(runs_in_file, key=lambda pair: (pair[1].row, pair[0].number)):
            stored_runs = list(of_dataset)
            dataset = stored_runs[0][0].dataset
            for run, _ in merge_runs([replace(run, begin=stored.place) for stored, run in stored_runs]):
                rows.append(self.make_row(run))
                places.append(run.begin)
                within.append(EnclosingDataset(number, dataset.shape, run.rectangle.start_in(dataset)))
        return FileLayout(tuple(rows), tuple(places), tuple(within))


@dataclass(frozen=True)
class StoredStep:
    """A rank's files of a step, and where its runs are in them."""

    files: tuple[tuple[ShardFile, FileLayout], ...]
    """New and shared files, each with its layout."""
    runs: dict[RunKey, StoredRun]


@dataclass
class DeltaCache:
    """Buffers and file images kept from save to save, as mostly the same tensors change."""

    buffers: GatherBuffers = field(default_factory=GatherBuffers)
    _images: dict[tuple[DatasetRow, ...], ShardImage] = field(default_factory=dict)

    def get_image(self, rows: tuple[DatasetRow, ...]) -> ShardImage:
        """Return the image of a file with these rows. Raises as make_image."""
        if rows not in self._images:
            self._images = dict(list(self._images.items())[-1:])  # keep one: a step writes up to two files
            self._images[rows] = make_image(rows)
        return self._images[rows]


def write_delta(
    delta: StepDelta, directory: Path, name: str, shard: StagedShard, policy: WritePolicy, cache: DeltaCache
) -> StoredStep:
    """Write and synchronise the runs that are not shared; the shared files must be linked already.

    name: path, within the directory of the step, of the file of changed runs. Raises as write_shard.
    """
    runs = {delta.run_key(delta.runs[index]): stored for index, stored in delta.shared_runs.items()}
    files = [(older.as_in(delta.step), delta.layout_in(older)) for older in delta.shared_files]
    if delta.is_whole:
        file, layout = write_shard(directory, name, shard, policy)
        older = record_written_file(directory, file, delta.step, sum(row.bytes for row in layout.rows))
        return StoredStep(((file, layout),), runs | _place_runs_in_whole_file(delta, older))
    # The second group, unchanged runs that are written again, may be missing.
    for group, file_name in zip(delta.written_groups(), (name, name_unchanged_file(name)), strict=False):
        file, layout = _write_runs(delta, group, directory / file_name, shard, policy, cache)
        file = replace(file, name=file_name)
        older = record_written_file(directory, file, delta.step, sum(row.bytes for row in layout.rows))
        files.append((file, layout))
        runs |= _place_runs_in_parts(delta, group, older, layout)
    return StoredStep(tuple(files), runs)


def name_unchanged_file(name: str) -> str:
    """Return the name of the file of unchanged runs that are written again."""
    path = PurePosixPath(name)
    return path.with_name(f"{path.stem}.unchanging{path.suffix}").as_posix()


def _write_runs(
    delta: StepDelta, group: Sequence[int], path: Path, shard: StagedShard, policy: WritePolicy, cache: DeltaCache
) -> tuple[ShardFile, FileLayout]:
    """Write a file of some runs."""
    assert isinstance(shard.image, memoryview)
    rows, spans = delta.make_rows(group), [(run.begin, run.size) for run, _ in delta.merge_group(group)]
    image = cache.get_image(rows)
    if shard.level:
        begins = [begin for begin, _ in spans]
        return write_compressed_shard(
            path.parent, path.name, shard, make_file_layout(rows, image), begins, image.size, policy
        )
    source = GatherSource(list_extents(shard.image, image, spans), image, cache.buffers)
    digests = write_stream(path, WriteStream(source.read, image.size), policy)
    layout = make_file_layout(rows, image)
    return write_digest_table(path.parent, path.name, image.size, digests, layout), layout


def _place_runs_in_whole_file(delta: StepDelta, older: EarlierFile) -> dict[RunKey, StoredRun]:
    """Return where each run is in a file that is the staged image itself."""
    rows = delta.layout.rows
    numbers = count_earlier_occurrences(row.name for row in rows)
    datasets = [Rectangle(row.offset, row.local_shape) for row in rows]
    return {
        delta.run_key(run): StoredRun(digest, older, run.begin, numbers[run.row], datasets[run.row])
        for run, digest in zip(delta.runs, delta.digests, strict=True)
    }


def _place_runs_in_parts(
    delta: StepDelta, group: Sequence[int], older: EarlierFile, layout: FileLayout
) -> dict[RunKey, StoredRun]:
    """Return where each run of a group is in its file."""
    digests = {delta.run_key(delta.runs[index]): delta.digests[index] for index in group}
    numbers = count_earlier_occurrences(row.name for row in layout.rows)
    stored_runs = {}
    for (merged, parts), place, number in zip(delta.merge_group(group), layout.places, numbers, strict=True):
        for run in parts:
            key = delta.run_key(run)
            begin = place + run.begin - merged.begin
            stored_runs[key] = StoredRun(digests[key], older, begin, number, merged.rectangle)
    return stored_runs


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
