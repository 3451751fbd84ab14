"""Read and write token stores: one HDF5 file with contiguous tokens, read through a memory map at their offset.

A store is written in bounded memory and gets its name only when it is complete. The counts of tokens give the loss of a
unigram model, which knows only how frequent each token is: a trained model must be better.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import h5py
import numpy as np
import numpy.typing as npt
import xxhash

from hpc_train.data.store_file import TOKEN_STORE, compute_digest, map_dataset, open_store
from hpc_train.errors import UserError
from hpc_train.regular_files import publish_file

VERSION = TOKEN_STORE.version
TOKENS = "tokens"
"""1-D, contiguous layout, little-endian: every document followed by the tokenizer's separator."""
DOCUMENTS = "documents"
"""int64: index in TOKENS at which each document begins."""
COUNTS = "counts"
"""int64, one a vocabulary entry: how often it occurs in TOKENS."""
TOKENIZER = "tokenizer_json"
"""uint8, the tokenizer's own JSON; a data set because an attribute ends at 64 KiB. Absent for the byte tokenizer."""

SETTINGS = "tokenizer_settings"
"""uint8, JSON: special tokens and chat template of a tokenizer that came from a folder; absent for others."""
COUNTED = "counted"
"""uint8, one per token: 1 if it is a target that counts. Absent if all of them do."""

SLICE_TOKENS = 1 << 22
"""Tokens read at once by everything that reads a whole store."""

Tokens = npt.NDArray[np.unsignedinteger]
Counts = npt.NDArray[np.int64]


def choose_token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Return uint16 if it holds every token below `vocab_size`, else uint32; little-endian."""
    assert 0 < vocab_size <= 1 << 32
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


@dataclass(frozen=True)
class TokenStore:
    """An open token store. Slicing `tokens` reads pages of the file and nothing more."""

    path: Path
    tokens: Tokens
    """(tokens,), a read-only memory map."""
    documents: npt.NDArray[np.int64]
    """(documents,), a read-only memory map: index in `tokens` at which each document begins."""
    counts: Counts
    """(vocab_size,)"""
    vocab_size: int
    tokenizer: str
    tokenizer_json: str
    """Empty for the byte tokenizer."""
    source: str
    """JSON: what the store was built from."""
    digest: str
    """XXH3-128 of the bytes of `tokens` and then of `counted`, hexadecimal."""
    unigram_entropy: float
    """Entropy of the whole store's distribution of tokens, nats per token."""
    tokenizer_settings: str = ""
    """JSON of tokenizer_folder.TokenizerSettings; empty for the others."""
    counted: npt.NDArray[np.uint8] | None = None
    """(tokens,), a read-only memory map: 1 where the token is a target that counts; None: all of them are."""

    @property
    def tokenizer_digest(self) -> str:
        """XXH3-128 of the tokenizer: equal in two stores if their tokens mean the same."""
        return xxhash.xxh3_128_hexdigest("\0".join((self.tokenizer, self.tokenizer_json)).encode())

    @classmethod
    def open(cls, path: str | Path) -> TokenStore:
        """Open a store. Raises UserError if it is missing, truncated, of another kind or of a later format."""
        return open_store(Path(path).expanduser(), TOKEN_STORE, _read_store)


def verify_store(store: TokenStore) -> bool:
    """Return whether the tokens still have the digest with which they were written; reads the whole file."""
    return compute_digest([store.tokens] if store.counted is None else [store.tokens, store.counted]) == store.digest


def _read_store(file: h5py.File, path: Path) -> TokenStore:
    attributes = file.attrs
    return TokenStore(
        path=path,
        tokens=map_dataset(file[TOKENS], path),
        documents=map_dataset(file[DOCUMENTS], path),
        counts=file[COUNTS][:],
        vocab_size=int(attributes["vocab_size"]),
        tokenizer=str(attributes["tokenizer"]),
        tokenizer_json=_read_text(file, TOKENIZER),
        source=str(attributes["source"]),
        digest=str(attributes["xxh3_128"]),
        unigram_entropy=float(attributes["unigram_entropy"]),
        tokenizer_settings=_read_text(file, SETTINGS),
        counted=map_dataset(file[COUNTED], path) if COUNTED in file else None,
    )


def _read_text(file: h5py.File, name: str) -> str:
    return bytes(file[name][:]).decode() if name in file else ""


def count_tokens(tokens: Tokens, vocab_size: int) -> Counts:
    """Count how often each token occurs, (vocab_size,). Memory does not grow with the number of tokens."""
    total = np.zeros(vocab_size, np.int64)
    for start in range(0, len(tokens), SLICE_TOKENS):
        total += np.bincount(tokens[start : start + SLICE_TOKENS], minlength=vocab_size)
    return total


def compute_entropy(counts: Counts) -> float:
    """Return the entropy of the distribution with these counts, in nats; 0 if all of them are 0."""
    seen = counts[counts > 0].astype(np.float64)
    total = seen.sum()
    return float(np.log(total) - (seen * np.log(seen)).sum() / total) if total else 0.0


