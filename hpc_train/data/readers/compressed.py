"""Read gzip and zstd files as streams: a small file that unpacks to a huge one costs no memory."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from hpc_train.data.readers.records import first_line, import_pyarrow
from hpc_train.errors import UserError
from hpc_train.regular_files import open_to_read

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_BUFFER_BYTES = 1 << 20


def is_compressed(head: bytes) -> bool:
    """Return whether a file that begins like this is one that `open_unpacked` unpacks."""
    return head.startswith((_GZIP, _ZSTD))


@contextmanager
def open_unpacked(path: Path) -> Iterator[BinaryIO]:
    """Open a plain, gzip or zstd file for reading its content from the beginning.

    Raises UserError if it cannot be read, or if its compressed data is damaged or cut short.
    """
    try:
        with open_to_read(path) as file:
            head = file.read(4)
            file.seek(0)
            if head.startswith(_GZIP):
                with gzip.GzipFile(fileobj=file) as unpacked:
                    yield io.BufferedReader(cast(io.RawIOBase, unpacked), _BUFFER_BYTES)
            elif head == _ZSTD:
                pyarrow = import_pyarrow(path)
                with pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd") as unpacked:
                    yield io.BufferedReader(unpacked, _BUFFER_BYTES)
            else:
                yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is damaged or cut short: {error}") from error
    except OSError as error:
        if error.errno is None:  # of a decompressor, which knows no error numbers
            raise UserError(f"{path} is damaged or cut short: {first_line(error)}") from error
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def read_unpacked_head(path: Path, count: int) -> bytes | None:
    """Return the first `count` bytes of what a compressed file holds; None if they are damaged."""
    content = bytearray()
    try:
        with open_unpacked(path) as file:
            while len(content) < count and (part := file.read(count - len(content))):
                content += part
    except UserError:
        return None
    return bytes(content)
