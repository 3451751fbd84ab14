"""Save only what has changed since the last committed step, and link the files of all else into the new step.

Every writer compares digests of runs of rows that it is about to write with those of the step before: what is the
same stays where it is, in a file of an earlier step, which gets one more name (link(2)) in this one. So a step is as
complete as any other: it is read, moved and removed alone, and there is no chain to follow. The file system counts
the names.

A file is shared as long as at least half of it is still wanted, and of those the few that have most; what else has
not changed is written anew, into a file of its own, so that from then on it can be shared whole.

Only what this process has itself written, in a step that it saw committed, is ever shared: after a resume the first
save is whole. Damage to a shared file is damage to all steps that share it; who wants more copies has every so many
saves written whole.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path, PurePosixPath

import torch
import xxhash

from hpc_train.checkpoint.errors import CheckpointError, format_error
from hpc_train.checkpoint.format.block_digests import digest_table_path
from hpc_train.checkpoint.format.hdf5_layout import DatasetRow, ShardImage, count_earlier_occurrences, make_image
from hpc_train.checkpoint.format.manifest import ShardFile
from hpc_train.checkpoint.format.rectangle import Rectangle, join_rectangles, split_slabs
from hpc_train.checkpoint.format.shard_layout import EnclosingDataset, FileLayout, make_file_layout
from hpc_train.checkpoint.load.verified_reader import read_digest_table
from hpc_train.checkpoint.save.file_writer import GatherBuffers, GatherSource, WriteStream, list_extents, write_stream
from hpc_train.checkpoint.save.shard_file import StagedShard, write_compressed_shard, write_digest_table, write_shard
from hpc_train.checkpoint.save.staging import are_spans_finite, find_float_spans
from hpc_train.checkpoint.storage.file_system import WritePolicy

RUN_BYTES = 1 << 20
"""Bytes of a run, about; what is smaller than that on the disk is not worth a name."""
MAX_RUNS = 1024
"""Runs of a large shard beyond one a tensor, about: each may become a part of its own in the manifest."""
_THREADS = 2
_BATCH = 64


@dataclass(frozen=True)
class RowRun:
    """Some rows of a rectangle that a shard holds, contiguous there."""

    row: int
    """Index among what the shard holds."""
    rectangle: Rectangle
    """Of the logical tensor."""
    begin: int
    """Byte of the shard's image."""
    size: int
    """Bytes."""


