"""Find the datasets in one of our shard files without libhdf5: a file from elsewhere must not reach its C code.

It supports what our writer uses of the HDF5 file format (version 3.0 of the specification, The HDF Group), which is the
same in HDF5 1.10 to 2.0: superblock 2 and 3, object headers of version 2, links in the header of the root group or in a
fractal heap with a version-2 B-tree, contiguous data, and chunks in a fixed array or a single one. Anything else is an
error. hdf5_structure.py walks the structure, with bounded reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from operator import itemgetter

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.format.hdf5_structure import (
    UNDEFINED,
    Cursor,
    Hdf5File,
    read_links,
    read_messages,
    read_root,
)

_USUAL = b"OHDR\x02\x01"
"""First bytes of the usual object header: more than 255 bytes, without times; its size follows in two bytes."""
_DATASPACE, _DATATYPE, _LAYOUT, _ATTRIBUTE = 0x01, 0x03, 0x08, 0x0C
"""Types of the messages in an object's header (HDF5 File Format Specification 3.0, IV.A.2)."""
_CONTIGUOUS, _CHUNKED = 1, 2
"""Classes of a layout message."""
_SINGLE_CHUNK, _FIXED_ARRAY = 1, 3
"""Types of the index by which a chunked layout finds its chunks."""


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
    file = Hdf5File(read, size)
    root = read_root(file)
    datasets: dict[str, ParsedDataset] = {}
    headers = _HeaderCache(file)
    # In the order of the file, so that it is read once from its beginning to its end.
    for name, address in sorted(read_links(file, root), key=itemgetter(1)):
        if name in datasets:
            raise CheckpointError(f"its HDF5 structure has two datasets called {name[:100]!r}")
        datasets[name] = headers.read_dataset(name, address)
    return datasets


class _HeaderCache:
    """Parses object headers, each form once: most differ only in where the data and the dtype's name lie."""

    def __init__(self, file: Hdf5File) -> None:
        self._file = file
        self._spots: dict[int, tuple[int, int]] = {}
        self._read: dict[bytes, ParsedDataset] = {}

    def read_dataset(self, name: str, address: int) -> ParsedDataset:
        head = self._file.read_bytes(address, min(8, self._file.size - min(address, self._file.size)))
        size = 12 + int.from_bytes(head[6:8], "little")
        spots = self._spots.get(size)
        if spots is None or head[:6] != _USUAL:
            return self._learn(name, address, size if head[:6] == _USUAL else 0)
        data = self._file.read_bytes(address, size)
        like = self._read.get(_without(data, *spots))
        if like is None:
            return self._learn(name, address, size)
        place, heap = (int.from_bytes(data[at : at + 8], "little") for at in (spots[0], spots[1] + 4))
        dtype = self._file.read_string(
            heap, *(int.from_bytes(data[at : at + 4], "little") for at in (spots[1] + 12, spots[1]))
        )
        dataset = ParsedDataset.__new__(ParsedDataset)  # like `replace`, which would take longer than all else here
        dataset.__dict__.update(like.__dict__)
        dataset.__dict__.update(name=name, dtype=dtype, place=place if like.place is not None else None)
        return dataset

    def _learn(self, name: str, address: int, size: int) -> ParsedDataset:
        """Parse a header and remember it. size: of a header that may be like others."""
        dataset, of_layout, of_text = _read_dataset(self._file, name, address)
        spots = of_layout + 2 - address, of_text - address
        if dataset.chunk is None and size and 8 <= spots[0] < spots[1] <= size - 20:
            self._spots[size] = spots
            self._read[_without(self._file.read_bytes(address, size), *spots)] = dataset
        return dataset


def _without(data: bytes, place: int, text: int) -> bytes:
    """Return a header without the bytes in which it differs from others; the last four are its checksum."""
    return data[:place] + data[place + 8 : text] + data[text + 16 : -4]


