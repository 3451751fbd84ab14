"""Find the records in a zip archive of torch.save, without reading or inflating any of them.

torch stores its records as they are, so a record is a range of bytes of the file. An archive that says anything else
(compressed, encrypted, past its own end) is refused before a byte is allocated for it. Layout: PKWARE's APPNOTE.TXT
6.3, sections 4.3 and 4.5.3.
"""

from __future__ import annotations

import struct
from typing import Protocol

from hpc_train.checkpoint.formats.pickle_values import PickleError

_END = struct.Struct("<4s4H2IH")
_LOCATOR = struct.Struct("<4sIQI")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_EXTRA = struct.Struct("<2H")
_MOST_DIRECTORY = 64 << 20
"""Maximum bytes of the central directory; a record takes about 80 of them."""
_COMMENT = 1 << 16
_FULL, _FULL_16 = 0xFFFFFFFF, 0xFFFF
Span = tuple[int, int]
"""(first byte, bytes)"""


class Bytes(Protocol):
    """A file, or a part of one."""

    @property
    def size(self) -> int:
        """Size in bytes."""

    def read(self, begin: int, size: int) -> bytes:
        """Read exactly `size` bytes. Raises PickleError past the end."""


def find_records(file: Bytes) -> dict[str, Span]:
    """Return the place of every record, by its name without the archive's folder ("archive/data.pkl" is "data.pkl").

    Raises PickleError if it is no such archive.
    """
    try:
        entries = _entries(file)
        found = {name.partition("/")[2]: _span(file, at, size) for name, at, size in entries}
        if len(found) != len(entries):
            raise PickleError("a zip archive with two records of one name")
    except (struct.error, UnicodeDecodeError) as error:
        raise PickleError(f"a damaged zip archive ({type(error).__name__})") from None
    if sum(size for _, size in found.values()) > file.size:
        raise PickleError("a zip archive whose records are larger than the file")
    return found


def _entries(file: Bytes) -> list[tuple[str, int, int]]:
    """Return (name, byte of its local header, bytes) of every record, from the central directory."""
    at, size = _directory(file)
    if not 0 <= at <= at + size <= file.size or size > _MOST_DIRECTORY:
        raise PickleError(f"a zip archive with a directory of {size:,} bytes at byte {at:,} of {file.size:,}")
    data, place, found = file.read(at, size), 0, []
    while place < len(data):
        signature, *_, flags, method, _, _, _, stored, plain, name, extra, comment, _, _, _, local = _ENTRY.unpack_from(
            data, place
        )
        place += _ENTRY.size
        text = data[place : place + name].decode()
        more = data[place + name : place + name + extra]
        place += name + extra + comment
        plain, stored, local = _wide(more, plain, stored, local)
        if signature != b"PK\x01\x02" or place > len(data):
            raise PickleError("a zip archive with a damaged directory")
        if method or flags & 1 or plain != stored:
            raise PickleError(f"a zip archive with a compressed record, of {plain:,} bytes; torch.save compresses none")
        found.append((text, local, plain))
    return found


def _directory(file: Bytes) -> Span:
    """Return the span of the central directory."""
    tail = file.read(begin := max(0, file.size - _END.size - _COMMENT), file.size - begin)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0:
        raise PickleError("not a zip archive")
    _, _, _, _, _, size, place, _ = _END.unpack_from(tail, at)
    locator = begin + at - _LOCATOR.size
    if locator >= 0:
        signature, _, place_64, _ = _LOCATOR.unpack(file.read(locator, _LOCATOR.size))
        if signature == b"PK\x06\x07":
            *_, size, place = _END_64.unpack(file.read(place_64, _END_64.size))
    return place, size


def _wide(extra: bytes, plain: int, stored: int, local: int) -> tuple[int, int, int]:
    """Return the three numbers, from the 64-bit extra field where they do not fit into 32 bits."""
    place = 0
    while place + _EXTRA.size <= len(extra):
        kind, size = _EXTRA.unpack_from(extra, place)
        place += _EXTRA.size
        if kind == 1:
            values = iter(struct.unpack_from(f"<{size // 8}Q", extra, place))
            plain, stored, local = (next(values, it) if it == _FULL else it for it in (plain, stored, local))
        place += size
    return plain, stored, local


def _span(file: Bytes, at: int, size: int) -> Span:
    """Return the span of a record's content, which follows its local header."""
    signature, *_, name, extra = _LOCAL.unpack(file.read(at, _LOCAL.size))
    begin = at + _LOCAL.size + name + extra
    if signature != b"PK\x03\x04" or begin + size > file.size:
        raise PickleError("a zip archive with a record past its end")
    return begin, size
