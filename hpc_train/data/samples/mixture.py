"""A dataset whose samples come from several sources; mixture_order says which one at which position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpc_train.data.sample_order import order_samples
from hpc_train.data.samples.document_samples import PaddedDocuments
from hpc_train.data.samples.mixture_order import MixtureOrder
from hpc_train.data.samples.packed_samples import PackedDocuments
from hpc_train.data.samples.token_samples import TokenDataset

if TYPE_CHECKING:
    from hpc_train.interfaces import ModelInputs

Indices = npt.NDArray[np.int64]
MixtureSource: TypeAlias = TokenDataset | PaddedDocuments | PackedDocuments


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

    def get(self, indices: Indices) -> tuple[ModelInputs, Tensor]:
        """Return inputs (of packed samples, several by name) and targets: int64 tensors of shape (indices, T)."""
        bounds = np.cumsum([0, *(len(source) for source in self.sources)])
        owner = np.searchsorted(bounds, indices, side="right") - 1
        parts = [(np.flatnonzero(owner == source), source) for source in np.unique(owner)]
        rows = [self.sources[source].get(indices[places] - bounds[source]) for places, source in parts]
        # The sources' rows one after another, put back to where they were asked for.
        back = torch.from_numpy(np.argsort(np.concatenate([places for places, _ in parts])))
        return _join_inputs([inputs for inputs, _ in rows], back), torch.cat([targets for _, targets in rows])[back]

    def describe_run(self, samples: int) -> list[str]:
        """Say what share each source has of a run, and how often it is read."""
        if self.mixture is None:
            return []
        counts = self.mixture.count_before(samples)
        lines = []
        for source, count in zip(self.sources, counts, strict=True):
            epochs = count / len(source)
            repetition = ", repeated in a new order each time" if count > len(source) else ""
            lines.append(f"{source.name}: {count:,} of {samples:,} samples, {epochs:.2f} epochs{repetition}")
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


def _join_inputs(parts: Sequence[ModelInputs], order: Tensor) -> ModelInputs:
    """Join rows of several sources, all of them tensors or all of them tensors of the same names."""
    joined: dict[str, list[Tensor]] = {}
    for part in parts:
        for name, tensor in (part if isinstance(part, dict) else {"": part}).items():
            joined.setdefault(name, []).append(tensor)
    inputs = {name: torch.cat(tensors)[order] for name, tensors in joined.items()}
    return inputs if isinstance(parts[0], dict) else inputs[""]
