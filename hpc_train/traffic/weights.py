"""The parameters of a model tensor by tensor, and what one rank of the tp axis holds of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from hpc_train.config.model import ModelConfig, TransformerConfig, VisionTransformerConfig
from hpc_train.models.shape import compute_head_dim, count_kv_heads, count_vit_tokens

Split = Literal["outputs", "inputs", "vocabulary", "heads", "whole"]
"""Over tp: outputs (column-parallel) or inputs (row-parallel) in equal parts; a vocabulary, whose last part is short;
the outputs of keys and values, where their heads divide; not at all."""


@dataclass(frozen=True)
class Weight:
    """One parameter of a model."""

    shape: tuple[int, ...]
    split: Split = "whole"
    summed: bool = False
    """Where tp splits positions: each rank has the gradient of its own only, and they are added up over tp."""

    @property
    def count(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Weights:
    """The parameters of a model, in its own order."""

    before: tuple[Weight, ...]
    """Of the embedding."""
    block: tuple[Weight, ...]
    """Of each block."""
    after: tuple[Weight, ...]
    """Of the last norm and the head; where embeddings are tied, without the table."""
    blocks: int
    tied: Weight | None = None
    """The table, which the last stage of a pipeline holds too."""


def list_weights(model: ModelConfig) -> Weights | None:
    """List the parameters of a model; None for a custom model, whose shape only it knows."""
    if isinstance(model, TransformerConfig):
        return _transformer(model)
    return _vit(model) if isinstance(model, VisionTransformerConfig) else None


@dataclass(frozen=True)
class Splitting:
    """Over how many ranks a parameter is cut up."""

    tp: int
    heads: int
    """Of keys and values."""
    vocabulary: bool
    """Whether tp splits it."""
    shards: int = 1
    """Ranks that share the rows of what is left, in parts that are filled up to equal size (fully_shard)."""


def held_elements(weights: Iterable[Weight], how: Splitting) -> int:
    """Count the numbers that a rank of tp holds in all shards together, filled up; the most that any rank has."""
    return sum(held_elements_of(weight, how) for weight in weights)


def held_elements_of(weight: Weight, how: Splitting) -> int:
    """Return the numbers held of one parameter; see held_elements."""
    rows, others = weight.shape[0], math.prod(weight.shape[1:])
    if weight.split == "outputs" or (weight.split == "heads" and how.heads % how.tp == 0):
        rows //= how.tp
    elif weight.split == "vocabulary" and how.vocabulary:
        rows = -(-rows // how.tp)
    elif weight.split == "inputs":
        others //= how.tp
    return -(-rows // how.shards) * how.shards * others


def partial_gradient_sizes(weights: Iterable[Weight], tp: int, heads: int, sequence: bool) -> list[int]:
    """Sizes of the parameters that every rank of tp holds whole, but of whose gradient it has a summand only.

    Those that work on a rank's own positions (sequence), and keys and values whose heads do not divide.
    """
    if tp == 1:
        return []
    return [
        weight.count for weight in weights if (weight.summed and sequence) or (weight.split == "heads" and heads % tp)
    ]


def _linear(inputs: int, outputs: int, bias: bool, split: Split) -> list[Weight]:
    """The weight and the bias, which is split with the outputs: in a row-parallel layer it is whole."""
    weight = Weight((outputs, inputs), split)
    if not bias:
        return [weight]
    return [weight, Weight((outputs,), summed=True) if split == "inputs" else Weight((outputs,), split)]


def _norm(hidden: int, bias: bool) -> list[Weight]:
    return [Weight((hidden,), summed=True)] * (2 if bias else 1)


def _transformer(model: TransformerConfig) -> Weights:
    hidden, bias = model.hidden, model.bias
    norm = _norm(hidden, model.norm == "layernorm" and bias)
    queries, keys = model.heads * compute_head_dim(model), count_kv_heads(model) * compute_head_dim(model)
    attention = _linear(hidden, queries, bias, "outputs") + 2 * _linear(hidden, keys, bias, "heads")
    attention += _linear(queries, hidden, bias, "inputs")
    branches = 2 if model.activation == "swiglu" else 1
    wide = branches * _linear(hidden, model.feed_forward, bias, "outputs")
    wide += _linear(model.feed_forward, hidden, bias, "inputs")
    table = Weight((model.vocab_size, hidden), "vocabulary")
    positions = [Weight((model.max_positions, hidden), summed=True)] if model.positions == "learned" else []
    block = (*norm, *attention, *norm, *wide)
    if model.tied_embeddings:
        return Weights((table, *positions), block, (*norm,), model.layers, table)
    return Weights((table, *positions), block, (*norm, table), model.layers)


def _vit(model: VisionTransformerConfig) -> Weights:
    """Its plan splits the layers of blocks only, and no positions."""
    hidden = model.hidden
    norm = [Weight((hidden,))] * 2
    attention = 3 * _linear(hidden, hidden, True, "outputs") + _linear(hidden, hidden, True, "inputs")
    wide = _linear(hidden, model.feed_forward, True, "outputs")
    wide += _linear(model.feed_forward, hidden, True, "inputs")
    patches = Weight((hidden, model.channels, model.patch_size, model.patch_size)), Weight((hidden,))
    tokens = Weight((1, 1, hidden)), Weight((1, count_vit_tokens(model), hidden))
    head = Weight((model.classes, hidden)), Weight((model.classes,))
    return Weights((*tokens, *patches), (*norm, *attention, *norm, *wide), (*norm, *head), model.layers)
