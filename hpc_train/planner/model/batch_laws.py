"""How large a batch still pays, which learning rate goes with it, and what a batch that grows costs.

All laws are fits over runs of others: bands of a factor of two or so, for orientation. Where a run measures its own
gradient noise scale (train.noise_scale), that is what counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

STEP_LAW = (0.58, 0.571)
"""Tokens of the best batch = 0.58 D^0.571 for D tokens to train on (Li et al. 2025, arXiv:2503.04715)."""
STEP_LAW_RATE = (1.79, -0.713, 0.307)
"""Best peak learning rate = 1.79 N^-0.713 D^0.307 for N parameters without embeddings (same paper)."""
DEEPSEEK = (0.2920, 0.3271)
"""Tokens of the best batch = 0.2920 C^0.3271 for C FLOPs of training (DeepSeek-AI 2024, arXiv:2401.02954, sec. 3.1)."""
DEEPSEEK_RATE = (0.3118, -0.1250)
"""Best peak learning rate = 0.3118 C^-0.1250 (same paper)."""
CRITICAL_BATCH_FACTOR = 2.0
"""A batch is past the critical one beyond so many times it: less is within what the laws are sure of."""


def critical_batch(tokens: float) -> float:
    """Tokens in a step beyond which more of them buy less than they cost, for a run of so many tokens.

    It grows with the data and hardly with the model (Zhang et al. 2024, arXiv:2410.21676), as the Step Law has it. Not
    below 1.
    """
    factor, power = STEP_LAW
    return max(1.0, factor * math.pow(tokens, power))


def deepseek_batch(flops: float) -> float:
    """Tokens of the best batch for so many FLOPs of training."""
    factor, power = DEEPSEEK
    return factor * math.pow(flops, power)


def step_law_rate(parameters: float, tokens: float) -> float:
    """Best peak learning rate of AdamW by the Step Law; parameters without embeddings."""
    factor, of_parameters, of_tokens = STEP_LAW_RATE
    return factor * math.pow(parameters, of_parameters) * math.pow(tokens, of_tokens)


def deepseek_rate(flops: float) -> float:
    """Best peak learning rate of AdamW by DeepSeek's law."""
    factor, power = DEEPSEEK_RATE
    return factor * math.pow(flops, power)


def loss_factor(batch: float, critical: float) -> float:
    """Tokens to the same loss over those of a very small batch: 1 + B / B_critical.

    From (S / S_min - 1)(E / E_min - 1) = 1 with S steps of B = E / S examples (McCandlish et al. 2018,
    arXiv:1812.06162, eq. 2.11).
    """
    return 1 + batch / critical


def time_to_loss(seconds: float, batch: float, critical: float) -> float:
    """Seconds of a run at this batch, with the tokens that its size makes necessary; comparable between batches."""
    return seconds * loss_factor(batch, critical)


def scaling_rule(optimizer: str) -> str:
    """optim.lr_scaling that fits: sqrt for Adam (Malladi et al. 2022, arXiv:2205.10287), linear for SGD (Goyal et al.
    2017, arXiv:1706.02677)."""
    return "sqrt" if optimizer.startswith("adam") else "linear"


def scaled_rate(rate: float, ratio: float, rule: str) -> float:
    """Learning rate for `ratio` times the batch that `rate` was tuned at; it holds below the critical batch only."""
    return rate * {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[rule]


def min_batch_for_bubble(data_parallel: int, micro_batch: int, pp: int, virtual_stages: int, bubble: float) -> int:
    """Fewest sequences in a step with which 1F1B, or its interleaved form, idles at most `bubble` of the computation.

    data_parallel x micro_batch x ceil((p - 1) / (v bubble)), and p micro-batches at least (Narayanan et al. 2021,
    arXiv:2104.04473, section 2.2).
    """
    needed = math.ceil((pp - 1) / (virtual_stages * bubble) - 1e-9) if pp > 1 else 1
    return data_parallel * micro_batch * max(needed, pp)


@dataclass(frozen=True)
class RampStage:
    """A part of a run with one batch."""

    batch: int
    """Sequences in a step."""
    steps: int


def make_batch_ramp(start: int, end: int, increment: int, sequences: int) -> tuple[RampStage, ...]:
    """Batches start, start + increment, ..., end, of which all but the last share `sequences` evenly (as Megatron-LM's
    --rampup-batch-size has it); the last one has no steps here: it takes the rest of the run. Empty if start is end.

    `increment` divides end - start.
    """
    assert 0 < start <= end
    assert increment > 0
    assert (end - start) % increment == 0
    sizes = range(start, end, increment)
    share = sequences / len(sizes) if len(sizes) else 0.0
    return tuple(RampStage(size, math.ceil(share / size)) for size in sizes)


def ramp_cost(stages: tuple[RampStage, ...], full: int, seconds: Callable[[int], float]) -> float:
    """Seconds that a ramp takes beyond what the same sequences take at the full batch.

    seconds: of a step at a batch of so many sequences.
    """
    sequences = sum(stage.batch * stage.steps for stage in stages)
    return sum(stage.steps * seconds(stage.batch) for stage in stages) - sequences / full * seconds(full)
