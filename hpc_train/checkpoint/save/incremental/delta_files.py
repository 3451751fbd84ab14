"""Link the files that a step shares with earlier ones, and write the runs that are not shared."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.format.block_digests import find_digest_table
from hpc_train.checkpoint.format.hdf5_layout import DatasetRow, ShardImage, count_earlier_occurrences, make_image
from hpc_train.checkpoint.format.manifest import ShardFile
from hpc_train.checkpoint.format.rectangle import Rectangle
from hpc_train.checkpoint.format.shard_layout import FileLayout, make_file_layout
from hpc_train.checkpoint.load.verified_reader import read_digest_table
from hpc_train.checkpoint.save.file_writer import GatherBuffers, GatherSource, WriteStream, list_extents, write_stream
from hpc_train.checkpoint.save.incremental.step_delta import EarlierFile, RunKey, StepDelta, StoredRun
from hpc_train.checkpoint.save.shard_file import StagedShard, write_compressed_shard, write_digest_table, write_shard
from hpc_train.checkpoint.storage.file_system import WritePolicy


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


def record_written_file(directory: Path, file: ShardFile, step: int, data: int) -> EarlierFile:
    """Return a record of a file that was just written. Raises OSError."""
    return EarlierFile(file, step, (directory / file.name).stat().st_ino, data)


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
