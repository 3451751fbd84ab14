"""The runs of a rank's shard in a step: which stay in files of earlier steps, and which are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import PurePosixPath

import torch

from hpc_train.checkpoint.format.hdf5_layout import DatasetRow
from hpc_train.checkpoint.format.manifest import ShardFile
from hpc_train.checkpoint.format.rectangle import Rectangle
from hpc_train.checkpoint.format.shard_layout import EnclosingDataset, FileLayout
from hpc_train.checkpoint.save.incremental.row_runs import RowRun, merge_runs


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