def compute_unigram_entropy(store: TokenStore, stop: int | None = None) -> float:
    """Return the loss of a unigram model of the first `stop` tokens (None: all) on those, in nats per token.

    Reads only the shorter side of `stop`: the other side's counts follow from those of the whole store.
    """
    tokens = len(store.tokens)
    stop = tokens if stop is None else stop
    if stop * 2 < tokens:
        return compute_entropy(count_tokens(store.tokens[:stop], store.vocab_size))
    return compute_entropy(store.counts - count_tokens(store.tokens[stop:], store.vocab_size))


@dataclass(frozen=True)
class StoreHeader:
    """Fields of a TokenStore that are known before its first token."""

    vocab_size: int
    tokenizer: str
    tokenizer_json: str
    source: str
    tokenizer_settings: str = ""
    counted: bool = False
    """Whether the blocks say which tokens count as targets."""


@dataclass(frozen=True)
class TokenBlock:
    """Consecutive tokens of a store; a document may span several blocks."""

    tokens: Tokens
    starts: npt.NDArray[np.int64]
    """Indices in `tokens` at which documents begin."""
    counted: npt.NDArray[np.bool_] | None = None
    """(tokens,): which of them count as targets; None: all."""


def write_store(
    path: Path, blocks: Iterable[TokenBlock], header: StoreHeader, describe: Callable[[], str] | None = None
) -> None:
    """Write `blocks` to a store, replacing an old one by one rename; the same input gives the same bytes.

    describe: called after the last block, returns what takes the place of the header's `source`.
    HDF5 must know the length of a contiguous dataset when it is created, so the tokens are first spooled to nameless
    files in the same folder: there must be room for the tokens twice. Raises UserError if there are no tokens, or if
    the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent) as tokens, tempfile.TemporaryFile(dir=path.parent) as counted:
            spool = _Spool(tokens, counted)
            totals = _Totals(np.zeros(header.vocab_size, np.int64))
            for block in blocks:
                _spool_block(spool, block, header, totals)
            if not totals.tokens:
                raise UserError("the sources hold no text: every document is empty")
            if describe is not None:
                header = replace(header, source=describe())
            with publish_file(path, sync=True) as temporary:
                _write_file(temporary, spool, header, totals)
    except OSError as error:
        raise UserError(f"cannot write token store {path}: {error.strerror or error}") from error


@dataclass(frozen=True)
class _Spool:
    tokens: IO[bytes]
    counted: IO[bytes]


@dataclass
class _Totals:
    counts: npt.NDArray[np.int64]
    tokens: int = 0
    starts: list[npt.NDArray[np.int64]] = field(default_factory=list)
    digest: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)


def _spool_block(spool: _Spool, block: TokenBlock, header: StoreHeader, totals: _Totals) -> None:
    if not len(block.tokens):
        return
    vocab_size = len(totals.counts)
    counts = np.bincount(block.tokens, minlength=vocab_size)
    assert len(counts) == vocab_size, f"token {len(counts) - 1} in a vocabulary of {vocab_size}"
    totals.counts += counts
    totals.starts.append(block.starts + totals.tokens)
    totals.tokens += len(block.tokens)
    tokens = np.ascontiguousarray(block.tokens, choose_token_dtype(header.vocab_size))
    totals.digest.update(tokens.data)
    spool.tokens.write(tokens.data)
    assert header.counted == (block.counted is not None)
    if block.counted is not None:
        spool.counted.write(block.counted.tobytes())


def _write_file(path: Path, spool: _Spool, header: StoreHeader, totals: _Totals) -> None:
    with h5py.File(path, "w", locking=False) as file:
        file.attrs["format"] = TOKEN_STORE.format
        file.attrs["version"] = VERSION
        file.attrs["vocab_size"] = header.vocab_size
        file.attrs["tokenizer"] = header.tokenizer
        file.attrs["source"] = header.source
        file.attrs["unigram_entropy"] = compute_entropy(totals.counts)
        file[COUNTS] = totals.counts
        file[DOCUMENTS] = np.concatenate(totals.starts)
        for name, text in ((TOKENIZER, header.tokenizer_json), (SETTINGS, header.tokenizer_settings)):
            if text:
                file[name] = np.frombuffer(text.encode(), np.uint8)
        dtype = choose_token_dtype(header.vocab_size)
        _copy_spool(spool.tokens, file.create_dataset(TOKENS, (totals.tokens,), dtype))
        if header.counted:
            counted = file.create_dataset(COUNTED, (totals.tokens,), np.uint8)
            _copy_spool(spool.counted, counted)
            for start in range(0, totals.tokens, SLICE_TOKENS):
                totals.digest.update(counted[start : start + SLICE_TOKENS].data)
        file.attrs["xxh3_128"] = totals.digest.hexdigest()


def _copy_spool(spool: IO[bytes], dataset: h5py.Dataset) -> None:
    spool.flush()
    spool.seek(0)
    for start in range(0, len(dataset), SLICE_TOKENS):
        data = spool.read(SLICE_TOKENS * dataset.dtype.itemsize)
        part = np.frombuffer(data, dataset.dtype)
        dataset[start : start + len(part)] = part
