"""Scaling laws for the batch size and the learning rate.

All are fits to published runs and are right within a factor of about two. The gradient noise scale that a run measures
itself (train.noise_scale) is more reliable.
"""

from __future__ import annotations

import math

STEP_LAW = (0.58, 0.571)
"""Tokens of the best batch = 0.58 D^0.571 for D tokens to train on (Li et al. 2025, arXiv:2503.04715)."""
STEP_LAW_RATE = (1.79, -0.713, 0.307)
"""Best peak learning rate = 1.79 N^-0.713 D^0.307 for N parameters without embeddings (same paper)."""
CRITICAL_BATCH_FACTOR = 2.0
"""A batch counts as too large only beyond this multiple of the critical one, because the laws are no more precise."""


def critical_batch(tokens: float) -> float:
    """Return the critical batch, in tokens, of a run of `tokens` tokens: larger batches have diminishing returns.

    It grows with the amount of data and hardly with the model (Zhang et al. 2024, arXiv:2410.21676). Computed by the
    Step Law; at least 1.
    """
    factor, power = STEP_LAW
    return max(1.0, factor * math.pow(tokens, power))


def step_law_rate(parameters: float, tokens: float) -> float:
    """Return the best peak learning rate of AdamW by the Step Law. parameters: without embeddings."""
    factor, of_parameters, of_tokens = STEP_LAW_RATE
    return factor * math.pow(parameters, of_parameters) * math.pow(tokens, of_tokens)


def loss_factor(batch: float, critical: float) -> float:
    """Return how many times the tokens of a very small batch are needed for the same loss: 1 + B / B_critical.

    From (S / S_min - 1)(E / E_min - 1) = 1 with S steps of B = E / S examples (McCandlish et al. 2018,
    arXiv:1812.06162, eq. 2.11).
    """
    return 1 + batch / critical


def time_to_loss(seconds: float, batch: float, critical: float) -> float:
    """Scale a run's seconds by the additional tokens that its batch needs for the same loss, to compare batches."""
    return seconds * loss_factor(batch, critical)


def scaling_rule(optimizer: str) -> str:
    """Return the optim.lr_scaling for an optimizer.

    sqrt for Adam (Malladi et al. 2022, arXiv:2205.10287) and others whose updates do not grow with the gradient, linear
    for SGD (Goyal et al. 2017, arXiv:1706.02677).
    """
    return "sqrt" if optimizer.startswith(("adam", "adafactor", "muon")) else "linear"


def min_batch_for_bubble(data_parallel: int, micro_batch: int, pp: int, virtual_stages: int, bubble: float) -> int:
    """Return the smallest global batch, in sequences, for which (interleaved) 1F1B has at most this bubble.

    bubble: idle time as a share of the computing time.

    data_parallel x micro_batch x ceil((p - 1) / (v bubble)), and p micro-batches at least (Narayanan et al. 2021,
    arXiv:2104.04473, section 2.2).
    """
    needed = math.ceil((pp - 1) / (virtual_stages * bubble) - 1e-9) if pp > 1 else 1
    return data_parallel * micro_batch * max(needed, pp)
