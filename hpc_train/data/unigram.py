"""How well a model does that knows only how frequent each token is: the mark that a trained loss is held against."""

from __future__ import annotations

import numpy as np

from hpc_train.data.store import SLICE, Counts, Tokens, TokenStore


def count(tokens: Tokens, vocab_size: int) -> Counts:
    """How often each token occurs, (vocab_size,). Memory does not grow with the number of tokens."""
    total = np.zeros(vocab_size, np.int64)
    for start in range(0, len(tokens), SLICE):
        total += np.bincount(tokens[start : start + SLICE], minlength=vocab_size)
    return total


def entropy(counts: Counts) -> float:
    """Entropy of the distribution that `counts` describe, in nats; 0 where they are all 0."""
    seen = counts[counts > 0].astype(np.float64)
    total = seen.sum()
    return float(np.log(total) - (seen * np.log(seen)).sum() / total) if total else 0.0


def unigram_entropy(store: TokenStore, stop: int | None = None) -> float:
    """Loss of a unigram model of the first `stop` tokens (None: all) on those tokens, in nats per token.

    Only the shorter side of `stop` is read; the store knows the counts of the whole.
    """
    tokens = len(store.tokens)
    stop = tokens if stop is None else stop
    if stop * 2 < tokens:
        return entropy(count(store.tokens[:stop], store.vocab_size))
    return entropy(store.counts - count(store.tokens[stop:], store.vocab_size))
