"""Use token files that other programs wrote, as they are: mapped into memory, never copied.

NumPy's .npy, Megatron's .bin with its .idx, llm.c's .bin with a header, and raw tokens as nanoGPT and OLMo write them
(whatever their suffix). Recognised by content; only raw tokens need data.dtype.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hpc_train.config.model import TokenDataConfig
from hpc_train.data.corpus.build import ensure_store
from hpc_train.data.readers.records import first_line, open_records
from hpc_train.data.token_store import SLICE_TOKENS, TokenStore
from hpc_train.errors import UserError

_NUMPY, _HDF5, _MEGATRON = b"\x93NUMPY", b"\x89HDF\r\n\x1a\n", b"MMIDIDX\0\0"
_LLM_C: dict[int, np.dtype[Any]] = {20240520: np.dtype("<u2"), 20240801: np.dtype("<u4")}
"""First number of the header of 256 int32 that llm.c and its descendants write -> type of the tokens."""
_LLM_C_HEADER = 256 * 4
_MEGATRON_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Codes of the types of tokens in an .idx; 6 and 7 are floating-point numbers."""
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
FULL_SCAN_TOKENS = 1 << 26
"""Files of at most this many tokens are read once, whole, to find the largest; of longer ones, slices."""
_SLICES = 16
_UNDECLARED = 256
"""Default of data.vocab_size: nothing was declared."""


@dataclass(frozen=True)
class TokenFile:
    """Tokens in a file that is not one of ours."""

    path: Path
    tokens: npt.NDArray[Any]
    """(tokens,), a read-only memory map."""
    vocab_size: int
    separator: int | None = None
    """Token that ends a document, if it is known."""
    starts: npt.NDArray[np.int64] | None = None
    """(documents,): where documents begin, if the file's index says so."""
    counted: None = None
    """All tokens are targets."""

    @cached_property
    def documents(self) -> npt.NDArray[np.int64]:
        """(documents,): index at which each document begins. Raises UserError if nothing says where they end."""
        if self.starts is not None:
            return self.starts
        if self.separator is None:
            raise UserError(
                f"{self.path} does not say where its documents end: set data.separator to the token behind each, or "
                "data.samples=stream"
            )
        ends = [
            np.flatnonzero(self.tokens[start : start + SLICE_TOKENS] == self.separator) + start + 1
            for start in range(0, len(self.tokens), SLICE_TOKENS)
        ]
        starts = np.concatenate([np.zeros(1, np.int64), *ends])
        return starts[starts < len(self.tokens)]


TokenSource: TypeAlias = TokenStore | TokenFile
"""Tokens that samples are cut out of."""


def open_tokens(config: TokenDataConfig) -> TokenSource:
    """Open the tokens of a config: its token file or store; the store is built first if the config names sources.

    Raises UserError for a file that is not a token file, or has tokens outside its vocabulary.
    """
    path = ensure_store(config)
    if config.path is None:
        return TokenStore.open(path)
    head = _read_head(path)
    index = _find_index(path, head)
    if index is not None:
        tokens, starts = _map_megatron(index)
        return _check_tokens(config, index.with_suffix(".bin"), tokens, starts)
    if head.startswith(_NUMPY):
        return _check_tokens(config, path, _map_numpy(path))
    if len(head) >= 12 and (dtype := _LLM_C.get(int.from_bytes(head[:4], "little"))) is not None:
        return _check_tokens(config, path, _map_llm_c(path, head, dtype))
    if config.dtype is not None and not head.startswith(_HDF5):
        return _check_tokens(config, path, _map_raw(path, np.dtype(config.dtype).newbyteorder("<")))
    if path.suffix in (".bin", ".npy", ".dat") and not head.startswith(_HDF5):
        raise UserError(
            f"data.path={path}: tokens without a header; set data.dtype=uint16 (for vocabularies up to 65,536) or "
            "data.dtype=uint32"
        )
    return TokenStore.open(path)


def is_token_file(path: Path, dtype: str | None) -> bool:
    """Return whether `open_tokens` reads this file: a store, or tokens of another program. dtype: data.dtype.

    Raises UserError for a file that is not there or cannot be read.
    """
    head = _read_head(path)
    llm_c = len(head) >= 12 and int.from_bytes(head[:4], "little") in _LLM_C
    has_known_header = head.startswith((_NUMPY, _HDF5)) or llm_c or _find_index(path, head) is not None
    return has_known_header or dtype is not None or path.suffix in (".bin", ".npy", ".dat")


def list_token_files(path: Path) -> list[Path]:
    """List the files that a token file consists of: two for Megatron's."""
    pair = [path.with_suffix(".bin"), path.with_suffix(".idx")]
    return pair if path in pair and all(file.is_file() for file in pair) else [path]


def _check_tokens(
    config: TokenDataConfig, path: Path, tokens: npt.NDArray[Any], starts: npt.NDArray[np.int64] | None = None
) -> TokenFile:
    """Find or check the vocabulary by reading tokens: all of a short file, slices at even distances of a long one."""
    declared = config.vocab_size if config.vocab_size != _UNDECLARED else None
    if declared is None and len(tokens) > FULL_SCAN_TOKENS:
        raise UserError(f"{path}: {len(tokens):,} tokens are too many to search for the largest: set data.vocab_size")
    if not len(tokens):
        raise UserError(f"{path}: no tokens")
    largest = 0
    for start in _choose_slices(len(tokens)):
        part = tokens[start : start + SLICE_TOKENS]
        low, high = int(part.min()), int(part.max())
        if low < 0 or (declared is not None and high >= declared):
            wrong = low if low < 0 else high
            place = start + int(np.flatnonzero(part == wrong)[0])
            limit = f"[0, {declared:,})" if declared else "0 and above"
            raise UserError(
                f"{path}: token {wrong} at index {place:,} is outside {limit}: is data.dtype right (here "
                f"{tokens.dtype.name}), and data.vocab_size?"
            )
        largest = max(largest, high)
    return TokenFile(path, tokens, declared or max(largest + 1, 2), config.separator, starts)