def _read_dataset(file: Hdf5File, name: str, address: int) -> tuple[ParsedDataset, int, int]:
    """Return (the dataset, byte of the file of its layout message, byte of the value of torch_dtype)."""
    shape: tuple[int, ...] | None = None
    itemsize, layout = 0, None
    attributes: dict[str, Cursor] = {}
    for kind, content in read_messages(file, address):
        if kind == _DATASPACE:
            shape = _read_dataspace(content)
        elif kind == _DATATYPE:
            content.take_number(4)
            itemsize = content.take_number(4)
        elif kind == _LAYOUT:
            layout = content
        elif kind == _ATTRIBUTE:
            attribute, value = _read_attribute(content)
            attributes[attribute] = value
    if shape is None or layout is None or not {"torch_dtype", "offset", "global_shape"} <= attributes.keys():
        raise CheckpointError(f"its HDF5 structure does not describe {name[:100]!r} as ours do")
    offset, global_shape = (attributes[name].take_numbers(len(shape), 8) for name in ("offset", "global_shape"))
    of_layout, of_text = layout.position, attributes["torch_dtype"].position
    length, heap, index = (attributes["torch_dtype"].take_number(size) for size in (4, 8, 4))
    place, chunk, chunks = _read_layout(file, layout, shape, itemsize)
    dtype = file.read_string(heap, index, length)
    return (
        ParsedDataset(
            name=name,
            dtype=dtype,
            itemsize=itemsize,
            shape=shape,
            offset=offset,
            global_shape=global_shape,
            place=place,
            chunk=chunk,
            chunks=chunks,
        ),
        of_layout,
        of_text,
    )


def _read_dataspace(content: Cursor) -> tuple[int, ...]:
    version, dimensions, _, kind = content.take_numbers(4, 1)
    if version != 2 or kind > 1 or dimensions > 32:
        raise CheckpointError("its HDF5 structure has a dataspace of another kind")
    return content.take_numbers(dimensions, 8)


def _read_attribute(content: Cursor) -> tuple[str, Cursor]:
    """Return (name, value) of an attribute message."""
    version, _ = content.take_numbers(2, 1)
    of_name, of_type, of_space = content.take_numbers(3, 2)
    content.take_number(1)
    if version != 3:
        raise CheckpointError("its HDF5 structure has an attribute of another kind")
    name = content.take_bytes(of_name).rstrip(b"\0").decode("utf-8", "replace")
    content.take_bytes(of_type + of_space)
    return name, content


def _read_layout(
    file: Hdf5File, content: Cursor, shape: tuple[int, ...], itemsize: int
) -> tuple[int | None, tuple[int, ...] | None, tuple[ParsedChunk, ...]]:
    """Return (place, chunk shape, chunks) of a layout message."""
    version, kind = content.take_numbers(2, 1)
    if version in (3, 4) and kind == _CONTIGUOUS:
        address, size = content.take_numbers(2, 8)
        if size != prod(shape) * itemsize:
            raise CheckpointError("its HDF5 structure gives a dataset another size than its shape has")
        return (None if address == UNDEFINED or not size else address), None, ()
    if version != 4 or kind != _CHUNKED:
        raise CheckpointError("its HDF5 structure has a layout of another kind")
    flags, dimensions, width = content.take_numbers(3, 1)
    *chunk, item = content.take_numbers(dimensions, width)
    if len(chunk) != len(shape) or item != itemsize or 0 in chunk:
        raise CheckpointError("its HDF5 structure has chunks that do not fit their dataset")
    index = content.take_number(1)
    count = prod(-(-size // of) for size, of in zip(shape, chunk, strict=True))
    if index == _SINGLE_CHUNK and count == 1:
        stored, mask = (content.take_number(8), content.take_number(4)) if flags & 2 else (prod(chunk) * item, 0)
        return None, tuple(chunk), (ParsedChunk(content.take_number(8), stored, mask),)
    if index == _FIXED_ARRAY:
        content.take_number(1)
        return None, tuple(chunk), _read_fixed_array(file, content.take_number(8), count)
    raise CheckpointError("its HDF5 structure has an index of chunks of another kind")


def _read_fixed_array(file: Hdf5File, address: int, count: int) -> tuple[ParsedChunk, ...]:
    header = file.make_cursor(address, 28, b"FAHD")
    version, client, width, bits = header.take_numbers(4, 1)
    number, block = header.take_numbers(2, 8)
    if version or client != 1 or not 13 <= width <= 20 or number != count or bits > 30 or count * width > file.size:
        raise CheckpointError("its HDF5 structure has an index of chunks of another kind")
    file.make_cursor(block, 14, b"FADB")
    # A large array is stored in pages, each followed by a checksum of 4 bytes; a bitmap of used pages comes first.
    page, at = 1 << bits, block + 14
    if count <= page:
        return _read_chunks(file.make_cursor(at, count * width), count, width)
    pages = -(-count // page)
    at += -(-pages // 8) + 4
    chunks: list[ParsedChunk] = []
    while len(chunks) < count:
        size = min(page, count - len(chunks))
        chunks += _read_chunks(file.make_cursor(at, size * width), size, width)
        at += size * width + 4
    return tuple(chunks)


def _read_chunks(cursor: Cursor, count: int, width: int) -> tuple[ParsedChunk, ...]:
    return tuple(
        ParsedChunk(cursor.take_number(8), cursor.take_number(width - 12), cursor.take_number(4)) for _ in range(count)
    )
