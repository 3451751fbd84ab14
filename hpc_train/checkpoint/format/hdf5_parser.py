"""Find the datasets in one of our shard files without libhdf5: a file from elsewhere must not reach its C code.

It supports what our writer uses of the HDF5 file format (version 3.0 of the specification, The HDF Group), which is the
same in HDF5 1.10 to 2.0: superblock 2 and 3, object headers of version 2, links in the header of the root group or in a
fractal heap with a version-2 B-tree, contiguous data, and chunks in a fixed array or a single one. Anything else is an
error. Every read is bounded, and so is the sum of all reads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from operator import itemgetter

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.format.block_digests import BLOCK_BYTES

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_USUAL = b"OHDR\x02\x01"
"""First bytes of the usual object header: more than 255 bytes, without times; its size follows in two bytes."""
_UNDEFINED = (1 << 64) - 1
"""HDF5's address of what is not there."""
_BLOCKS = 32
"""Blocks of the file to keep in memory."""
_DATASPACE, _LINK_INFO, _DATATYPE, _LINK, _LAYOUT, _ATTRIBUTE, _CONTINUATION = 0x01, 0x02, 0x03, 0x06, 0x08, 0x0C, 0x10
"""Types of the messages in an object's header (HDF5 File Format Specification 3.0, IV.A.2)."""
_CONTIGUOUS, _CHUNKED = 1, 2
"""Classes of a layout message."""
_SINGLE_CHUNK, _FIXED_ARRAY = 1, 3
"""Types of the index by which a chunked layout finds its chunks."""
_MOST_MESSAGES = 256
"""Maximum number of messages of an object's header."""


@dataclass(frozen=True)
class ParsedChunk:
    """A chunk of a dataset as it is stored."""

    at: int
    """Byte of the file where it begins."""
    stored: int
    """Bytes in the file."""
    mask: int
    """Bit mask of the filters that it did not go through."""


@dataclass(frozen=True)
class ParsedDataset:
    """A dataset as the structure of the file describes it."""

    name: str
    dtype: str
    """Attribute torch_dtype."""
    itemsize: int
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    """Attribute offset: where its rectangle begins in the logical tensor."""
    global_shape: tuple[int, ...]
    """Attribute global_shape: shape of the logical tensor."""
    place: int | None
    """Byte of the file where its data begins; None if it has no data, or is in chunks."""
    chunk: tuple[int, ...] | None = None
    """Shape of its chunks."""
    chunks: tuple[ParsedChunk, ...] = ()
    """Chunks, in row-major order."""


def parse_datasets(read: Callable[[int, int], bytes], size: int) -> dict[str, ParsedDataset]:
    """Return every dataset of a file of `size` bytes, by its name.

    read: returns bytes [begin, end) of the file. Raises CheckpointError for a structure that our writer does not make,
    and whatever `read` raises.
    """
    file = _File(read, size)
    root = _read_root(file)
    found: dict[str, ParsedDataset] = {}
    headers = _HeaderCache(file)
    for name, address in sorted(
        _read_links(file, root), key=itemgetter(1)
    ):  # in the order of the file, which is read once
        if name in found:
            raise CheckpointError(f"its HDF5 structure has two datasets called {name[:100]!r}")
        found[name] = headers.dataset(name, address)
    return found


class _HeaderCache:
    """Cache of headers that differ only in where the data and the name of the dtype lie, as those of most datasets do.

    So thousands of similar headers are parsed once.
    """

    def __init__(self, file: _File) -> None:
        self._file = file
        self._spots: dict[int, tuple[int, int]] = {}
        self._read: dict[bytes, ParsedDataset] = {}

    def dataset(self, name: str, address: int) -> ParsedDataset:
        head = self._file.take(address, min(8, self._file.size - min(address, self._file.size)))
        size = 12 + int.from_bytes(head[6:8], "little")
        spots = self._spots.get(size)
        if spots is None or head[:6] != _USUAL:
            return self._learn(name, address, size if head[:6] == _USUAL else 0)
        data = self._file.take(address, size)
        like = self._read.get(_without(data, *spots))
        if like is None:
            return self._learn(name, address, size)
        place, heap = (int.from_bytes(data[at : at + 8], "little") for at in (spots[0], spots[1] + 4))
        dtype = self._file.text(
            heap, *(int.from_bytes(data[at : at + 4], "little") for at in (spots[1] + 12, spots[1]))
        )
        found = ParsedDataset.__new__(ParsedDataset)  # like `replace`, which would take longer than all else here
        found.__dict__.update(like.__dict__)
        found.__dict__.update(name=name, dtype=dtype, place=place if like.place is not None else None)
        return found

    def _learn(self, name: str, address: int, size: int) -> ParsedDataset:
        """Parse a header and remember it. size: of a header that may be like others."""
        found, of_layout, of_text = _read_dataset(self._file, name, address)
        spots = of_layout + 2 - address, of_text - address
        if found.chunk is None and size and 8 <= spots[0] < spots[1] <= size - 20:
            self._spots[size] = spots
            self._read[_without(self._file.take(address, size), *spots)] = found
        return found


