"""A dataset whose samples come from several sources; mixture_order says which one at which position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hpc_train.data.sample_order import order_samples
from hpc_train.data.samples.document_samples import PaddedDocuments
from hpc_train.data.samples.mixture_order import MixtureOrder
from hpc_train.data.samples.token_samples import TokenDataset

Indices = npt.NDArray[np.int64]
MixtureSource: TypeAlias = TokenDataset | PaddedDocuments


@dataclass(frozen=True)
class MixtureDataset:
    """Samples of several sources; an index counts through all sources one after another."""

    name: str
    sources: tuple[MixtureSource, ...]
    mixture: MixtureOrder | None
    """None: the samples of all sources alike, as in validation."""

    def __len__(self) -> int:
        return sum(len(source) for source in self.sources)

    def order(self, seed: int, start: int, count: int) -> Indices:
        """Return the indices at the positions [start, start + count) of a run."""
        if self.mixture is None:
            return order_samples(seed, len(self), start, count)
        return self.mixture.order(seed, start, count)

    def get(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, two int64 tensors of shape (indices, T)."""
        bounds = np.cumsum([0, *(len(source) for source in self.sources)])
        owner = np.searchsorted(bounds, indices, side="right") - 1
        rows: list[tuple[Tensor, Tensor]] = []
        for source in np.unique(owner):
            rows.append(self.sources[source].get(indices[owner == source] - bounds[source]))
        inputs, targets = (rows[0][part].new_empty(len(indices), self.tokens_per_sample) for part in (0, 1))
        for source, (its_inputs, its_targets) in zip(np.unique(owner), rows, strict=True):
            places = np.flatnonzero(owner == source)
            inputs[places], targets[places] = its_inputs, its_targets
        return inputs, targets

    def describe_run(self, samples: int) -> list[str]:
        """Say what share each source has of a run, and how often it is read."""
        if self.mixture is None:
            return []
        counts = self.mixture.count_before(samples)
        lines = []
        for source, count in zip(self.sources, counts, strict=True):
            epochs = count / len(source)
            again = ", repeated in a new order each time" if count > len(source) else ""
            lines.append(f"{source.name}: {count:,} of {samples:,} samples, {epochs:.2f} epochs{again}")
        return lines

    @property
    def tokens_per_sample(self) -> int:
        return self.sources[0].tokens_per_sample

    @property
    def vocab_size(self) -> int:
        return max(source.vocab_size for source in self.sources)

    @property
    def classes(self) -> None:
        return None

    @property
    def unigram_entropy(self) -> None:
        return None
