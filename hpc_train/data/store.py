"""Reader of the token store: one HDF5 file whose tokens lie contiguously, read by a memory map at their own offset."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import xxhash

from hpc_train.errors import UserError

FORMAT = "hpc_train.tokens"
VERSION = 1
"""Raised when a file written today could not be read by the reader of yesterday."""

TOKENS = "tokens"
"""1-D, contiguous layout, little-endian: every document followed by the tokenizer's separator."""
DOCUMENTS = "documents"
"""int64: index in TOKENS at which each document begins."""
COUNTS = "counts"
"""int64, one a vocabulary entry: how often it occurs in TOKENS."""
TOKENIZER = "tokenizer_json"
"""uint8, the tokenizer's own JSON; a data set because an attribute ends at 64 KiB. Absent for the byte tokenizer."""

SLICE = 1 << 22
"""Tokens looked at in one go by everything that reads a whole store."""

Tokens = npt.NDArray[np.unsignedinteger]
Counts = npt.NDArray[np.int64]


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """The narrowest of the two formats of a store that holds every token below `vocab_size`."""
    assert 0 < vocab_size <= 1 << 32
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


@dataclass(frozen=True)
class TokenStore:
    """An open token store. Slicing `tokens` reads pages of the file and nothing more."""

    path: Path
    tokens: Tokens
    """(tokens,), a read-only memory map."""
    documents: npt.NDArray[np.int64]
    """(documents,), a read-only memory map: where each one begins in `tokens`."""
    counts: Counts
    """(vocab_size,)"""
    vocab_size: int
    tokenizer: str
    tokenizer_json: str
    """Empty for the byte tokenizer."""
    source: str
    """JSON: what the store was built from."""
    digest: str
    """XXH3-128 of the bytes of `tokens`, hexadecimal."""
    unigram_entropy: float
    """Entropy of the whole store's distribution of tokens, nats per token."""

    @classmethod
    def open(cls, path: str | Path) -> TokenStore:
        """Open `path`. A file that is missing, cut short, of another kind or of a later format is a UserError."""
        path = Path(path).expanduser()
        if not path.is_file():
            raise UserError(f"no token store at {path}: build one with `hpc-train data build {path} FOLDER`")
        try:
            # Lustre without -o flock refuses HDF5's own lock; a store never changes once it has its name.
            with h5py.File(path, "r", locking=False) as file:
                return _read(file, path)
        except UserError:
            raise
        except Exception as error:  # h5py raises nearly every kind on a damaged header
            raise UserError(f"{path} {_unreadable(path)} ({_first_line(error)})") from error


def verify(store: TokenStore) -> bool:
    """Whether the tokens are still those that were written; reads the whole file."""
    state = xxhash.xxh3_128()
    for start in range(0, len(store.tokens), SLICE):
        state.update(store.tokens[start : start + SLICE].data)
    return state.hexdigest() == store.digest


def _read(file: h5py.File, path: Path) -> TokenStore:
    _check_header(file, path)
    attributes = file.attrs
    return TokenStore(
        path=path,
        tokens=_map(file[TOKENS], path),
        documents=_map(file[DOCUMENTS], path),
        counts=file[COUNTS][:],
        vocab_size=int(attributes["vocab_size"]),
        tokenizer=str(attributes["tokenizer"]),
        tokenizer_json=bytes(file[TOKENIZER][:]).decode() if TOKENIZER in file else "",
        source=str(attributes["source"]),
        digest=str(attributes["xxh3_128"]),
        unigram_entropy=float(attributes["unigram_entropy"]),
    )


def _check_header(file: h5py.File, path: Path) -> None:
    if file.attrs.get("format") != FORMAT:
        raise UserError(f"{path} is an HDF5 file but not a token store: make one with `hpc-train data build`")
    version = int(file.attrs["version"])
    if version > VERSION:
        raise UserError(
            f"{path} has token-store format {version}, newer than {VERSION}, the last this hpc_train reads: "
            "update hpc_train or build the store again"
        )


def _map(dataset: h5py.Dataset, path: Path) -> npt.NDArray[Any]:
    """A memory map of a contiguous data set, without going through HDF5 for the data."""
    offset = dataset.id.get_offset()
    if dataset.chunks is not None or dataset.ndim != 1 or offset is None:
        raise UserError(f"{path}: data set {dataset.name} is not contiguous (repacked?): build the store again")
    if path.stat().st_size < offset + dataset.nbytes:
        raise UserError(f"{path} is cut short: {dataset.name} ends at byte {offset + dataset.nbytes:,}: build it again")
    # A plain array over the map: np.memmap's own slicing costs several times as much.
    return np.asarray(np.memmap(path, dataset.dtype, mode="r", offset=offset, shape=dataset.shape))


def _unreadable(path: Path) -> str:
    try:
        hdf5 = h5py.is_hdf5(path)
    except OSError:
        hdf5 = False
    if hdf5:
        return "is a damaged or truncated token store: build it again"
    return "cannot be read as a token store: make one with `hpc-train data build`"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].strip("'\"")
