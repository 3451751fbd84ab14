"""A shard file whose bytes come in any order: hashed and written a block at a time, as soon as a block is whole."""

from __future__ import annotations

import os
from bisect import bisect_right
from pathlib import Path

from hpc_train.checkpoint.digests import BLOCK, blocks, digest_blocks, to_bytes
from hpc_train.checkpoint.files import checksum_of, write_at, write_file
from hpc_train.checkpoint.image import Image
from hpc_train.checkpoint.manifest import ShardFile
from hpc_train.checkpoint.shard import beside


class BlockWriter:
    """Holds the blocks that are begun and not whole; those are few if the bytes come about in their order."""

    def __init__(self, directory: Path, name: str, image: Image) -> None:
        """A new file, as long as it will be. Raises OSError."""
        self._path, self._name, self._image = directory / name, name, image
        self._begins = [begin for begin, _ in image.structure]
        self._begun: dict[int, tuple[bytearray, int]] = {}
        self._digests: dict[int, int] = {}
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        os.truncate(self._file, image.size)

    def put(self, place: int, data: memoryview) -> None:
        """Bytes of a tensor; each byte of the file comes once, here or with the structure."""
        at = 0
        while at < len(data):
            block, inside = divmod(place + at, BLOCK)
            whole = (len(data) - at) // BLOCK * BLOCK
            size = whole if whole and not inside else min(BLOCK - inside, len(data) - at)
            if size >= BLOCK:
                self._store(block, data[at : at + size])
            else:
                self._add(block, inside, data[at : at + size])
            at += size

    def close(self, seal: bytes) -> ShardFile:
        """Complete and fsync the file, and write its digests beside it. Raises OSError.

        seal: of the file's contents (see Held).
        """
        for block in range(blocks(self._image.size)):
            if block not in self._digests:
                self._add(block, 0, memoryview(b""))
        assert not self._begun, "bytes of a tensor are missing"
        os.fsync(self._file)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
        self.abandon()
        digests = [self._digests[block] for block in range(len(self._digests))]
        table = to_bytes(self._image.size, digests, seal)
        write_file(beside(self._path), table)
        return ShardFile(self._name, self._image.size, checksum_of(table))

    def abandon(self) -> None:
        """Close the file as it is."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _add(self, block: int, inside: int, data: memoryview) -> None:
        content, missing = self._begun.pop(block) if block in self._begun else self._begin(block)
        content[inside : inside + len(data)] = data
        missing -= len(data)
        if missing:
            self._begun[block] = content, missing
        else:
            self._store(block, memoryview(content))

    def _begin(self, block: int) -> tuple[bytearray, int]:
        """(a block with its part of the structure, the number of its bytes that are still to come)."""
        begin = block * BLOCK
        end = min(begin + BLOCK, self._image.size)
        content = bytearray(end - begin)
        missing = end - begin
        for index in range(max(0, bisect_right(self._begins, begin) - 1), len(self._begins)):
            at, text = self._image.structure[index]
            if at >= end:
                break
            part = text[max(0, begin - at) : end - at]
            to = max(at, begin) - begin
            content[to : to + len(part)] = part
            missing -= len(part)
        return content, missing

    def _store(self, first: int, data: memoryview) -> None:
        self._digests.update(enumerate(digest_blocks(data), first))
        write_at(self._file, data, first * BLOCK)
