"""Samples that hold a document each, padded to the length of a sequence: for chats, and for short documents.

The padding comes after the document, where causal attention does not see it, and has no targets. So the loss and its
gradients are exactly those of the document alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpc_train.config.model import TokenDataConfig
from hpc_train.data.samples.token_samples import TokenSamples
from hpc_train.data.token_files import TokenSource
from hpc_train.errors import UserError
from hpc_train.interfaces import IGNORED_TARGET

Indices = npt.NDArray[np.int64]
PADDING = 0
"""Input of the padding after a document; any token would do."""


@dataclass(frozen=True)
class DocumentPieces:
    """The documents of a split, those that are longer than a sequence cut into pieces of its length.

    A piece has `length` inputs and as many targets, the last of which is the first input of the next piece.
    """

    begin: Indices
    """(pieces,): index in the store's tokens of each piece's first input."""
    length: Indices
    """(pieces,): number of its inputs."""


@dataclass(frozen=True)
class PaddedDocuments(TokenSamples):
    """A piece of a document a sample."""

    pieces: DocumentPieces

    def __len__(self) -> int:
        return len(self.pieces.begin)

    def get(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, two int64 tensors of shape (indices, T)."""
        inputs = np.full((len(indices), self.sequence_length), PADDING, np.int64)
        targets = np.full_like(inputs, IGNORED_TARGET)
        for row, index in enumerate(indices):
            begin, length = self.pieces.begin[index], self.pieces.length[index]
            copy_piece(self.store, begin, inputs[row, :length], targets[row, :length])
        return torch.from_numpy(inputs), torch.from_numpy(targets)


def open_padded_documents(
    config: TokenDataConfig, store: TokenSource, sequence_length: int, split: str
) -> PaddedDocuments:
    """Open one split of a store with a document a sample. Raises UserError if the split has none."""
    return PaddedDocuments(config.name, store, sequence_length, cut_documents(config, store, sequence_length, split))


def cut_documents(config: TokenDataConfig, store: TokenSource, sequence_length: int, split: str) -> DocumentPieces:
    """Cut the documents of a split into pieces of at most a sequence. Raises UserError if the split has none."""
    bounds = np.append(store.documents, len(store.tokens))
    count = len(store.documents)
    boundary = count - round(count * config.validation_fraction)
    chosen = bounds[: boundary + 1] if split == "train" else bounds[boundary:]
    targets = np.diff(chosen) - 1
    parts = -(-np.maximum(targets, 0) // sequence_length)
    if not parts.sum():
        raise UserError(
            f"{store.path}: no document with two tokens for {split} among {count:,}: give more text, or change "
            "data.validation_fraction"
        )
    number = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)  # of a piece in its document
    offset = number * sequence_length
    return DocumentPieces(
        np.repeat(chosen[:-1], parts) + offset, np.minimum(np.repeat(targets, parts) - offset, sequence_length)
    )


def copy_piece(
    store: TokenSource, begin: np.int64, inputs: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]
) -> None:
    """Write a piece's inputs and targets into two arrays of its length."""
    tokens = store.tokens[begin : begin + len(inputs) + 1]
    inputs[:] = tokens[:-1]
    targets[:] = tokens[1:]
    if store.counted is not None:
        targets[store.counted[begin + 1 : begin + len(inputs) + 1] == 0] = IGNORED_TARGET
