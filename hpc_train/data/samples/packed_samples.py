"""Samples that hold several whole documents one after another, none of which sees another.

For each token, a sample gives the index at which the token's document begins. From that the model gets positions that
restart, and attention within documents only. A document's last token is a target only, so that no target is of another
document.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpc_train.config.model import TokenDataConfig
from hpc_train.data.samples.document_samples import PADDING, DocumentPieces, copy_piece, cut_documents
from hpc_train.data.samples.token_samples import TokenSamples
from hpc_train.data.token_files import TokenSource
from hpc_train.interfaces import DOCUMENT_STARTS, IGNORED_TARGET

Indices = npt.NDArray[np.int64]
TOKENS = "x"
"""Name of the tokens, as the argument of Transformer.forward is called."""


@dataclass(frozen=True)
class PackedDocuments(TokenSamples):
    """As many consecutive pieces of documents a sample as fit."""

    pieces: DocumentPieces
    first: Indices
    """(samples + 1,): the first piece of each sample, and the number of all pieces."""

    def __len__(self) -> int:
        return len(self.first) - 1

    def get(self, indices: Indices) -> tuple[dict[str, Tensor], Tensor]:
        """Return tokens and document starts by name, and targets: int64 tensors of shape (indices, T)."""
        inputs = np.full((len(indices), self.sequence_length), PADDING, np.int64)
        targets = np.full_like(inputs, IGNORED_TARGET)
        starts = np.empty_like(inputs)
        for row, index in enumerate(indices):
            place = 0
            for piece in range(self.first[index], self.first[index + 1]):
                end = place + self.pieces.length[piece]
                copy_piece(self.store, self.pieces.begin[piece], inputs[row, place:end], targets[row, place:end])
                starts[row, place:end] = place
                place = end
            starts[row, place:] = place  # the padding is a document of its own
        return {TOKENS: torch.from_numpy(inputs), DOCUMENT_STARTS: torch.from_numpy(starts)}, torch.from_numpy(targets)


def open_packed_documents(
    config: TokenDataConfig, store: TokenSource, sequence_length: int, split: str
) -> PackedDocuments:
    """Open one split of tokens in packed samples. Raises UserError if the split has no document."""
    pieces = cut_documents(config, store, sequence_length, split)
    return PackedDocuments(config.name, store, sequence_length, pieces, pack_pieces(pieces.length, sequence_length))


def pack_pieces(lengths: Indices, sequence_length: int) -> Indices:
    """Return the first piece of each sample, and the number of all: a sample ends where the next piece does not fit.

    The samples depend on the order of the documents alone, and are the same at every start.
    """
    ends = np.cumsum(lengths)
    first, done = [0], 0
    # `done` is the number of tokens before the current sample; a binary search finds where it is full.
    while first[-1] < len(lengths):
        first.append(int(np.searchsorted(ends, done + sequence_length, side="right")))
        done = int(ends[first[-1] - 1])
    return np.array(first, np.int64)
