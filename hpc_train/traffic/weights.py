"""List a model's parameters tensor by tensor, and count what one tp rank holds of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from hpc_train.config.model import ModelConfig, TransformerConfig, VisionTransformerConfig
from hpc_train.models.shape import (
    compute_expert_width,
    compute_head_dim,
    count_block_norms,
    count_branches,
    count_kv_heads,
    count_vit_tokens,
    has_latent_attention,
)

Split = Literal["outputs", "inputs", "vocabulary", "heads", "whole", "copied"]
"""How tp splits a parameter.

outputs: column-parallel, in equal parts. inputs: row-parallel, in equal parts. vocabulary: by rows; the last part may
be short. heads: as outputs if tp divides the number of key and value heads, else not at all. whole: not at all. copied:
not at all, with a gradient that is summed over tp. Stacks of experts have the experts as rows, and count as inputs.
"""


@dataclass(frozen=True)
class Weight:
    """One parameter of a model."""

    shape: tuple[int, ...]
    split: Split = "whole"
    summed: bool = False
    """Whether the gradient is summed over tp when tp splits positions, as each rank then sees only its own."""

    @property
    def count(self) -> int:
        return math.prod(self.shape)


FLOAT8_MULTIPLE = 16
"""Products of 8 bits need inner and outer sizes that are multiples of this."""
MXFP8_BLOCK = 32
"""Values that share a scale in MXFP8, whose products need sizes that are multiples of this."""


def has_float8_products(weight: Weight) -> bool:
    """Whether a weight of a block is that of a linear layer that precision.float8 converts."""
    # Routers are the only matrices that are copied over tp. They keep their format, as do stacks of experts.
    is_linear = len(weight.shape) == 2 and weight.split != "copied"
    return is_linear and all(size % FLOAT8_MULTIPLE == 0 for size in weight.shape)


@dataclass(frozen=True)
class Weights:
    """The parameters of a model, in the model's order."""

    before: tuple[Weight, ...]
    """Parameters of the embedding."""
    block: tuple[Weight, ...]
    """Parameters of one block, without the stacks of its experts."""
    after: tuple[Weight, ...]
    """Parameters of the last norm and the head; without the embedding table if it is tied."""
    blocks: int
    experts: tuple[Weight, ...] = ()
    """Stacks of the experts of one block, (experts, in, out); empty in a dense model."""
    dense_block: tuple[Weight, ...] = ()
    """Parameters of one of the first `dense_blocks` blocks, which have no experts."""
    dense_blocks: int = 0
    tied: Weight | None = None
    """The tied embedding table, which the last pipeline stage holds too."""


def list_weights(model: ModelConfig) -> Weights | None:
    """List the parameters of a model; None for a custom model, whose shapes are unknown."""
    if isinstance(model, TransformerConfig):
        return _list_transformer(model)
    return _list_vision_transformer(model) if isinstance(model, VisionTransformerConfig) else None


@dataclass(frozen=True)
class Splitting:
    """How parameters are split over ranks."""

    tp: int
    heads: int
    """Number of key and value heads."""
    vocabulary: bool
    """Whether tp splits the vocabulary."""
    shards: int = 1
    """Ranks over which fully_shard splits the rows that tp leaves, padded to equal parts."""


def count_rank_elements(weights: Iterable[Weight], how: Splitting) -> int:
    """Count the elements of one tp rank, all fully_shard shards together, padding included; the most of any rank."""
    return sum(count_rank_elements_of(weight, how) for weight in weights)


