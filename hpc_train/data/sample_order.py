"""Order the samples of a run as a pure function of the seed and the position in the run, with no state to save.

Each epoch visits every sample once, in an order of its own: a keyed permutation of [0, n), evaluated only at the
positions that are needed. Position p of the run belongs to epoch p // n. The number of ranks has no influence.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

ROUNDS = 8
"""Rounds of the Feistel network. Even, so that both halves are mixed alike; 4 are enough for a pseudorandom permutation
in theory."""

_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: the step between states of a SplitMix64 generator."""
_MASK = (1 << 64) - 1

Words = npt.NDArray[np.uint64]


def order_samples(seed: int, n: int, start: int, count: int) -> npt.NDArray[np.int64]:
    """Return the sample indices at positions [start, start + count) of a run over `n` samples, (count,).

    Time and memory depend on `count` alone. The result never changes between releases: a checkpoint holds only a
    position, and must resume with the samples that are left.
    """
    assert n > 0
    assert 0 <= start <= start + count < 1 << 63
    position = np.arange(start, start + count, dtype=np.uint64)
    epoch, index = np.divmod(position, np.uint64(n))
    return permute_indices(_make_keys(seed, epoch), n, index).astype(np.int64)


def permute_indices(keys: Words, n: int, index: Words) -> Words:
    """Return the image of each `index` < n under the permutation of [0, n) that its key selects.

    Generalised Feistel network with cycle walking (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"):
    the network permutes [0, a * b) with a * b >= n, and values outside of [0, n) go through it again.
    """
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    out = _run_network(keys, a, b, index)
    outside = np.flatnonzero(out >= n)
    while len(outside):  # few: a * b - n < a
        out[outside] = _run_network(keys[outside], a, b, out[outside])
        outside = outside[out[outside] >= n]
    return out


def _run_network(keys: Words, a: int, b: int, index: Words) -> Words:
    """Permute [0, a * b): each round adds a function of one half to the other half, and so can be undone."""
    high, low = np.divmod(index, np.uint64(b))
    for number in range(0, ROUNDS, 2):
        high = (high + _mix_bits(low ^ _make_round_keys(keys, number)) % np.uint64(a)) % np.uint64(a)
        low = (low + _mix_bits(high ^ _make_round_keys(keys, number + 1)) % np.uint64(b)) % np.uint64(b)
    return high * np.uint64(b) + low


def _make_keys(seed: int, epoch: Words) -> Words:
    """Return one key for each epoch: the outputs of a SplitMix64 generator whose state comes from the seed."""
    base = _mix_bits(np.array([(seed + _GOLDEN) & _MASK], np.uint64))
    return _mix_bits(base + (epoch + np.uint64(1)) * np.uint64(_GOLDEN))


def _make_round_keys(keys: Words, number: int) -> Words:
    return keys + np.uint64((number + 1) * _GOLDEN & _MASK)


def _mix_bits(x: Words) -> Words:
    """Mix bits by the finaliser of SplitMix64 (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
