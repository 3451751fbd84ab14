"""Sequences of tokens as samples of masked language modelling and of encoder-decoders.

Each sample is a pure function of (seed, its index): the same at any layout and after any resume.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hpc_train.data.datasets import Dataset, Indices
from hpc_train.interfaces import IGNORED_TARGET

if TYPE_CHECKING:
    from hpc_train.interfaces import ModelInputs

MASKED, REPLACED, UNCHANGED = 0.15, 0.1, 0.1
"""Share of tokens to predict, and of these, shares that become a random token or stay (Devlin et al. 2018)."""


@dataclass(frozen=True)
class _TaskDataset:
    """A dataset of sequences, whose other properties stay."""

    base: Dataset

    def __len__(self) -> int:
        return len(self.base)

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def tokens_per_sample(self) -> int:
        return self.base.tokens_per_sample

    @property
    def vocab_size(self) -> int | None:
        return self.base.vocab_size

    @property
    def classes(self) -> None:
        return None

    @property
    def unigram_entropy(self) -> None:
        return None


@dataclass(frozen=True)
class MaskedDataset(_TaskDataset):
    """Sequences in which some tokens are hidden; only these are targets."""

    seed: int
    mask_token: int

    def get(self, indices: Indices) -> tuple[ModelInputs, Tensor]:
        """Return inputs with hidden tokens and targets, IGNORED_TARGET where nothing is hidden; each (indices, T)."""
        tokens, _ = self.base.get(indices)
        assert isinstance(tokens, Tensor)
        rows = [self._mask_row(row, int(index)) for row, index in zip(tokens, indices, strict=True)]
        return torch.stack([inputs for inputs, _ in rows]), torch.stack([targets for _, targets in rows])

    def _mask_row(self, tokens: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Hide at least one token of a sequence."""
        draw = np.random.default_rng([self.seed, index])
        count = len(tokens)
        hidden = draw.random(count) < MASKED
        if not hidden.any():
            hidden[draw.integers(count)] = True
        how, random = draw.random(count), draw.integers(self.vocab_size or 1, size=count)
        inputs, targets = tokens.numpy().copy(), np.full(count, IGNORED_TARGET)
        targets[hidden] = inputs[hidden]
        inputs[hidden & (how < 1 - UNCHANGED)] = self.mask_token
        replaced = hidden & (how < REPLACED)
        inputs[replaced] = random[replaced]
        return torch.from_numpy(inputs), torch.from_numpy(targets)


@dataclass(frozen=True)
class ContinuationDataset(_TaskDataset):
    """The first half of each sequence for the encoder, the second half for the decoder to say."""

    start_token: int

    @property
    def tokens_per_sample(self) -> int:
        return self.base.tokens_per_sample - self.base.tokens_per_sample // 2

    def get(self, indices: Indices) -> tuple[ModelInputs, Tensor]:
        """Return input_ids and decoder_input_ids, and the tokens that follow the latter as targets."""
        tokens, _ = self.base.get(indices)
        assert isinstance(tokens, Tensor)
        half = tokens.shape[1] // 2
        first, second = tokens[:, :half], tokens[:, half:]
        start = torch.full_like(second[:, :1], self.start_token)
        inputs = {
            "input_ids": first.contiguous(),
            "decoder_input_ids": torch.cat((start, second[:, :-1]), dim=1),
        }
        return inputs, second.contiguous()