def split_runs(held: FileLayout, length: int = RUN_BYTES) -> list[RowRun]:
    """All of a shard, in its own order. A tensor without elements is one run without bytes."""
    total = sum(row.bytes for row in held.rows)
    most = max(length, total // MAX_RUNS)
    found = []
    for index, (row, place) in enumerate(zip(held.rows, held.places, strict=True)):
        at, item = place, row.dtype.itemsize
        for slab in split_slabs(Rectangle(row.offset, row.local_shape), max(1, most // item)):
            found.append(RowRun(index, slab, at, slab.volume * item))
            at += found[-1].size
    return found


def digest_runs(memory: memoryview, runs: Sequence[RowRun]) -> list[bytes]:
    """xxh3-128 of the bytes of every run. Lets other threads run meanwhile."""
    with ThreadPoolExecutor(_THREADS) as pool:
        batches = (runs[at : at + _BATCH] for at in range(0, len(runs), _BATCH))
        return [digest for batch in pool.map(lambda it: _digest_batch(memory, it), batches) for digest in batch]


def _digest_batch(memory: memoryview, runs: Sequence[RowRun]) -> list[bytes]:
    return [xxhash.xxh3_128_digest(memory[run.begin : run.begin + run.size]) for run in runs]


def merge_runs(runs: Sequence[RowRun]) -> list[tuple[RowRun, list[RowRun]]]:
    """(all of it as one run, its runs): neighbours of one row that are one rectangle together, as many as can be.

    runs: in the order of their bytes.
    """
    found: list[tuple[RowRun, list[RowRun]]] = []
    for run in runs:
        whole, parts = run, [run]
        while found and (both := _merge_two(found[-1][0], whole)) is not None:
            whole, parts = both, found.pop()[1] + parts
        found.append((whole, parts))
    return found


def _merge_two(first: RowRun, second: RowRun) -> RowRun | None:
    if first.row != second.row or first.begin + first.size != second.begin:
        return None
    whole = join_rectangles(first.rectangle, second.rectangle)
    return None if whole is None else replace(first, rectangle=whole, size=first.size + second.size)


LINK_UNSUPPORTED = (errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)
"""Errors of link(2) that mean that it will never be had here; with EMLINK one file has all the names it can have."""


@dataclass(frozen=True)
class EarlierFile:
    """A shard file that this process has written, in a step that it saw committed."""

    file: ShardFile
    """As it was in that step."""
    step: int
    inode: int
    data: int
    """Bytes of tensors in it, whether they are still wanted or not."""

    def name_in(self, step: int) -> str:
        """Path within the directory of a step that has it, of its own or since then."""
        if step == self.step:
            return self.file.name
        path = PurePosixPath(self.file.name)
        return path.with_name(f"{path.stem}.step-{self.step}{path.suffix}").as_posix()

    def as_in(self, step: int) -> ShardFile:
        """What the manifest of a later step says of it."""
        return replace(self.file, name=self.name_in(step), written_at=self.step)


def record_written_file(directory: Path, file: ShardFile, step: int, data: int) -> EarlierFile:
    """A file that was just written. Raises OSError."""
    return EarlierFile(file, step, (directory / file.name).stat().st_ino, data)


def link_file(source: Path, target: Path, older: EarlierFile, base: int, step: int) -> None:
    """Give a file of the step `base`, whose directory is `source`, its name in `step`, whose directory is `target`.

    Its folder is there; it is not synchronised. Raises OSError, and CheckpointError for a file that is no longer the
    one that was written: then the name is not there, as far as it could be taken away.
    """
    of, to = source / older.name_in(base), target / older.name_in(step)
    try:
        os.link(of, to)
        os.link(digest_table_path(of), digest_table_path(to))
        found = to.stat()
        if (found.st_ino, found.st_size) != (older.inode, older.file.bytes):
            raise CheckpointError(f"{of} is not the file that was written there")
        read_digest_table(target, older.as_in(step))
    except (OSError, CheckpointError):
        for name in (to, digest_table_path(to)):
            with suppress(OSError):
                name.unlink()
        raise


RunKey = tuple[str, tuple[int, ...], torch.dtype, Rectangle]
"""A run by its tensor's name, shape and dtype, and its rectangle."""


@dataclass(frozen=True)
class StoredRun:
    """Where the bytes of a run are on the disk."""

    digest: bytes
    file: EarlierFile
    place: int
    """Byte of the file."""
    number: int
    """Of its dataset; see Within."""
    of: Rectangle
    """All of the dataset."""


@dataclass(frozen=True)
class BaseStep:
    """What a writer has in the last step that it saw committed."""

    path: Path
    step: int
    runs: dict[RunKey, StoredRun]
    finite: bool = False
    """Neither NaN nor infinity was in any of it."""


@dataclass(frozen=True)
class StepDelta:
    """One writer's step, compared with a base."""

    step: int
    held: FileLayout
    """As it is staged."""
    runs: Sequence[RowRun]
    digests: Sequence[bytes]
    stays: dict[int, StoredRun]
    """Runs, by index, that are as they were, and where they stay."""
    moves: frozenset[int] = frozenset()
    """Others that are as they were, and are written anew all the same: their files are not worth keeping."""

    @property
    def files(self) -> list[EarlierFile]:
        """Those that are shared."""
        return list(dict.fromkeys(known.file for known in self.stays.values()))

    @property
    def is_whole(self) -> bool:
        """Nothing is shared, and all is written as one file."""
        return not self.stays and len(self.groups()) < 2

    @property
    def changed(self) -> list[int]:
        """Runs that are not as they were."""
        return [index for index in range(len(self.runs)) if index not in self.stays and index not in self.moves]

    def groups(self) -> list[list[int]]:
        """Runs that are written, in a file for each group: what changes goes apart from what does not."""
        return [group for group in (self.changed, sorted(self.moves)) if group]

    def without(self, file: EarlierFile) -> StepDelta:
        """The same without sharing a file."""
        stays = {index: known for index, known in self.stays.items() if known.file != file}
        return replace(self, stays=stays, moves=self.moves | (self.stays.keys() - stays.keys()))

    def merged(self, group: Sequence[int]) -> list[tuple[RowRun, list[RowRun]]]:
        """A group of runs in as few rectangles as there can be, in the order of memory."""
        return merge_runs([self.runs[index] for index in group])

    def row(self, run: RowRun) -> DatasetRow:
        """What a run is in a file of its own."""
        return replace(self.held.rows[run.row], offset=run.rectangle.offset, local_shape=run.rectangle.shape)

    def rows(self, group: Sequence[int]) -> tuple[DatasetRow, ...]:
        """Of a file that has these runs."""
        return tuple(self.row(run) for run, _ in self.merged(group))

    def key(self, run: RowRun) -> RunKey:
        """What it is known by from step to step."""
        row = self.held.rows[run.row]
        return row.name, row.shape, row.dtype, run.rectangle

    def held_of(self, file: EarlierFile) -> FileLayout:
        """What this step has in a file that is shared."""
        here = [(known, self.runs[index]) for index, known in self.stays.items() if known.file == file]
        here.sort(key=lambda it: it[0].place)
        rows, places, within = [], [], []
        for (_, number), of_dataset in groupby(here, key=lambda it: (it[1].row, it[0].number)):
            found = list(of_dataset)
            dataset = found[0][0].of
            for run, _ in merge_runs([replace(run, begin=known.place) for known, run in found]):
                rows.append(self.row(run))
                places.append(run.begin)
                within.append(EnclosingDataset(number, dataset.shape, run.rectangle.start_in(dataset)))
        return FileLayout(tuple(rows), tuple(places), tuple(within))


@dataclass(frozen=True)
class StoredStep:
    """One writer's step as it lies in its directory."""

    files: tuple[tuple[ShardFile, FileLayout], ...]
    """Its own and those that are shared, with what each holds of the step."""
    runs: dict[RunKey, StoredRun]


@dataclass
class DeltaCache:
    """What is worth keeping from save to save: mostly the same tensors change."""

    buffers: GatherBuffers = field(default_factory=GatherBuffers)
    _images: dict[tuple[DatasetRow, ...], ShardImage] = field(default_factory=dict)

    def image(self, rows: tuple[DatasetRow, ...]) -> ShardImage:
        """Of a file with these rows. Raises as `image.make_image`."""
        if rows not in self._images:
            self._images = dict(list(self._images.items())[-1:])
            self._images[rows] = make_image(rows)
        return self._images[rows]


def write_delta(
    delta: StepDelta, directory: Path, name: str, staged: StagedShard, how: WritePolicy, shop: DeltaCache
) -> StoredStep:
    """Write what is new, on the disk when this returns; what is shared has its names there.

    name: path, within the directory of the step, of the file of what has changed. Raises as `write_shard`.
    """
    runs = {delta.key(delta.runs[index]): known for index, known in delta.stays.items()}
    files = [(older.as_in(delta.step), delta.held_of(older)) for older in delta.files]
    if delta.is_whole:
        file, held = write_shard(directory, name, staged, how)
        older = record_written_file(directory, file, delta.step, sum(row.bytes for row in held.rows))
        return StoredStep(((file, held),), runs | _runs_in_whole_file(delta, older))
    for group, its_name in zip(delta.groups(), (name, unchanged_file_name(name)), strict=False):
        file, held = _write_runs(delta, group, directory / its_name, staged, how, shop)
        file = replace(file, name=its_name)
        older = record_written_file(directory, file, delta.step, sum(row.bytes for row in held.rows))
        files.append((file, held))
        runs |= _runs_in_parts(delta, group, older, held)
    return StoredStep(tuple(files), runs)


def unchanged_file_name(name: str) -> str:
    """Of the file of what has not changed, beside that of what has."""
    path = PurePosixPath(name)
    return path.with_name(f"{path.stem}.unchanging{path.suffix}").as_posix()


def _write_runs(
    delta: StepDelta, group: Sequence[int], path: Path, staged: StagedShard, how: WritePolicy, shop: DeltaCache
) -> tuple[ShardFile, FileLayout]:
    """A file of some runs."""
    assert isinstance(staged.image, memoryview)
    rows, spans = delta.rows(group), [(run.begin, run.size) for run, _ in delta.merged(group)]
    image = shop.image(rows)
    if staged.level:
        begins = [begin for begin, _ in spans]
        return write_compressed_shard(
            path.parent, path.name, staged, make_file_layout(rows, image), begins, image.size, how
        )
    source = GatherSource(list_extents(staged.image, image, spans), image, shop.buffers)
    digests = write_stream(path, WriteStream(source.read, image.size), how)
    held = make_file_layout(rows, image)
    return write_digest_table(path.parent, path.name, image.size, digests, held), held


def _runs_in_whole_file(delta: StepDelta, older: EarlierFile) -> dict[RunKey, StoredRun]:
    """Of the staged image itself."""
    rows = delta.held.rows
    numbers = count_earlier_occurrences(row.name for row in rows)
    datasets = [Rectangle(row.offset, row.local_shape) for row in rows]
    return {
        delta.key(run): StoredRun(digest, older, run.begin, numbers[run.row], datasets[run.row])
        for run, digest in zip(delta.runs, delta.digests, strict=True)
    }


def _runs_in_parts(
    delta: StepDelta, group: Sequence[int], older: EarlierFile, held: FileLayout
) -> dict[RunKey, StoredRun]:
    """Of a file of some runs."""
    digests = dict(zip((delta.key(delta.runs[index]) for index in group), _select(delta.digests, group), strict=True))
    numbers = count_earlier_occurrences(row.name for row in held.rows)
    found = {}
    for (whole, parts), place, number in zip(delta.merged(group), held.places, numbers, strict=True):
        for run in parts:
            key = delta.key(run)
            found[key] = StoredRun(digests[key], older, place + run.begin - whole.begin, number, whole.rectangle)
    return found


def _select(values: Sequence[bytes], indices: Sequence[int]) -> Iterator[bytes]:
    return (values[index] for index in indices)


@dataclass(frozen=True)
class SharingLimits:
    """What is worth sharing."""

    files: int = 4
    """Of earlier steps, that a writer shares at most."""
    live: float = 0.5
    """Part of a file that must still be wanted."""
    least: int = 1 << 20
    """Bytes that must: for less a file is not worth its names."""
    run: int = RUN_BYTES
    """Bytes of a run, about."""


@dataclass
class StepChanges:
    """One writer's part of one save: what of it is new, and once it is written, where all of it is."""

    delta: StepDelta
    base: BaseStep | None
    size: int
    """Bytes that will be written."""
    shop: DeltaCache
    warning: str | None = None
    """Why something is written anew that could have been shared."""
    refused: bool = False
    """The file system has no such links."""
    stored: StoredStep | None = None
    finite: bool = False

    def is_finite(self, staged: StagedShard) -> bool:
        """As `Staged.is_finite`, with no look at tensors that are as they were when there was none."""
        if isinstance(staged.image, memoryview) and self.base is not None and self.base.finite:
            rows = sorted({self.delta.runs[index].row for index in self.delta.changed})
            held = staged.held
            new = FileLayout(tuple(held.rows[row] for row in rows), tuple(held.places[row] for row in rows))
            self.finite = are_spans_finite(staged.image, find_float_spans(staged.image, new))
        else:
            self.finite = staged.is_finite()
        return self.finite

    def write(
        self, directory: Path, name: str, staged: StagedShard, how: WritePolicy
    ) -> tuple[tuple[ShardFile, FileLayout], ...]:
        """Link and write; see `delta.store`. What cannot be linked is written."""
        delta = self.delta
        for older in delta.files:
            if self.refused or not self._is_linked(directory, older):
                delta = delta.without(older)
        if self.refused:
            delta = StepDelta(delta.step, delta.held, delta.runs, delta.digests, {})
        self.stored = write_delta(delta, directory, name, staged, how, self.shop)
        return self.stored.files

    def _is_linked(self, directory: Path, older: EarlierFile) -> bool:
        assert self.base is not None
        try:
            link_file(self.base.path, directory, older, self.base.step, self.delta.step)
        except (OSError, CheckpointError) as error:
            self.refused = isinstance(error, OSError) and error.errno in LINK_UNSUPPORTED
            why = str(error.strerror) if isinstance(error, OSError) else format_error(error)
            kind = "saves are whole ones" if self.refused else "what it has is written anew"
            self.warning = f"checkpoint.incremental: a file of step {older.step} cannot be shared ({why}); {kind}"
            return False
        return True


@dataclass
class IncrementalWriter:
    """One writer's memory of what it has on the disk."""

    limits: SharingLimits = SharingLimits()
    whole_every: int = 0
    """Of so many saves one shares nothing; 0: the first one only."""
    _base: BaseStep | None = None
    _since: int = 0
    """Saves that were committed after the last that was to be whole; the same on every rank that writes."""
    _shop: DeltaCache = field(default_factory=DeltaCache)
    _refused: bool = False

    def compare(self, staged: StagedShard, step: int) -> StepChanges | None:
        """What of a shard is new; None where there is no use in knowing, as nothing can be shared here.

        Raises as `image.make_image`.
        """
        if self._refused:
            return None
        assert isinstance(staged.image, memoryview)
        if self._base is not None and step <= self._base.step:
            self._base = None  # training went back: names of files would no longer tell them apart
        runs = split_runs(staged.held, self.limits.run)
        delta = StepDelta(step, staged.held, runs, digest_runs(staged.image, runs), {})
        base = None if 0 < self.whole_every <= self._since + 1 else self._base
        if base is not None:
            delta = self._shared(delta, base)
        size = staged.size if delta.is_whole else sum(self._shop.image(delta.rows(it)).size for it in delta.groups())
        return StepChanges(delta, base, size, self._shop)

    def adopt(self, changes: StepChanges, path: Path) -> None:
        """The step that they were written with is committed, and lies in this directory."""
        self._since = 0 if changes.base is None else self._since + 1
        if changes.stored is not None:
            self._base = BaseStep(path, changes.delta.step, changes.stored.runs, changes.finite)
        self._refused |= changes.refused
        if self._refused:
            self._base = None

    def _shared(self, delta: StepDelta, base: BaseStep) -> StepDelta:
        known = ((index, base.runs.get(delta.key(run))) for index, run in enumerate(delta.runs))
        same = {index: it for index, it in known if it is not None and it.digest == delta.digests[index]}
        live: Counter[EarlierFile] = Counter()
        for index, it in same.items():
            live[it.file] += delta.runs[index].size
        kept = set(self._worth(live))
        stays = {index: it for index, it in same.items() if it.file in kept}
        moves = same.keys() - stays.keys()
        few = sum(delta.runs[index].size for index in moves) < self.limits.least
        return StepDelta(delta.step, delta.held, delta.runs, delta.digests, stays, frozenset(() if few else moves))

    def _worth(self, live: Counter[EarlierFile]) -> list[EarlierFile]:
        """The files to share; live: bytes of each that are still wanted."""
        limits = self.limits
        worth = [it for it, size in live.items() if size >= max(limits.least, limits.live * it.data)]
        return sorted(worth, key=lambda it: live[it], reverse=True)[: limits.files]
