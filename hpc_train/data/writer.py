"""Writer of the token store: bounded memory, and a name only once the file is whole."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import h5py
import numpy as np
import numpy.typing as npt
import xxhash

from hpc_train.data.store import COUNTS, DOCUMENTS, FORMAT, SLICE, TOKENIZER, TOKENS, VERSION, Tokens, token_dtype
from hpc_train.data.unigram import entropy
from hpc_train.errors import UserError


@dataclass(frozen=True)
class Header:
    """What is known of a store before its first token; the fields are those of TokenStore."""

    vocab_size: int
    tokenizer: str
    tokenizer_json: str
    source: str


@dataclass(frozen=True)
class Block:
    """The next tokens of a store; a document may run over several blocks."""

    tokens: Tokens
    starts: npt.NDArray[np.int64]
    """Where documents begin within `tokens`."""


def write_store(path: Path, blocks: Iterable[Block], header: Header) -> None:
    """Write all `blocks` to `path`, replacing what is there in one step; the same input gives the same bytes.

    HDF5 must know the length of a contiguous data set when it is made, so the tokens are first spooled to a nameless
    file in the same folder, which needs room for the tokens twice. No tokens at all, or a folder that cannot be
    written, is a UserError.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent) as spool:
            totals = _Totals(np.zeros(header.vocab_size, np.int64))
            for block in blocks:
                _spool(spool, block, token_dtype(header.vocab_size), totals)
            if not totals.tokens:
                raise UserError("the sources hold no text: every file is empty")
            with _published(path) as temporary:
                _write(temporary, spool, header, totals)
    except OSError as error:
        raise UserError(f"cannot write token store {path}: {error.strerror or error}") from error


@dataclass
class _Totals:
    counts: npt.NDArray[np.int64]
    tokens: int = 0
    starts: list[npt.NDArray[np.int64]] = field(default_factory=list)
    digest: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)


def _spool(spool: IO[bytes], block: Block, dtype: np.dtype[np.unsignedinteger], totals: _Totals) -> None:
    if not len(block.tokens):
        return
    vocab_size = len(totals.counts)
    counts = np.bincount(block.tokens, minlength=vocab_size)
    assert len(counts) == vocab_size, f"token {len(counts) - 1} in a vocabulary of {vocab_size}"
    totals.counts += counts
    totals.starts.append(block.starts + totals.tokens)
    totals.tokens += len(block.tokens)
    tokens = np.ascontiguousarray(block.tokens, dtype)
    totals.digest.update(tokens.data)
    spool.write(tokens.data)


def _write(path: Path, spool: IO[bytes], header: Header, totals: _Totals) -> None:
    with h5py.File(path, "w", locking=False) as file:
        file.attrs["format"] = FORMAT
        file.attrs["version"] = VERSION
        file.attrs["vocab_size"] = header.vocab_size
        file.attrs["tokenizer"] = header.tokenizer
        file.attrs["source"] = header.source
        file.attrs["xxh3_128"] = totals.digest.hexdigest()
        file.attrs["unigram_entropy"] = entropy(totals.counts)
        file[COUNTS] = totals.counts
        file[DOCUMENTS] = np.concatenate(totals.starts)
        if header.tokenizer_json:
            file[TOKENIZER] = np.frombuffer(header.tokenizer_json.encode(), np.uint8)
        dtype = token_dtype(header.vocab_size)
        _copy(spool, file.create_dataset(TOKENS, (totals.tokens,), dtype))


def _copy(spool: IO[bytes], dataset: h5py.Dataset) -> None:
    spool.flush()
    spool.seek(0)
    for start in range(0, len(dataset), SLICE):
        data = spool.read(SLICE * dataset.dtype.itemsize)
        part = np.frombuffer(data, dataset.dtype)
        dataset[start : start + len(part)] = part


@contextmanager
def _published(path: Path) -> Iterator[Path]:
    """A file beside `path` to write; it takes that name, durably, only when the block ends well."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