def _choose_slices(count: int) -> list[int]:
    if count <= FULL_SCAN_TOKENS:
        return list(range(0, count, SLICE_TOKENS))
    return [(count - SLICE_TOKENS) * index // (_SLICES - 1) for index in range(_SLICES)]


def _map_raw(path: Path, dtype: np.dtype[Any], offset: int = 0, count: int | None = None) -> npt.NDArray[Any]:
    """Map tokens; count: how many there must be, None: all that follow the offset."""
    with open_records(path) as file:
        size = file.seek(0, 2) - offset
        if count is None:
            if size % dtype.itemsize:
                raise UserError(f"{path}: {size:,} bytes are not a whole number of {dtype.name} tokens: cut short?")
            count = size // dtype.itemsize
        if count * dtype.itemsize > size:
            raise UserError(f"{path} is cut short: {count:,} {dtype.name} tokens need {count * dtype.itemsize:,} bytes")
        if count == 0:
            raise UserError(f"{path}: no tokens")
        # A plain array over the map: np.memmap's own slicing costs several times as much.
        return np.asarray(np.memmap(file, dtype, mode="r", offset=offset, shape=(count,)))


def _map_numpy(path: Path) -> npt.NDArray[Any]:
    with open_records(path) as file:
        try:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
        except (ValueError, SyntaxError, EOFError) as error:
            raise UserError(f"{path} is a damaged NumPy file ({first_line(error)})") from error
        offset = file.tell()
    if version > (3, 0) or not all(type(length) is int and length >= 0 for length in shape):
        raise UserError(f"{path} is a damaged NumPy file (version {version}, shape {shape})")
    if len(shape) != 1 or dtype.kind not in "iu":
        raise UserError(f"{path}: an array {shape} of {dtype}; tokens are one row of integers (array.reshape(-1))")
    return _map_raw(path, dtype, offset, shape[0])


def _map_llm_c(path: Path, head: bytes, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    count = int.from_bytes(head[8:12], "little", signed=True)
    if count < 0:
        raise UserError(f"{path} is damaged: its header says {count:,} tokens")
    return _map_raw(path, dtype, _LLM_C_HEADER, count)


def _map_megatron(index: Path) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Map the .bin of an .idx; also return the index at which each document begins."""
    with open_records(index) as file:
        header = file.read(_MEGATRON_HEADER.size)
        if len(header) < _MEGATRON_HEADER.size:
            raise UserError(f"{index} is cut short")
        _, version, code, sequences, documents = _MEGATRON_HEADER.unpack(header)
        size = file.seek(0, 2)
        if version != 1 or code not in _MEGATRON_TYPES:
            raise UserError(f"{index}: version {version}, type {code}; expected version 1 and a type of integers")
        if size != _MEGATRON_HEADER.size + 12 * sequences + 8 * documents:
            raise UserError(f"{index} is cut short: {sequences:,} sequences and {documents:,} documents need more")
        file.seek(_MEGATRON_HEADER.size)
        # After the header: the length and the place of every sequence, then the first sequence of every document.
        lengths = np.frombuffer(file.read(4 * sequences), "<i4").astype(np.int64)
        places = np.frombuffer(file.read(8 * sequences), "<i8")
        bounds = np.frombuffer(file.read(8 * documents), "<i8")
    dtype = np.dtype(_MEGATRON_TYPES[code])
    ends = np.cumsum(lengths)
    begins = ends - lengths
    if (lengths < 0).any() or not np.array_equal(places, begins * dtype.itemsize):
        raise UserError(f"{index}: its sequences do not follow each other: write the data set again")
    if not len(bounds) or bounds[0] != 0 or bounds[-1] != sequences or (np.diff(bounds) < 0).any():
        raise UserError(f"{index}: its documents are not consecutive sequences: write the data set again")
    path, count = index.with_suffix(".bin"), int(ends[-1]) if sequences else 0
    tokens = _map_raw(path, dtype, 0, count)
    if path.stat().st_size != count * dtype.itemsize:
        raise UserError(
            f"{path} is longer than the {count:,} {dtype.name} tokens of {index.name}: the two are not of one data set"
        )
    # Documents without sequences have no first token and are left out.
    starts = begins[bounds[:-1][np.diff(bounds) > 0]]
    return tokens, starts


def _find_index(path: Path, head: bytes) -> Path | None:
    """Return Megatron's .idx if the path is one, or the .bin beside one."""
    if head.startswith(_MEGATRON):
        return path
    index = path.with_suffix(".idx")
    if path.suffix == ".bin" and index.is_file() and _read_head(index).startswith(_MEGATRON):
        return index
    return None


def _read_head(path: Path) -> bytes:
    if not path.exists():
        raise UserError(f"no token store at {path}: build one with `hpc-train data build {path} FOLDER`")
    with open_records(path) as file:
        return file.read(64)
