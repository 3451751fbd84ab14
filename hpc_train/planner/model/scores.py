"""Attention that is not one fused causal kernel: windows and soft-caps, and how transformers computes them.

Our own models have FlexAttention for them, which skips the keys that no query sees and stores no scores. transformers
gives a window to torch's kernel as a mask of all pairs, and computes soft-caps by plain operations (eager), which store
the scores of every head for backward.
"""

from __future__ import annotations

import numpy as np

from hpc_train.planner.constants import Constants
from hpc_train.planner.model.jobs import Column, Jobs

_WIDE = 4.0
"""Bytes of an fp32 element."""
_EAGER_PASSES, _CAP_PASSES = 14.0, 6.0
"""Passes over stored scores in 16 bits: scale 2, mask 2, to fp32 3, softmax 4, back 3; a soft-cap divides, takes tanh
and multiplies."""


def pair_share(jobs: Jobs) -> Column:
    """Return the pairs of query and key that a fused kernel computes, over those of causal attention."""
    found: Column = np.where(jobs.masked_share > 0, 1 + jobs.masked_share, jobs.seen_share)
    return found


def count_score_passes(jobs: Jobs, constants: Constants) -> Column:
    """Return the passes of forward over scores that are in memory."""
    eager = _EAGER_PASSES + _CAP_PASSES * jobs.capped_scores
    found: Column = np.where(jobs.stored_scores > 0, eager, constants.score_passes)
    return found


def add_scores(jobs: Jobs, everything: Column, some: Column) -> tuple[Column, Column]:
    """Add what a layer stores of its scores to its activation bytes per token: (without recomputation, selective).

    Of each score the softmax in fp32 is stored, as the product with the values reads it, and tanh of a soft-cap.
    Selective recomputation stores the product itself. Where scores are stored or masked, keys and values are repeated
    for every head. A mask is converted to the format of queries in every layer.
    """
    item = jobs.activation_bytes
    scores = jobs.heads / jobs.tp * jobs.sequence * jobs.stored_scores
    kept = np.where(item == _WIDE, _WIDE, _WIDE + item) + jobs.capped_scores * item
    more_heads = np.maximum(jobs.heads / jobs.tp - jobs.rank_key_heads, 0)
    repeated = 2 * more_heads * jobs.head_dim * item * np.maximum(jobs.stored_scores, jobs.masked_share)
    masks = jobs.masked_share * jobs.sequence * item
    return everything + scores * kept + repeated + masks, some + scores * item


def stored_scores_working(jobs: Jobs, tokens: Column) -> Column:
    """Return the bytes that the backward of attention with stored scores needs: two gradients in fp32."""
    found: Column = tokens * jobs.heads / jobs.tp * jobs.sequence * jobs.stored_scores * 2 * _WIDE
    return found
