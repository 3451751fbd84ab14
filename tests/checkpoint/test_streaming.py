"""A file that is written while what comes next is made ready: every byte in its place, or an error and no more work."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import replace
from mmap import mmap
from pathlib import Path

import numpy as np
import pytest
from faults import at_all, at_call, fails

from hpc_train.checkpoint.format.block_digests import BLOCK_BYTES, digest_blocks
from hpc_train.checkpoint.format.hdf5_layout import ALIGNMENT
from hpc_train.checkpoint.save.file_writer import WriteStream, write_file_part, write_stream
from hpc_train.checkpoint.storage.file_system import DEFAULT_POLICY

SIZE = 37 * BLOCK_BYTES + 4321
SMALL = replace(DEFAULT_POLICY, write_bytes=4 * BLOCK_BYTES)
PIECES = 3 + 9
"""The first chunk is written in parts."""


class Content:
    """Random bytes in whole pages, and what was asked of them."""

    def __init__(self) -> None:
        self._pages = mmap(-1, -(-SIZE // ALIGNMENT) * ALIGNMENT)
        self._pages.write(np.random.default_rng(0).bytes(SIZE))
        self._buffers = threading.local()
        self.asked: list[tuple[int, int]] = []

    @property
    def bytes(self) -> bytes:
        return self._pages[:SIZE]

    def stays(self, begin: int, end: int) -> memoryview:
        self.asked.append((begin, end))
        return memoryview(self._pages)[begin:end]

    def until_asked_again(self, begin: int, end: int) -> memoryview:
        """One buffer a thread."""
        self.asked.append((begin, end))
        buffer = self._buffers.__dict__.setdefault("pages", mmap(-1, SMALL.write_bytes))
        buffer[: end - begin] = self._pages[begin:end]
        return memoryview(buffer)[: end - begin]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("stays", [True, False])
def test_every_byte_is_in_its_place(tmp_path: Path, stays: bool, direct: bool) -> None:
    content = Content()
    source = content.stays if stays else content.until_asked_again
    digests = write_stream(tmp_path / "file", WriteStream(source, SIZE, stays), replace(SMALL, direct=direct))
    assert (tmp_path / "file").read_bytes() == content.bytes
    assert digests == digest_blocks(memoryview(content.bytes))
    assert len(content.asked) == PIECES
    if stays:
        assert content.asked == sorted(content.asked)


@pytest.mark.parametrize("stays", [True, False])
def test_a_part_of_a_file_is_all_that_is_touched(tmp_path: Path, stays: bool) -> None:
    content, size = Content(), 37 * BLOCK_BYTES
    (tmp_path / "file").write_bytes(b"x" * (40 * BLOCK_BYTES))
    source = content.stays if stays else content.until_asked_again
    digests = write_file_part(tmp_path / "file", 2 * BLOCK_BYTES, WriteStream(source, size, stays), SMALL)
    written = b"x" * (2 * BLOCK_BYTES) + content.bytes[:size] + b"x" * BLOCK_BYTES
    assert (tmp_path / "file").read_bytes() == written
    assert digests == digest_blocks(memoryview(content.bytes)[:size])


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize("number", range(1, PIECES + 1))
def test_any_write_that_fails_is_an_error(tmp_path: Path, number: int, stays: bool) -> None:
    content = Content()
    source = content.stays if stays else content.until_asked_again
    with at_call(number, fails(errno.EIO), ("pwrite",)) as made, pytest.raises(OSError, match="Input/output error"):
        write_stream(tmp_path / "file", WriteStream(source, SIZE, stays), SMALL)
    assert len(made) >= number


def test_after_an_error_nothing_more_is_asked_for(tmp_path: Path) -> None:
    """But for what may be ahead of the disk."""
    content = Content()
    with at_call(1, fails(errno.ENOSPC), ("pwrite",), lasting=True), pytest.raises(OSError, match="No space"):
        write_stream(tmp_path / "file", WriteStream(content.stays, SIZE, True), SMALL)
    assert len(content.asked) <= 6


def test_what_cannot_be_read_is_an_error_and_ends_the_writes(tmp_path: Path) -> None:
    content = Content()

    def source(begin: int, end: int) -> memoryview:
        if len(content.asked) == 7:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return content.stays(begin, end)

    before = threading.active_count()
    with pytest.raises(OSError, match="Input/output error"):
        write_stream(tmp_path / "file", WriteStream(source, SIZE, True), SMALL)
    assert threading.active_count() == before


@pytest.mark.parametrize("number", [1, 5])
def test_a_direct_write_that_is_refused_begins_again_through_the_page_cache(tmp_path: Path, number: int) -> None:
    content = Content()
    told: list[list[int]] = []
    with at_call(number, fails(errno.EINVAL), ("pwrite",)):
        digests = write_stream(tmp_path / "file", WriteStream(content.stays, SIZE, True, on_digests=told.append), SMALL)
    assert (tmp_path / "file").read_bytes() == content.bytes
    assert digests == digest_blocks(memoryview(content.bytes))
    assert told
    assert all(it == digests for it in told)


def test_nothing_is_written_where_there_is_no_room_for_all(tmp_path: Path) -> None:
    content = Content()
    calls = ("posix_fallocate", "pwrite")
    with at_call(1, fails(errno.ENOSPC), calls, tmp_path) as made, pytest.raises(OSError, match="No space"):
        write_stream(tmp_path / "file", WriteStream(content.stays, SIZE, True), SMALL)
    assert made == ["posix_fallocate"]


def test_all_digests_are_known_before_the_last_write_has_ended(tmp_path: Path) -> None:
    content, known = Content(), threading.Event()
    told: list[list[int]] = []

    def note(digests: list[int]) -> None:
        told.append(list(digests))
        known.set()

    def wait(call: str, args: tuple[object, ...]) -> None:
        # The last piece, not the last call: while an early piece is held, no more are read than fit between.
        if args[2] == content.asked[-1][0] and len(content.asked) == PIECES:
            assert known.wait(60)

    with at_all(("pwrite",), wait):
        digests = write_stream(tmp_path / "file", WriteStream(content.stays, SIZE, True, on_digests=note), SMALL)
    assert told == [digests]
    assert (tmp_path / "file").read_bytes() == content.bytes
