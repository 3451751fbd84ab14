"""Mix sources by weights that may change during a run, as a pure function of the seed and the position in the run.

The source of each position comes from a table of one period, in which every source has exactly its share: weights are
exact fractions, and after any number of samples of a stage no source is a whole sample away from its share. A source's
own samples come in the order of sample_order, with a seed of its own, and after its last one in a new order.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, reduce
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from hpc_train.config.model import MixtureDataConfig, TokenDataConfig
from hpc_train.data.sample_order import order_samples
from hpc_train.errors import UserError

Indices = npt.NDArray[np.int64]
MAX_SLOTS = 100_000
"""Longest period: weights of more digits than this takes are refused, since shares would not be exact."""
_SEED_STEP = 0x9E3779B97F4A7C15
"""Distance of the seeds of two sources: 2^64 over the golden ratio, as in SplitMix64, so that no two are alike."""


@dataclass(frozen=True)
class Stage:
    """A part of a run with the same weights throughout."""

    begin: int
    """Position in the run of its first sample."""
    slots: npt.NDArray[np.int64]
    """(period,): source of each position, repeated until the next stage."""
    sources: int

    @cached_property
    def counts(self) -> Indices:
        """(sources,): slots of each source in a period."""
        return np.bincount(self.slots, minlength=self.sources).astype(np.int64)

    def count_before(self, samples: int) -> Indices:
        """Return how many of the stage's first `samples` each source gives, (sources,)."""
        periods, rest = divmod(samples, len(self.slots))
        return periods * self.counts + np.bincount(self.slots[:rest], minlength=self.sources)

    def choose(self, first: int, count: int) -> Indices:
        """Return the sources of the stage's samples [first, first + count)."""
        return self.slots[np.arange(first, first + count) % len(self.slots)]


@dataclass(frozen=True)
class MixtureOrder:
    """Which sample of which source stands at each position of a run."""

    stages: tuple[Stage, ...]
    sizes: tuple[int, ...]
    """Samples of each source."""

    def count_before(self, position: int) -> Indices:
        """Return how many samples each source gives before a position, (sources,)."""
        total = np.zeros(len(self.sizes), np.int64)
        for stage, end in zip(self.stages, [*(later.begin for later in self.stages[1:]), position], strict=True):
            if stage.begin < position:
                total += stage.count_before(min(end, position) - stage.begin)
        return total

    def choose_sources(self, start: int, count: int) -> Indices:
        """Return the source at each of the positions [start, start + count)."""
        parts = []
        ends = [*(later.begin for later in self.stages[1:]), start + count]
        for stage, end in zip(self.stages, ends, strict=True):
            first, last = max(start, stage.begin), min(end, start + count)
            if first < last:
                parts.append(stage.choose(first - stage.begin, last - first))
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def order(self, seed: int, start: int, count: int) -> Indices:
        """Return indices at [start, start + count), counted through all sources one after another."""
        sources, before = self.choose_sources(start, count), self.count_before(start)
        indices = np.empty(count, np.int64)
        offset = 0
        for source, size in enumerate(self.sizes):
            places = np.flatnonzero(sources == source)
            own_seed = (seed + (source + 1) * _SEED_STEP) % (1 << 64)
            indices[places] = offset + order_samples(own_seed, size, int(before[source]), len(places))
            offset += size
        return indices


def list_sources(config: MixtureDataConfig) -> list[TokenDataConfig]:
    """Return the config of each source. Raises UserError if there is none."""
    if not config.paths:
        raise UserError("data.paths: a mixture needs token stores or token files: data.paths=[FILE,FILE]")
    return [
        TokenDataConfig(
            name=path,
            path=path,
            dtype=config.dtype,
            vocab_size=config.vocab_size,
            samples=config.samples,
            separator=config.separator,
            validation_fraction=config.validation_fraction,
        )
        for path in config.paths
    ]


def check_mixture(config: MixtureDataConfig, sequence_length: int) -> list[TokenDataConfig]:
    """Return the config of each source. Raises UserError if there is none, or for weights that do not fit together."""
    sources = list_sources(config)
    make_config_order(config, [1] * len(sources), sequence_length)
    return sources


def make_config_order(config: MixtureDataConfig, sizes: Sequence[int], sequence_length: int) -> MixtureOrder:
    """Make the order of a config's mixture. sizes: samples of each source. Raises UserError as make_order."""
    changes = [-(-tokens // sequence_length) for tokens in config.later_tokens]
    if len(config.later_weights) != len(changes) * len(sizes):
        raise UserError(
            f"data.later_weights: {len(config.later_weights)} weights for {len(changes)} changes (data.later_tokens) "
            f"of {len(sizes)} sources; give {len(changes) * len(sizes)}"
        )
    later = [config.later_weights[row * len(sizes) :][: len(sizes)] for row in range(len(changes))]
    return make_order(sizes, [config.weights or [1.0] * len(sizes), *later], changes)


def make_order(sizes: Sequence[int], weights: Sequence[Sequence[float]], changes: Sequence[int]) -> MixtureOrder:
    """Make the order of a mixture.

    sizes: samples of each source. weights: of each source, for each stage. changes: positions at which the second and
    later stages begin. Raises UserError for weights that do not fit together.
    """
    assert len(weights) == len(changes) + 1
    begins = [0, *changes]
    if any(later <= earlier for earlier, later in pairwise(begins)):
        raise UserError("data.later_tokens: each must be larger than the one before, by at least a sequence")
    for number, row in enumerate(weights):
        if len(row) != len(sizes):
            raise UserError(
                f"data.weights: {len(row)} weights for {len(sizes)} sources in stage {number}; give one each"
            )
        if min(row) < 0 or max(row) <= 0:
            raise UserError(f"data.weights: weights are 0 or more, and one of them more; not {list(row)}")
    stages = [Stage(begin, make_slots(row), len(sizes)) for begin, row in zip(begins, weights, strict=True)]
    return MixtureOrder(tuple(stages), tuple(sizes))


def make_slots(weights: Sequence[float]) -> npt.NDArray[np.int64]:
    """Return the sources of one period, in which each has exactly its share and is never a sample away from it.

    The j-th of n samples of a source in a period of D has its place in [floor(j D / n), ceil((j + 1) D / n)), and the
    earliest end goes first: the proportionate fair scheduling of one processor (Baruah et al. 1996,
    doi:10.1007/BF01940883). Raises UserError for weights whose period is longer than MAX_SLOTS.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    scale = reduce(math.lcm, (share.denominator for share in exact))
    scaled = [int(share * scale) for share in exact]
    divisor = math.gcd(*scaled)
    counts = [share // divisor for share in scaled]
    period = sum(counts)
    if period > MAX_SLOTS:
        raise UserError(
            f"data.weights={list(weights)}: exact shares repeat only after {period:,} samples; round the weights to at "
            "most four digits"
        )
    slots = np.empty(period, np.int64)
    waiting = [(0, source) for source, count in enumerate(counts) if count]  # by the slot that releases them
    given = [0] * len(counts)
    ready: list[tuple[int, int]] = []  # by their last slot
    for slot in range(period):
        while waiting and waiting[0][0] <= slot:
            source = heapq.heappop(waiting)[1]
            heapq.heappush(ready, (-(-(given[source] + 1) * period // counts[source]), source))
        source = heapq.heappop(ready)[1]
        slots[slot] = source
        given[source] += 1
        if given[source] < counts[source]:
            heapq.heappush(waiting, (given[source] * period // counts[source], source))
    return slots
