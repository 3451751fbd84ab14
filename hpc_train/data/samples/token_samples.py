"""Samples of tokens: what all kinds have in common, and samples that are cut one after another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpc_train.data.token_files import TokenSource
from hpc_train.data.token_store import TokenStore, compute_unigram_entropy
from hpc_train.interfaces import IGNORED_TARGET

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenSamples:
    """Sequences of tokens of one length, out of a store or a file of tokens."""

    name: str
    store: TokenSource
    sequence_length: int

    @property
    def tokens_per_sample(self) -> int:
        return self.sequence_length

    @property
    def vocab_size(self) -> int:
        return self.store.vocab_size

    @property
    def classes(self) -> None:
        return None

    @cached_property
    def unigram_entropy(self) -> float | None:
        """Loss of a unigram model; None if its targets would differ from those of the samples."""
        return None


@dataclass(frozen=True)
class TokenDataset(TokenSamples):
    """Adjacent sequences of T tokens: sample i reads tokens [iT, iT + T] of its split; targets are shifted by one."""

    begin: int
    end: int
    boundary: int
    """Index in the store at which the validation split begins."""

    def __len__(self) -> int:
        return (self.end - self.begin - 1) // self.sequence_length

    def get(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, two int64 tensors of shape (indices, T)."""
        rows = self._cut(self.store.tokens)[indices].astype(np.int64)
        inputs, targets = rows[:, :-1], rows[:, 1:]
        if self.store.counted is not None:
            targets = np.where(self._cut(self.store.counted)[indices][:, 1:], targets, IGNORED_TARGET)
        return torch.from_numpy(np.ascontiguousarray(inputs)), torch.from_numpy(np.ascontiguousarray(targets))

    @cached_property
    def unigram_entropy(self) -> float | None:
        if not isinstance(self.store, TokenStore) or self.store.counted is not None:
            return None  # its counts are not known, or are of other targets
        return compute_unigram_entropy(self.store, self.boundary)

    def _cut(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """View a memory map as (samples, T + 1), without a copy; neighbouring rows share a token."""
        windows = np.lib.stride_tricks.sliding_window_view(values[self.begin : self.end], self.sequence_length + 1)
        return windows[:: self.sequence_length]
