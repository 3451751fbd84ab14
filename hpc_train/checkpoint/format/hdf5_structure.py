"""Walk the structure of an HDF5 file: its bytes, the messages of its headers, and the links of its root group.

Every read is bounded, and so is the sum of all reads, so that a damaged or hostile file ends in a CheckpointError. What
is read of the format is said in hdf5_parser.py, which reads datasets.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.format.block_digests import BLOCK_BYTES

UNDEFINED = (1 << 64) - 1
"""HDF5's address of what is not there."""
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_BLOCKS = 32
"""Blocks of the file to keep in memory."""
_LINK_INFO, _LINK, _CONTINUATION = 0x02, 0x06, 0x10
"""Types of the messages in an object's header (HDF5 File Format Specification 3.0, IV.A.2)."""
_MAX_MESSAGES = 256
"""Maximum number of messages of an object's header."""


class Hdf5File:
    """Bytes of a file; the most recently used blocks are kept."""

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        self._read, self.size = read, size
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._heap: tuple[int, dict[int, bytes]] = (-1, {})
        self._left = 1000 + size // 4
        """Reads that are left: a limit, so that a structure with loops ends in an error."""

    def read_bytes(self, begin: int, size: int) -> bytes:
        """Return `size` bytes from byte `begin`. Raises CheckpointError outside of the file."""
        self._left -= 1
        if not 0 <= begin <= self.size or not 0 <= size <= self.size - begin or self._left < 0:
            raise CheckpointError("its HDF5 structure points outside of the file")
        first, inside = divmod(begin, BLOCK_BYTES)
        if inside + size <= BLOCK_BYTES:
            return self._block(first)[inside : inside + size]
        last = (begin + size - 1) // BLOCK_BYTES
        return b"".join(map(self._block, range(first, last + 1)))[inside : inside + size]

    def make_cursor(self, begin: int, size: int, signature: bytes = b"") -> Cursor:
        """Return a cursor over these bytes, behind their signature. Raises CheckpointError if they begin otherwise."""
        cursor = Cursor(self.read_bytes(begin, size), begin)
        if cursor.take_bytes(len(signature)) != signature:
            raise CheckpointError(f"its HDF5 structure has no {signature!r} at byte {begin}")
        return cursor

    def read_string(self, address: int, index: int, length: int) -> str:
        """Return a string of variable length from a global heap."""
        text = self._texts(address).get(index, b"")
        if not len(text) >= length <= 64:
            raise CheckpointError("its HDF5 structure has a dtype without a name")
        return text[:length].decode("utf-8", "replace")

    def _texts(self, address: int) -> dict[int, bytes]:
        """Return the objects of a global heap, by their numbers; the last heap is kept."""
        if self._heap[0] != address:
            heap = self.make_cursor(address, 16, b"GCOL")
            heap.take_number(4)
            objects, contents = self.make_cursor(address + 16, heap.take_number(8) - 16), {}
            while objects.left >= 16:
                number, _, size = objects.take_number(2), objects.take_number(6), objects.take_number(8)
                if number == 0:
                    break
                contents[number] = objects.take_bytes(min(-(-size // 8) * 8, objects.left))[:size]
            self._heap = address, contents
        return self._heap[1]

    def _block(self, number: int) -> bytes:
        if number in self._blocks:
            self._blocks.move_to_end(number)
            return self._blocks[number]
        begin = number * BLOCK_BYTES
        data = self._blocks[number] = self._read(begin, min(begin + BLOCK_BYTES, self.size))
        if len(self._blocks) > _BLOCKS:
            self._blocks.popitem(last=False)
        return data


class Cursor:
    """Takes numbers from a part of the structure, one after the other. Raises CheckpointError at its end."""

    def __init__(self, data: bytes, begin: int = 0) -> None:
        """begin: byte of the file where the data begins."""
        self._data, self._at, self._begin = data, 0, begin

    @property
    def position(self) -> int:
        """Byte of the file where the next number begins."""
        return self._begin + self._at

    @property
    def left(self) -> int:
        """Bytes that are left."""
        return len(self._data) - self._at

    def take_bytes(self, size: int) -> bytes:
        if size > self.left:
            raise CheckpointError("its HDF5 structure ends too early")
        self._at += size
        return self._data[self._at - size : self._at]

    def take_number(self, size: int) -> int:
        """Take an unsigned number of `size` bytes."""
        return int.from_bytes(self.take_bytes(size), "little")

    def take_numbers(self, count: int, size: int) -> tuple[int, ...]:
        """Take `count` unsigned numbers of `size` bytes each."""
        data = self.take_bytes(count * size)
        return tuple(int.from_bytes(data[start : start + size], "little") for start in range(0, len(data), size))


def read_root(file: Hdf5File) -> int:
    """Return the address of the root group's header."""
    cursor = file.make_cursor(0, min(48, file.size), _SIGNATURE) if file.size >= 48 else Cursor(b"")
    version, offsets, lengths = cursor.take_numbers(3, 1)
    if version not in (2, 3) or (offsets, lengths) != (8, 8):
        raise CheckpointError("its HDF5 superblock is of another kind")
    cursor.take_number(1)
    base, _, _, root = cursor.take_numbers(4, 8)
    if base:
        raise CheckpointError("its HDF5 superblock is of another kind")
    return root


def read_messages(file: Hdf5File, address: int) -> Iterator[tuple[int, Cursor]]:
    """Yield (type, content) of every message of an object's header."""
    cursor = file.make_cursor(address, min(64, file.size - min(address, file.size)), b"OHDR")
    version, flags = cursor.take_numbers(2, 1)
    if version != 2:
        raise CheckpointError("its HDF5 structure has a header of another kind")
    # Optional fields: times (bit 5) and limits of attribute storage (bit 4). Bits 0 and 1 give the width of the size.
    skipped = 16 * bool(flags & 0x20) + 4 * bool(flags & 0x10)
    cursor.take_bytes(skipped)
    size = cursor.take_number(1 << (flags & 3))
    begin = address + 6 + skipped + (1 << (flags & 3))
    head, seen = 4 + 2 * bool(flags & 0x04), 0
    parts = [(begin, size, b"")]
    while parts:
        at, size, signature = parts.pop(0)
        cursor = file.make_cursor(at, size, signature)
        # A continuation block ends with a checksum of 4 bytes; the first part does not contain its checksum.
        while cursor.left >= head + 4 * bool(signature):
            kind, length = cursor.take_number(1), cursor.take_number(2)
            cursor.take_bytes(head - 3)
            content = Cursor(cursor.take_bytes(length), cursor.position - length)
            seen += 1
            if seen > _MAX_MESSAGES:
                raise CheckpointError("its HDF5 structure has a header without an end")
            if kind == _CONTINUATION:
                parts.append((content.take_number(8), content.take_number(8), b"OCHK"))
            else:
                yield kind, content


def read_links(file: Hdf5File, root: int) -> Iterator[tuple[str, int]]:
    """Yield (name, address of the header) of everything in the root group."""
    for kind, content in read_messages(file, root):
        if kind == _LINK:
            yield _read_link(content)
        elif kind == _LINK_INFO:
            _, flags = content.take_numbers(2, 1)
            content.take_bytes(8 * (flags & 1))
            heap, tree = content.take_numbers(2, 8)
            if heap != UNDEFINED:
                yield from _read_dense_links(file, heap, tree)


def _read_link(content: Cursor) -> tuple[str, int]:
    version, flags = content.take_numbers(2, 1)
    kind = content.take_number(1) if flags & 0x08 else 0
    content.take_bytes(8 * bool(flags & 0x04) + bool(flags & 0x10))
    name = content.take_bytes(content.take_number(1 << (flags & 3)))
    if version != 1 or kind:
        raise CheckpointError("its HDF5 structure has a link of another kind")
    return name.decode("utf-8", "surrogateescape"), content.take_number(8)


def _read_dense_links(file: Hdf5File, heap: int, tree: int) -> Iterator[tuple[str, int]]:
    of_heap = _FractalHeap(file, heap)
    for content in sorted(of_heap.find_object(record[4:]) for record in _read_records(file, tree)):
        yield _read_link(Cursor(file.read_bytes(*content)))


def _read_records(file: Hdf5File, address: int) -> Iterator[bytes]:
    """Yield the records of a version-2 B-tree of names, in no particular order."""
    header = file.make_cursor(address, 34, b"BTHD")
    version, kind = header.take_numbers(2, 1)
    node, record, depth = header.take_number(4), header.take_number(2), header.take_number(2)
    header.take_number(2)
    root, number = header.take_number(8), header.take_number(2)
    if version or kind != 5 or record != 11 or not 64 <= node <= BLOCK_BYTES or depth > 8:
        raise CheckpointError("its HDF5 structure has a tree of another kind")
    leaf = (node - 10) // record
    counts, most = _choose_width(leaf), [leaf]
    pointers = [0]  # bytes of a pointer to a node, for each depth
    for _ in range(depth):
        pointers.append(8 + counts + (_choose_width(most[-1]) if len(most) > 1 else 0))
        here = (node - 10 - pointers[-1]) // (record + pointers[-1])
        most.append((here + 1) * most[-1] + here)
    waiting = [(root, number, depth)] if number else []
    while waiting:
        address, number, depth = waiting.pop()
        cursor = file.make_cursor(
            address, min(node, file.size - min(address, file.size)), b"BTIN" if depth else b"BTLF"
        )
        cursor.take_number(2)
        for _ in range(number):
            yield cursor.take_bytes(record)
        for _ in range(number + 1 if depth else 0):
            waiting.append((cursor.take_number(8), cursor.take_number(counts), depth - 1))
            cursor.take_bytes(pointers[depth] - 8 - counts)


def _choose_width(most: int) -> int:
    """Return how many bytes store a count of at most `most`."""
    return (most.bit_length() - 1) // 8 + 1


class _FractalHeap:
    """A fractal heap: blocks of doubling sizes, addressed as one range of bytes."""

    def __init__(self, file: Hdf5File, address: int) -> None:
        header = file.make_cursor(address, 146, b"FRHP")
        version, _, filters, _ = (
            header.take_number(1),
            header.take_number(2),
            header.take_number(2),
            header.take_number(1),
        )
        objects = header.take_number(4)
        header.take_bytes(12 * 8)
        self._width, self._start, self._direct = header.take_number(2), header.take_number(8), header.take_number(8)
        bits, _ = header.take_number(2), header.take_number(2)
        self._file, self._root, self._rows = file, header.take_number(8), header.take_number(2)
        sizes_are_powers = all(size and not size & (size - 1) for size in (self._start, self._direct, self._width))
        if version or filters or not sizes_are_powers or self._start > self._direct or not 8 <= bits <= 64:
            raise CheckpointError("its HDF5 structure has a heap of another kind")
        self._of_offset = -(-bits // 8)
        lengths = (self._direct.bit_length() + 6) // 8, (objects.bit_length() + 6) // 8
        self._of_length = min(lengths)
        self._pages: dict[int, int] = {}

    def find_object(self, identifier: bytes) -> tuple[int, int]:
        """Return (byte of the file, bytes) of an object."""
        middle = 1 + self._of_offset
        if identifier[0] & 0x70 or middle + self._of_length > len(identifier):
            raise CheckpointError("its HDF5 structure has a name that is too long")
        offset = int.from_bytes(identifier[1:middle], "little")
        length = int.from_bytes(identifier[middle : middle + self._of_length], "little")
        page, inside = divmod(offset, self._start)
        if page not in self._pages:
            self._pages[page] = self._address(page * self._start)
        return self._pages[page] + inside, length

    def _address(self, offset: int) -> int:
        """Return the byte of the file for an offset in the heap."""
        if not self._rows:
            return self._root + offset
        block, rows = self._root, self._rows
        while True:
            row = self._row(offset)
            begin, size = self._begin(row), self._size(row)
            if row >= rows:
                raise CheckpointError("its HDF5 structure points outside of a heap")
            column, offset = divmod(offset - begin, size)
            head = 4 + 1 + 8 + self._of_offset
            cursor = self._file.make_cursor(block, head, b"FHIB")
            cursor = self._file.make_cursor(block + head + 8 * (row * self._width + column), 8)
            block = cursor.take_number(8)
            if size <= self._direct:
                return block + offset
            rows = (size // (self._start * self._width)).bit_length()

    def _row(self, offset: int) -> int:
        return (offset // (self._start * self._width)).bit_length()

    def _begin(self, row: int) -> int:
        return (self._start * self._width << row - 1) if row else 0

    def _size(self, row: int) -> int:
        """Return the size of a block in the row."""
        return self._start << max(0, row - 1)
