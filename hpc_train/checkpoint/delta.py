"""What a step has that the one before has not, and what both have; and how either comes into the step's directory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path, PurePosixPath

import torch

from hpc_train.checkpoint.holdings import Held, Within, held_by
from hpc_train.checkpoint.image import Image, Row, make_image, occurrences
from hpc_train.checkpoint.links import Older, written
from hpc_train.checkpoint.manifest import ShardFile
from hpc_train.checkpoint.packing import Buffers, Packing, lying_in
from hpc_train.checkpoint.rectangle import Rectangle
from hpc_train.checkpoint.runs import Run, merged
from hpc_train.checkpoint.shard import Staged, compress_shard, write_shard, write_table
from hpc_train.checkpoint.storage.policy import Behaviour
from hpc_train.checkpoint.stream import Stream, write_stream

Key = tuple[str, tuple[int, ...], torch.dtype, Rectangle]
"""A run by its tensor's name, shape and dtype, and its rectangle."""


@dataclass(frozen=True)
class Known:
    """Where the bytes of a run are on the disk."""

    digest: bytes
    file: Older
    place: int
    """Byte of the file."""
    number: int
    """Of its dataset; see Within."""
    of: Rectangle
    """All of the dataset."""


@dataclass(frozen=True)
class Base:
    """What a writer has in the last step that it saw committed."""

    path: Path
    step: int
    runs: dict[Key, Known]
    finite: bool = False
    """Neither NaN nor infinity was in any of it."""


@dataclass(frozen=True)
class Delta:
    """One writer's step, compared with a base."""

    step: int
    held: Held
    """As it is staged."""
    runs: Sequence[Run]
    digests: Sequence[bytes]
    stays: dict[int, Known]
    """Runs, by index, that are as they were, and where they stay."""
    moves: frozenset[int] = frozenset()
    """Others that are as they were, and are written anew all the same: their files are not worth keeping."""

    @property
    def files(self) -> list[Older]:
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

    def without(self, file: Older) -> Delta:
        """The same without sharing a file."""
        stays = {index: known for index, known in self.stays.items() if known.file != file}
        return replace(self, stays=stays, moves=self.moves | (self.stays.keys() - stays.keys()))

    def merged(self, group: Sequence[int]) -> list[tuple[Run, list[Run]]]:
        """A group of runs in as few rectangles as there can be, in the order of memory."""
        return merged([self.runs[index] for index in group])

    def row(self, run: Run) -> Row:
        """What a run is in a file of its own."""
        return replace(self.held.rows[run.row], offset=run.rectangle.offset, local_shape=run.rectangle.shape)

    def rows(self, group: Sequence[int]) -> tuple[Row, ...]:
        """Of a file that has these runs."""
        return tuple(self.row(run) for run, _ in self.merged(group))

    def key(self, run: Run) -> Key:
        """What it is known by from step to step."""
        row = self.held.rows[run.row]
        return row.name, row.shape, row.dtype, run.rectangle

    def held_of(self, file: Older) -> Held:
        """What this step has in a file that is shared."""
        here = [(known, self.runs[index]) for index, known in self.stays.items() if known.file == file]
        here.sort(key=lambda it: it[0].place)
        rows, places, within = [], [], []
        for (_, number), of_dataset in groupby(here, key=lambda it: (it[1].row, it[0].number)):
            found = list(of_dataset)
            dataset = found[0][0].of
            for run, _ in merged([replace(run, begin=known.place) for known, run in found]):
                rows.append(self.row(run))
                places.append(run.begin)
                within.append(Within(number, dataset.shape, run.rectangle.start_in(dataset)))
        return Held(tuple(rows), tuple(places), tuple(within))


@dataclass(frozen=True)
class Stored:
    """One writer's step as it lies in its directory."""

    files: tuple[tuple[ShardFile, Held], ...]
    """Its own and those that are shared, with what each holds of the step."""
    runs: dict[Key, Known]


@dataclass
class Workshop:
    """What is worth keeping from save to save: mostly the same tensors change."""

    buffers: Buffers = field(default_factory=Buffers)
    _images: dict[tuple[Row, ...], Image] = field(default_factory=dict)

    def image(self, rows: tuple[Row, ...]) -> Image:
        """Of a file with these rows. Raises as `image.make_image`."""
        if rows not in self._images:
            self._images = dict(list(self._images.items())[-1:])
            self._images[rows] = make_image(rows)
        return self._images[rows]


def store(delta: Delta, directory: Path, name: str, staged: Staged, how: Behaviour, shop: Workshop) -> Stored:
    """Write what is new, on the disk when this returns; what is shared has its names there.

    name: path, within the directory of the step, of the file of what has changed. Raises as `write_shard`.
    """
    runs = {delta.key(delta.runs[index]): known for index, known in delta.stays.items()}
    files = [(older.as_in(delta.step), delta.held_of(older)) for older in delta.files]
    if delta.is_whole:
        file, held = write_shard(directory, name, staged, how)
        older = written(directory, file, delta.step, sum(row.bytes for row in held.rows))
        return Stored(((file, held),), runs | _in_whole(delta, older))
    for group, its_name in zip(delta.groups(), (name, unchanging(name)), strict=False):
        file, held = _write(delta, group, directory / its_name, staged, how, shop)
        file = replace(file, name=its_name)
        older = written(directory, file, delta.step, sum(row.bytes for row in held.rows))
        files.append((file, held))
        runs |= _in_parts(delta, group, older, held)
    return Stored(tuple(files), runs)


def unchanging(name: str) -> str:
    """Of the file of what has not changed, beside that of what has."""
    path = PurePosixPath(name)
    return path.with_name(f"{path.stem}.unchanging{path.suffix}").as_posix()


def _write(
    delta: Delta, group: Sequence[int], path: Path, staged: Staged, how: Behaviour, shop: Workshop
) -> tuple[ShardFile, Held]:
    """A file of some runs."""
    assert isinstance(staged.image, memoryview)
    rows, spans = delta.rows(group), [(run.begin, run.size) for run, _ in delta.merged(group)]
    image = shop.image(rows)
    if staged.level:
        begins = [begin for begin, _ in spans]
        return compress_shard(path.parent, path.name, staged, held_by(rows, image), begins, image.size, how)
    source = Packing(lying_in(staged.image, image, spans), image, shop.buffers)
    digests = write_stream(path, Stream(source.read, image.size), how)
    held = held_by(rows, image)
    return write_table(path.parent, path.name, image.size, digests, held), held


def _in_whole(delta: Delta, older: Older) -> dict[Key, Known]:
    """Of the staged image itself."""
    rows = delta.held.rows
    numbers = occurrences(row.name for row in rows)
    datasets = [Rectangle(row.offset, row.local_shape) for row in rows]
    return {
        delta.key(run): Known(digest, older, run.begin, numbers[run.row], datasets[run.row])
        for run, digest in zip(delta.runs, delta.digests, strict=True)
    }


def _in_parts(delta: Delta, group: Sequence[int], older: Older, held: Held) -> dict[Key, Known]:
    """Of a file of some runs."""
    digests = dict(zip((delta.key(delta.runs[index]) for index in group), _at(delta.digests, group), strict=True))
    numbers = occurrences(row.name for row in held.rows)
    found = {}
    for (whole, parts), place, number in zip(delta.merged(group), held.places, numbers, strict=True):
        for run in parts:
            key = delta.key(run)
            found[key] = Known(digests[key], older, place + run.begin - whole.begin, number, whole.rectangle)
    return found


def _at(values: Sequence[bytes], indices: Sequence[int]) -> Iterator[bytes]:
    return (values[index] for index in indices)
