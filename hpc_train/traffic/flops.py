"""FLOPs of a step: what the model asks for, and what the hardware does."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hpc_train.config.model import ModelConfig, TransformerConfig, VisionTransformerConfig
from hpc_train.config.run import RunConfig
from hpc_train.models.shape import flops_per_token, head_dim, vit_tokens
from hpc_train.traffic.weights import Weights, weights_of

Attention = Literal["causal", "full"]


@dataclass(frozen=True)
class Flops:
    """Of one step of the whole job."""

    forward: float
    backward: float
    """Twice the forward: a product for the inputs and one for the weights of each."""
    recomputed: float
    """Forwards of blocks that parallel.recompute runs again."""
    scores: float
    """Backward of fused attention computes the scores of its forward again (Dao et al. 2022, arXiv:2205.14135)."""

    @property
    def model(self) -> float:
        """What MFU is computed from."""
        return self.forward + self.backward

    @property
    def hardware(self) -> float:
        """What is really computed."""
        return self.model + self.recomputed + self.scores


def step_flops(config: RunConfig, attention: Attention = "causal") -> Flops | None:
    """FLOPs of a step of `config`, matrix products only (models.shape.flops_per_token); None for a custom model.

    attention: causal counts the pairs of a token and those before it, as MFU and fused kernels do; full all pairs, as
    plain attention computes and most counters of operators say. An image has no order: all pairs, whichever it is.
    """
    weights = weights_of(config.model)
    if weights is None:
        return None
    targets = config.train.global_batch * (config.train.sequence_length if _is_text(config.model) else 1)
    told = flops_per_token(config.model, config.train.sequence_length)
    assert told is not None
    pairs = _attention(config.model, config.train.sequence_length) / 3
    linear = told / 3 - pairs
    pairs *= 2 if attention == "full" and _is_text(config.model) else 1
    forward = targets * (linear + pairs)
    again = targets * _recomputed(config, weights, pairs)
    return Flops(forward, 2 * forward, again, targets * pairs / 2)


def _is_text(model: ModelConfig) -> bool:
    return isinstance(model, TransformerConfig)


def _attention(model: ModelConfig, length: int) -> float:
    """Of a target, forward and backward: products of queries and keys, and with values."""
    if isinstance(model, TransformerConfig):
        return 6.0 * model.layers * model.heads * head_dim(model) * length
    assert isinstance(model, VisionTransformerConfig)
    return 12.0 * model.layers * model.hidden * vit_tokens(model) ** 2


def _recomputed(config: RunConfig, weights: Weights, pairs: float) -> float:
    """Of a target; `pairs`: of the attention of all blocks, forward.

    torch stops when it has what backward needs, which the product at the end of a block is not. A stage of a pipeline
    counts its blocks from its own first one; here all of them are one stage.
    """
    options = config.parallel.recompute
    if options.mode == "none":
        return 0.0
    blocks = -(-weights.blocks // options.every)
    kept = options.keep if options.mode == "selective" else []
    products = [math.prod(weight.shape) for weight in weights.block if len(weight.shape) > 1]
    tokens = 1 if _is_text(config.model) else vit_tokens(config.model)  # type: ignore[arg-type]
    linear = 0.0 if "mm" in kept else 2.0 * tokens * sum(products[:-1])
    return blocks * (linear + (0.0 if "attention" in kept else pairs / weights.blocks))
