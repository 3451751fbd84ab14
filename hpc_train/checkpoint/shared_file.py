"""A file that several ranks write, as the first of them sees it: its structure, and the digests of all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hpc_train.checkpoint.digests import BLOCK, Digests, blocks, digest_blocks
from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.files import opened, write_at
from hpc_train.checkpoint.holdings import Held
from hpc_train.checkpoint.image import dataset_names
from hpc_train.checkpoint.manifest import ShardFile
from hpc_train.checkpoint.section import Head, make_head, section_bytes
from hpc_train.checkpoint.shard import write_table
from hpc_train.checkpoint.storage.policy import Behaviour
from hpc_train.checkpoint.stream import reserve

_WORTH = 4
"""Writes that a section takes, on average, where each begins at a stripe."""


class Spot(NamedTuple):
    """A rank's part of the file."""

    begin: int
    """Of its section."""
    names: tuple[str, ...]
    """Of its datasets."""
    shared: bool
    """There is a file: some rank has data."""


@dataclass
class SharedFile:
    """Its layout is kept from save to save, and made anew when a rank has another one."""

    held: list[Held] = field(default_factory=list)
    """By every rank; the bytes are those of its section."""
    _interval: int = BLOCK
    _head: Head | None = None

    def lay(self, path: Path, news: Sequence[Held | None], how: Behaviour) -> list[Spot]:
        """Make the file with all but its sections, unless nobody has any; where each rank writes.

        news: what every rank has, None where that is what it had. The file is on the disk, its name is not.
        Raises OSError, and CheckpointError as make_head does.
        """
        held = [old if new is None else new for new, old in zip(news, self.held or news, strict=True)]
        assert all(it is not None for it in held), "a rank has told nothing yet"
        self._lay_out([it for it in held if it is not None], how)
        assert self._head is not None
        if self._rows:
            with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
                reserve(file, self._head.size) if how.reserve else os.ftruncate(file, self._head.size)
                write_at(file, memoryview(self._head.content), 0)
                os.fsync(file)
        names = iter(dataset_names(self._rows))
        spots = zip(self._head.begins, self.held, strict=True)
        return [Spot(begin, tuple(next(names) for _ in it.rows), bool(self._rows)) for begin, it in spots]

    def settle(self, path: Path) -> None:
        """After HDF5 had it open, which cuts a file where its last dataset ends. Raises OSError, CheckpointError."""
        if not self._rows:
            return
        assert self._head is not None
        with opened(path, os.O_RDWR) as file:
            os.ftruncate(file, self._head.size)
            os.fsync(file)
            if os.pread(file, len(self._head.content), 0) != self._head.content:
                raise CheckpointError("HDF5 changed the structure of a file while the data was written")

    def end(self, directory: Path, name: str, found: Sequence[Sequence[int]]) -> tuple[tuple[ShardFile, Held], ...]:
        """Write the table of digests. found: those of every rank's section. Nothing where there is no file."""
        if not self._rows:
            return ()
        assert self._head is not None
        places = [
            begin + place if row.bytes else 0
            for begin, it in zip(self._head.begins, self.held, strict=True)
            for row, place in zip(it.rows, it.places, strict=True)
        ]
        held = Held(tuple(row for it in self.held for row in it.rows), tuple(places))
        return ((write_table(directory, name, self._head.size, self._table(found).tolist(), held), held),)

    @property
    def _rows(self) -> list[str]:
        """Names of tensors, of all ranks."""
        return [row.name for it in self.held for row in it.rows]

    def _lay_out(self, held: list[Held], how: Behaviour) -> None:
        interval = _interval(held, how)
        if self._head is None or (held, interval) != (self.held, self._interval):
            self._head = None
            self.held, self._interval = held, interval
            self._head = make_head([it.rows for it in held], interval)
        assert self._head.places == tuple(it.places for it in held), "a section is not as its own rank laid it out"

    def _table(self, found: Sequence[Sequence[int]]) -> Digests:
        """What no rank writes, from one section to where the next begins, is zeros."""
        assert self._head is not None
        (zeros,) = digest_blocks(memoryview(bytes(BLOCK)))
        table = np.full(blocks(self._head.size), zeros, dtype=np.uint64)
        sections = zip((0, *self._head.begins), (digest_blocks(memoryview(self._head.content)), *found), strict=True)
        for begin, digests in sections:
            table[begin // BLOCK : begin // BLOCK + len(digests)] = np.asarray(digests, dtype=np.uint64)
        return table


def _interval(held: Sequence[Held], how: Behaviour) -> int:
    """Sections begin at a stripe of the first OST where that is worth the bytes between them."""
    total = sum(section_bytes(it.rows, it.places) for it in held)
    worth = how.kind == "lustre" and total >= _WORTH * how.write_bytes * len(held)
    return how.write_bytes if worth else BLOCK