def count_rank_elements_of(weight: Weight, how: Splitting) -> int:
    """Count the elements of one parameter; see count_rank_elements."""
    rows, others = weight.shape[0], math.prod(weight.shape[1:])
    # Key and value heads that tp does not divide are whole on every rank: no branch applies to them.
    if weight.split == "outputs" or (weight.split == "heads" and how.heads % how.tp == 0):
        rows //= how.tp
    elif weight.split == "vocabulary" and how.vocabulary:
        rows = -(-rows // how.tp)
    elif weight.split == "inputs":
        others //= how.tp
    # fully_shard pads the rows to a multiple of the shards; -(-a // b) rounds a / b up.
    return -(-rows // how.shards) * how.shards * others


def list_partial_gradient_sizes(weights: Iterable[Weight], tp: int, heads: int, sequence: bool) -> list[int]:
    """Return the sizes of the parameters that every tp rank holds whole and whose gradients are summed over tp.

    These are norms and biases that see only a rank's own positions (sequence: tp splits positions), and the projections
    to keys and values if tp does not divide their heads.
    """
    if tp == 1:
        return []
    return [
        weight.count
        for weight in weights
        if (weight.summed and sequence) or weight.split == "copied" or (weight.split == "heads" and heads % tp)
    ]


def _list_linear(inputs: int, outputs: int, bias: bool, split: Split) -> list[Weight]:
    """List weight and bias of a linear layer. The bias is split with the outputs: whole in a row-parallel layer."""
    weight = Weight((outputs, inputs), split)
    if not bias:
        return [weight]
    return [weight, Weight((outputs,), summed=True) if split == "inputs" else Weight((outputs,), split)]


def _list_norm(hidden: int, bias: bool) -> list[Weight]:
    return [Weight((hidden,), summed=True)] * (2 if bias else 1)


def _list_transformer(model: TransformerConfig) -> Weights:
    hidden, bias = model.hidden, model.bias
    norm = _list_norm(hidden, model.norm == "layernorm" and bias)
    attention = _list_latent_attention(model) if has_latent_attention(model) else _list_attention(model)
    feed_forward = count_branches(model) * _list_linear(hidden, model.feed_forward, bias, "outputs")
    feed_forward += _list_linear(model.feed_forward, hidden, bias, "inputs")
    table = Weight((model.vocab_size, hidden), "vocabulary")
    positions = [Weight((model.max_positions, hidden), summed=True)] if model.positions == "learned" else []
    norms = count_block_norms(model) // 2 * norm  # before, and maybe after, each of the two layers
    dense = (*norms, *attention, *norms, *feed_forward)
    weights = Weights((table, *positions), dense, (*norm, table), model.layers)
    if model.experts.count:
        mixture = (*norms, *attention, *norms, *_list_router_and_shared(model))
        weights = replace(weights, block=mixture, experts=_list_expert_stacks(model))
        weights = replace(weights, dense_block=dense, dense_blocks=model.experts.first_dense)
    return replace(weights, after=(*norm,), tied=table) if model.tied_embeddings else weights


def _list_attention(model: TransformerConfig) -> list[Weight]:
    hidden, bias = model.hidden, model.bias
    queries, keys = model.heads * compute_head_dim(model), count_kv_heads(model) * compute_head_dim(model)
    attention = _list_linear(hidden, queries, bias, "outputs") + 2 * _list_linear(hidden, keys, bias, "heads")
    attention += _list_linear(queries, hidden, bias, "inputs")
    if model.query_key_norm == "head":
        attention += 2 * [Weight((compute_head_dim(model),), "copied")]
    elif model.query_key_norm == "full":
        attention += [Weight((queries,), "outputs"), Weight((keys,), "heads")]
    return attention


def _list_latent_attention(model: TransformerConfig) -> list[Weight]:
    """List the weights of latent attention: tp splits the matrices that expand latents, not those that make them."""
    latent, hidden, queries = model.latent, model.hidden, model.heads * compute_head_dim(model)
    narrow = latent.kv_rank + latent.rope_head_dim
    expanded = model.heads * (latent.nope_head_dim + latent.value_head_dim)
    weights = (
        []
        if latent.q_rank is None
        else [Weight((latent.q_rank, hidden), summed=True), *_list_norm(latent.q_rank, False)]
    )
    weights += _list_linear(latent.q_rank or hidden, queries, False, "outputs")
    weights += [Weight((narrow, hidden), summed=True), *_list_norm(latent.kv_rank, False)]
    weights += _list_linear(latent.kv_rank, expanded, False, "outputs")
    return weights + _list_linear(model.heads * latent.value_head_dim, hidden, False, "inputs")


def _list_router_and_shared(model: TransformerConfig) -> list[Weight]:
    """List the weights of a mixture that every rank of ep holds."""
    router = Weight((model.experts.count, model.hidden), "copied")
    width = model.experts.shared * compute_expert_width(model)
    if not width:
        return [router]
    shared = 2 * _list_linear(model.hidden, width, False, "outputs") + _list_linear(
        width, model.hidden, False, "inputs"
    )
    return [router, *shared]


def _list_expert_stacks(model: TransformerConfig) -> tuple[Weight, ...]:
    count, hidden, width = model.experts.count, model.hidden, compute_expert_width(model)
    up, down = Weight((count, hidden, width), "inputs"), Weight((count, width, hidden), "inputs")
    return up, up, down


def _list_vision_transformer(model: VisionTransformerConfig) -> Weights:
    """List a vision transformer's parameters. Its tensor plan splits only the layers of blocks, and never positions."""
    hidden = model.hidden
    norm = [Weight((hidden,))] * 2
    attention = 3 * _list_linear(hidden, hidden, True, "outputs") + _list_linear(hidden, hidden, True, "inputs")
    feed_forward = _list_linear(hidden, model.feed_forward, True, "outputs")
    feed_forward += _list_linear(model.feed_forward, hidden, True, "inputs")
    patches = Weight((hidden, model.channels, model.patch_size, model.patch_size)), Weight((hidden,))
    tokens = Weight((1, 1, hidden)), Weight((1, count_vit_tokens(model), hidden))
    head = Weight((model.classes, hidden)), Weight((model.classes,))
    return Weights((*tokens, *patches), (*norm, *attention, *norm, *feed_forward), (*norm, *head), model.layers)
