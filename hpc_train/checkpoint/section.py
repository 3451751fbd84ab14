"""The structure of a file that several ranks write: all of it first, then a section for the data of each of them.

Where a rank's tensors lie in its section follows from its own rows alone. So a rank copies them to their places without
a word to the others, and hears where its section begins once it writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from h5py import h5d, h5s

from hpc_train.checkpoint.digests import BLOCK
from hpc_train.checkpoint.image import ALIGNMENT, Image, Row, Writer, dataset_names, nameless, open_hdf5

_Named = tuple[str, Row]


@dataclass(frozen=True)
class Head:
    """Where every section of a file is, and what is before the first."""

    content: bytes
    """HDF5's own, whole blocks: from the beginning of the file to the first section."""
    begins: tuple[int, ...]
    """Byte of the file at which each rank's section begins; 0 for one without data."""
    places: tuple[tuple[int, ...], ...]
    """Of every rank: byte of its section at which the data of each row begins; 0 for one without elements."""
    size: int
    """Bytes of the file: whole blocks."""


def make_section(rows: Sequence[Row]) -> Image:
    """A rank's data as it lies in the file, in whole blocks, with zeros where there is none. Errors as make_image."""
    (places,) = make_head([rows], BLOCK).places
    data = sorted((place, place + row.bytes) for row, place in zip(rows, places, strict=True) if row.bytes)
    end = section_bytes(rows, places)
    gaps = zip([0, *(stop for _, stop in data)], [*(begin for begin, _ in data), end], strict=True)
    return Image(end, places, tuple((begin, bytes(stop - begin)) for begin, stop in gaps if stop > begin))


def section_bytes(rows: Sequence[Row], places: Sequence[int]) -> int:
    """Of a section: whole blocks, so that none of them is two ranks'."""
    end = max((place + row.bytes for row, place in zip(rows, places, strict=True) if row.bytes), default=0)
    return -(-end // BLOCK) * BLOCK


def make_head(members: Sequence[Sequence[Row]], interval: int) -> Head:
    """The file of ranks with these rows. interval: every section begins at a multiple of it, and it is one of BLOCK.

    Raises CheckpointError for a dtype that HDF5 does not have, OSError where there is no room for a small file.
    """
    assert interval % BLOCK == 0, interval
    with nameless(lambda path: _head(path, members, interval)) as (head, _):
        return head


def _head(path: Path, members: Sequence[Sequence[Row]], interval: int) -> Head:
    """First everything but the data, then one rank's data after the other's: HDF5 goes on at the end of the file."""
    named = _create(path, members)
    found = [_allocate(path, of_rank, interval) for of_rank in named]
    begins, places = tuple(begin for begin, _ in found), tuple(of_rank for _, of_rank in found)
    with path.open("rb") as file:
        content = file.read(min(filter(None, begins), default=-1))
    content = content.ljust(-(-len(content) // BLOCK) * BLOCK, b"\0")
    assert not any(begins) or len(content) == min(filter(None, begins)), (len(content), begins)
    ends = [begin + section_bytes(rows, at) for begin, rows, at in zip(begins, members, places, strict=True)]
    return Head(content, begins, places, max(len(content), *ends))


def _create(path: Path, members: Sequence[Sequence[Row]]) -> list[list[_Named]]:
    """Datasets that have no place yet."""
    names = iter(dataset_names(row.name for rows in members for row in rows))
    named = [[(next(names), row) for row in rows] for rows in members]
    with open_hdf5(path, "w") as file:
        writer = Writer(file, late=True)
        for of_rank in named:
            for name, row in of_rank:
                writer.create(name, row)
    return named


def _allocate(path: Path, named: Sequence[_Named], interval: int) -> tuple[int, tuple[int, ...]]:
    """(begin of a section, place of every row in it).

    HDF5 forgets what it had left over when a file is closed, and so gives no rank's data a place among another's. The
    largest is given its place first, as nothing else decides where the section begins.
    """
    largest = max(range(len(named)), key=lambda index: named[index][1].bytes, default=None)
    if largest is None or not named[largest][1].bytes:
        return 0, (0,) * len(named)
    with open_hdf5(path, "r+", min(ALIGNMENT, named[largest][1].bytes), interval) as file:
        begin = _place(file, named[largest])
    with open_hdf5(path, "r+") as file:
        rest = [begin if index == largest else _place(file, it) for index, it in enumerate(named)]
    assert begin % interval == 0, (begin, interval)
    assert all(place >= begin for place, (_, row) in zip(rest, named, strict=True) if row.bytes), (begin, rest)
    return begin, tuple(max(place - begin, 0) for place in rest)


def _place(file: Any, named: _Named) -> int:
    """Write one element, upon which HDF5 finds room for all; 0 where there is none to write."""
    name, row = named
    if not row.bytes:
        return 0
    dataset = h5d.open(file.id, name.encode())
    all_of, element = dataset.get_space(), (1,) * len(row.local_shape)
    if element:
        all_of.select_hyperslab((0,) * len(element), element)
    one = h5s.create_simple(element) if element else h5s.create(h5s.SCALAR)
    dataset.write(one, all_of, np.zeros(element, dtype=f"V{row.dtype.itemsize}"), dataset.get_type())
    place: int = dataset.get_offset()
    return place