def _without(data: bytes, place: int, text: int) -> bytes:
    """Return a header without the bytes in which it differs from others; the last four are its checksum."""
    return data[:place] + data[place + 8 : text] + data[text + 16 : -4]


class _File:
    """Bytes of a file; the most recently used blocks are kept."""

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        self._read, self.size = read, size
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._heap: tuple[int, dict[int, bytes]] = (-1, {})
        self._left = 1000 + size // 4
        """Reads that are left: a limit, so that a structure with loops ends in an error."""

    def take(self, begin: int, size: int) -> bytes:
        self._left -= 1
        if not 0 <= begin <= self.size or not 0 <= size <= self.size - begin or self._left < 0:
            raise CheckpointError("its HDF5 structure points outside of the file")
        first, inside = divmod(begin, BLOCK_BYTES)
        if inside + size <= BLOCK_BYTES:
            return self._block(first)[inside : inside + size]
        last = (begin + size - 1) // BLOCK_BYTES
        return b"".join(map(self._block, range(first, last + 1)))[inside : inside + size]

    def cursor(self, begin: int, size: int, signature: bytes = b"") -> _Cursor:
        cursor = _Cursor(self.take(begin, size), begin)
        if cursor.bytes(len(signature)) != signature:
            raise CheckpointError(f"its HDF5 structure has no {signature!r} at byte {begin}")
        return cursor

    def text(self, address: int, index: int, length: int) -> str:
        """Return a string of variable length from a global heap."""
        text = self._texts(address).get(index, b"")
        if not len(text) >= length <= 64:
            raise CheckpointError("its HDF5 structure has a dtype without a name")
        return text[:length].decode("utf-8", "replace")

    def _texts(self, address: int) -> dict[int, bytes]:
        """Return the objects of a global heap, by their numbers; the last heap is kept."""
        if self._heap[0] != address:
            heap = self.cursor(address, 16, b"GCOL")
            heap.number(4)
            objects, found = self.cursor(address + 16, heap.number(8) - 16), {}
            while objects.left >= 16:
                number, _, size = objects.number(2), objects.number(6), objects.number(8)
                if number == 0:
                    break
                found[number] = objects.bytes(min(-(-size // 8) * 8, objects.left))[:size]
            self._heap = address, found
        return self._heap[1]

    def _block(self, number: int) -> bytes:
        if number in self._blocks:
            self._blocks.move_to_end(number)
            return self._blocks[number]
        begin = number * BLOCK_BYTES
        found = self._blocks[number] = self._read(begin, min(begin + BLOCK_BYTES, self.size))
        if len(self._blocks) > _BLOCKS:
            self._blocks.popitem(last=False)
        return found


class _Cursor:
    """Reads numbers from a part of the structure, one after the other."""

    def __init__(self, data: bytes, begin: int = 0) -> None:
        """begin: byte of the file where the data begins."""
        self._data, self._at, self._begin = data, 0, begin

    @property
    def position(self) -> int:
        """Byte of the file where the next number begins."""
        return self._begin + self._at

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def bytes(self, size: int) -> bytes:
        if size > self.left:
            raise CheckpointError("its HDF5 structure ends too early")
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.bytes(size), "little")

    def numbers(self, count: int, size: int) -> tuple[int, ...]:
        data = self.bytes(count * size)
        return tuple(int.from_bytes(data[start : start + size], "little") for start in range(0, len(data), size))


def _read_root(file: _File) -> int:
    """Return the address of the root group's header."""
    cursor = file.cursor(0, min(48, file.size), _SIGNATURE) if file.size >= 48 else _Cursor(b"")
    version, offsets, lengths = cursor.numbers(3, 1)
    if version not in (2, 3) or (offsets, lengths) != (8, 8):
        raise CheckpointError("its HDF5 superblock is of another kind")
    cursor.number(1)
    base, _, _, root = cursor.numbers(4, 8)
    if base:
        raise CheckpointError("its HDF5 superblock is of another kind")
    return root


def _read_messages(file: _File, address: int) -> Iterator[tuple[int, _Cursor]]:
    """Yield (type, content) of every message of an object's header."""
    cursor = file.cursor(address, min(64, file.size - min(address, file.size)), b"OHDR")
    version, flags = cursor.numbers(2, 1)
    if version != 2:
        raise CheckpointError("its HDF5 structure has a header of another kind")
    # Optional fields: times (bit 5) and limits of attribute storage (bit 4). Bits 0 and 1 give the width of the size.
    skipped = 16 * bool(flags & 0x20) + 4 * bool(flags & 0x10)
    cursor.bytes(skipped)
    size = cursor.number(1 << (flags & 3))
    begin = address + 6 + skipped + (1 << (flags & 3))
    head, seen = 4 + 2 * bool(flags & 0x04), 0
    parts = [(begin, size, b"")]
    while parts:
        at, size, signature = parts.pop(0)
        cursor = file.cursor(at, size, signature)
        # A continuation block ends with a checksum of 4 bytes; the first part does not contain its checksum.
        while cursor.left >= head + 4 * bool(signature):
            kind, length = cursor.number(1), cursor.number(2)
            cursor.bytes(head - 3)
            content = _Cursor(cursor.bytes(length), cursor.position - length)
            seen += 1
            if seen > _MOST_MESSAGES:
                raise CheckpointError("its HDF5 structure has a header without an end")
            if kind == _CONTINUATION:
                parts.append((content.number(8), content.number(8), b"OCHK"))
            else:
                yield kind, content


def _read_dataset(file: _File, name: str, address: int) -> tuple[ParsedDataset, int, int]:
    """Return (the dataset, byte of the file of its layout message, byte of the value of torch_dtype)."""
    shape: tuple[int, ...] | None = None
    itemsize, layout = 0, None
    attributes: dict[str, _Cursor] = {}
    for kind, content in _read_messages(file, address):
        if kind == _DATASPACE:
            shape = _read_dataspace(content)
        elif kind == _DATATYPE:
            content.number(4)
            itemsize = content.number(4)
        elif kind == _LAYOUT:
            layout = content
        elif kind == _ATTRIBUTE:
            attribute, value = _read_attribute(content)
            attributes[attribute] = value
    if shape is None or layout is None or not {"torch_dtype", "offset", "global_shape"} <= attributes.keys():
        raise CheckpointError(f"its HDF5 structure does not describe {name[:100]!r} as ours do")
    offset, global_shape = (attributes[name].numbers(len(shape), 8) for name in ("offset", "global_shape"))
    of_layout, of_text = layout.position, attributes["torch_dtype"].position
    length, heap, index = (attributes["torch_dtype"].number(size) for size in (4, 8, 4))
    place, chunk, chunks = _read_layout(file, layout, shape, itemsize)
    dtype = file.text(heap, index, length)
    return ParsedDataset(name, dtype, itemsize, shape, offset, global_shape, place, chunk, chunks), of_layout, of_text


def _read_dataspace(content: _Cursor) -> tuple[int, ...]:
    version, dimensions, _, kind = content.numbers(4, 1)
    if version != 2 or kind > 1 or dimensions > 32:
        raise CheckpointError("its HDF5 structure has a dataspace of another kind")
    return content.numbers(dimensions, 8)


def _read_attribute(content: _Cursor) -> tuple[str, _Cursor]:
    """Return (name, value) of an attribute message."""
    version, _ = content.numbers(2, 1)
    of_name, of_type, of_space = content.numbers(3, 2)
    content.number(1)
    if version != 3:
        raise CheckpointError("its HDF5 structure has an attribute of another kind")
    name = content.bytes(of_name).rstrip(b"\0").decode("utf-8", "replace")
    content.bytes(of_type + of_space)
    return name, content


def _read_layout(
    file: _File, content: _Cursor, shape: tuple[int, ...], itemsize: int
) -> tuple[int | None, tuple[int, ...] | None, tuple[ParsedChunk, ...]]:
    """Return (place, chunk shape, chunks) of a layout message."""
    version, kind = content.numbers(2, 1)
    if version in (3, 4) and kind == _CONTIGUOUS:
        address, size = content.numbers(2, 8)
        if size != prod(shape) * itemsize:
            raise CheckpointError("its HDF5 structure gives a dataset another size than its shape has")
        return (None if address == _UNDEFINED or not size else address), None, ()
    if version != 4 or kind != _CHUNKED:
        raise CheckpointError("its HDF5 structure has a layout of another kind")
    flags, dimensions, width = content.numbers(3, 1)
    *chunk, item = content.numbers(dimensions, width)
    if len(chunk) != len(shape) or item != itemsize or 0 in chunk:
        raise CheckpointError("its HDF5 structure has chunks that do not fit their dataset")
    index = content.number(1)
    count = prod(-(-size // of) for size, of in zip(shape, chunk, strict=True))
    if index == _SINGLE_CHUNK and count == 1:
        stored, mask = (content.number(8), content.number(4)) if flags & 2 else (prod(chunk) * item, 0)
        return None, tuple(chunk), (ParsedChunk(content.number(8), stored, mask),)
    if index == _FIXED_ARRAY:
        content.number(1)
        return None, tuple(chunk), _read_fixed_array(file, content.number(8), count)
    raise CheckpointError("its HDF5 structure has an index of chunks of another kind")


def _read_fixed_array(file: _File, address: int, count: int) -> tuple[ParsedChunk, ...]:
    header = file.cursor(address, 28, b"FAHD")
    version, client, width, bits = header.numbers(4, 1)
    number, block = header.numbers(2, 8)
    if version or client != 1 or not 13 <= width <= 20 or number != count or bits > 30 or count * width > file.size:
        raise CheckpointError("its HDF5 structure has an index of chunks of another kind")
    file.cursor(block, 14, b"FADB")
    # A large array is stored in pages, each followed by a checksum of 4 bytes; a bitmap of used pages comes first.
    page, at = 1 << bits, block + 14
    if count <= page:
        return _chunks(file.cursor(at, count * width), count, width)
    pages = -(-count // page)
    at += -(-pages // 8) + 4
    found: list[ParsedChunk] = []
    while len(found) < count:
        size = min(page, count - len(found))
        found += _chunks(file.cursor(at, size * width), size, width)
        at += size * width + 4
    return tuple(found)


def _chunks(cursor: _Cursor, count: int, width: int) -> tuple[ParsedChunk, ...]:
    return tuple(ParsedChunk(cursor.number(8), cursor.number(width - 12), cursor.number(4)) for _ in range(count))


def _read_links(file: _File, root: int) -> Iterator[tuple[str, int]]:
    """Yield (name, address of the header) of everything in the root group."""
    for kind, content in _read_messages(file, root):
        if kind == _LINK:
            yield _read_link(content)
        elif kind == _LINK_INFO:
            _, flags = content.numbers(2, 1)
            content.bytes(8 * (flags & 1))
            heap, tree = content.numbers(2, 8)
            if heap != _UNDEFINED:
                yield from _read_dense_links(file, heap, tree)


def _read_link(content: _Cursor) -> tuple[str, int]:
    version, flags = content.numbers(2, 1)
    kind = content.number(1) if flags & 0x08 else 0
    content.bytes(8 * bool(flags & 0x04) + bool(flags & 0x10))
    name = content.bytes(content.number(1 << (flags & 3)))
    if version != 1 or kind:
        raise CheckpointError("its HDF5 structure has a link of another kind")
    return name.decode("utf-8", "surrogateescape"), content.number(8)


def _read_dense_links(file: _File, heap: int, tree: int) -> Iterator[tuple[str, int]]:
    of_heap = _Heap(file, heap)
    for content in sorted(of_heap.spot(record[4:]) for record in _read_records(file, tree)):
        yield _read_link(_Cursor(file.take(*content)))


def _read_records(file: _File, address: int) -> Iterator[bytes]:
    """Yield the records of a version-2 B-tree of names, in no particular order."""
    header = file.cursor(address, 34, b"BTHD")
    version, kind = header.numbers(2, 1)
    node, record, depth = header.number(4), header.number(2), header.number(2)
    header.number(2)
    root, number = header.number(8), header.number(2)
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
        cursor = file.cursor(address, min(node, file.size - min(address, file.size)), b"BTIN" if depth else b"BTLF")
        cursor.number(2)
        for _ in range(number):
            yield cursor.bytes(record)
        for _ in range(number + 1 if depth else 0):
            waiting.append((cursor.number(8), cursor.number(counts), depth - 1))
            cursor.bytes(pointers[depth] - 8 - counts)


def _choose_width(most: int) -> int:
    """Return how many bytes store a count of at most `most`."""
    return (most.bit_length() - 1) // 8 + 1


class _Heap:
    """A fractal heap: blocks of doubling sizes, addressed as one range of bytes."""

    def __init__(self, file: _File, address: int) -> None:
        header = file.cursor(address, 146, b"FRHP")
        version, _, filters, _ = header.number(1), header.number(2), header.number(2), header.number(1)
        objects = header.number(4)
        header.bytes(12 * 8)
        self._width, self._start, self._direct = header.number(2), header.number(8), header.number(8)
        bits, _ = header.number(2), header.number(2)
        self._file, self._root, self._rows = file, header.number(8), header.number(2)
        sizes_are_powers = all(size and not size & (size - 1) for size in (self._start, self._direct, self._width))
        if version or filters or not sizes_are_powers or self._start > self._direct or not 8 <= bits <= 64:
            raise CheckpointError("its HDF5 structure has a heap of another kind")
        self._of_offset = -(-bits // 8)
        lengths = (self._direct.bit_length() + 6) // 8, (objects.bit_length() + 6) // 8
        self._of_length = min(lengths)
        self._pages: dict[int, int] = {}

    def spot(self, identifier: bytes) -> tuple[int, int]:
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
            cursor = self._file.cursor(block, head, b"FHIB")
            cursor = self._file.cursor(block + head + 8 * (row * self._width + column), 8)
            block = cursor.number(8)
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
