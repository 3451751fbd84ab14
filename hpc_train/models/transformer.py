"""A decoder-only transformer of the Llama or the GPT family, whole or one pipeline stage of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpc_train.config.model import TransformerConfig
from hpc_train.models import shape
from hpc_train.models.attention_kernels import DocumentMask
from hpc_train.models.dropout import Dropout
from hpc_train.models.layers import (
    Attention,
    Block,
    BlockModel,
    ScaledDotProduct,
    SwiGLU,
    add_query_key_norms,
    find_stage_ends,
    get_block_index,
    list_block_names,
    make_feed_forward,
    make_rotary_table,
    make_stage_blocks,
    match_tensor_plan,
)
from hpc_train.models.plain_attention import ScoreRule

TENSOR_PLAN = {
    "embed": "vocab",
    "positions": "seq",
    "layers.*.attention_norm": "seq",
    "layers.*.attention.[qkv]": "col",
    "layers.*.attention.[qk]_norm": "heads",
    "layers.*.attention.q_a": "seq",
    "layers.*.attention.q_a_norm": "seq",
    "layers.*.attention.q_b": "col",
    "layers.*.attention.kv_a": "seq",
    "layers.*.attention.kv_a_norm": "seq",
    "layers.*.attention.kv_b": "col",
    "layers.*.attention.rope_key": "enter",
    "layers.*.attention.o": "row",
    "layers.*.feed_forward_norm": "seq",
    "layers.*.feed_forward.gate": "col",
    "layers.*.feed_forward.up": "col",
    "layers.*.feed_forward.down": "row",
    "norm": "seq",
    "head": "vocab",
}
"""Megatron's split (Shoeybi et al. 2019, arXiv:1909.08053; seq: Korthikanti et al. 2022, arXiv:2205.05198).

Latent attention makes its narrow vectors from a rank's own positions, so that only these are gathered.
"""


class TiedHead(nn.Module):
    """The output layer over the embedding's own weight: that parameter has one owner and one name."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """x (..., hidden), weight (vocab, hidden) -> (..., vocab)."""
        return F.linear(x, weight)


class Transformer(BlockModel):
    """The whole model, or the stage that holds the blocks `names`.

    The stage with the first block holds the embedding, the one with the last block the final norm and the head, and,
    where embeddings are tied, the embedding's weight as well: two stages then own a parameter of the same name.
    Raises UserError for a shape that does not fit together.
    """

    config: TransformerConfig
    plan: dict[str, str]

    def __init__(self, config: TransformerConfig, names: list[str] | None = None) -> None:
        super().__init__()
        shape.check_transformer(config)
        block_names = list_block_names(config.layers) if names is None else names
        self.config = config
        self.is_first, self.is_last = find_stage_ends(block_names, config.layers)
        if self.is_first or (self.is_last and config.tied_embeddings):
            self.embed = nn.Embedding(config.vocab_size, config.hidden)
        if self.is_first and config.positions == "learned":
            self.positions = nn.Embedding(config.max_positions, config.hidden)
        self.dropout = Dropout(config.dropout)
        self.layers = make_stage_blocks(block_names, partial(_make_block, config))
        if self.is_last:
            self.norm = _make_norm(config)
            tied, sizes = config.tied_embeddings, (config.hidden, config.vocab_size)
            self.head = TiedHead() if tied else nn.Linear(*sizes, bias=False)
        mixtures = [name for name in block_names if shape.has_experts(config, get_block_index(name))]
        self.plan = match_tensor_plan({**TENSOR_PLAN, **{f"{name}.feed_forward": "expert" for name in mixtures}}, self)

    def forward(self, x: Tensor, positions: Tensor | None = None, document_starts: Tensor | None = None) -> Tensor:
        """x: tokens (B, T), int64, or in a stage that is not the first hidden states (B, T, hidden).

        positions: (T,), int64, where in its sequence each token stands; None: 0 ... T - 1.
        document_starts: (B, T), int64, for sequences of several documents: the place at which the document of each
        place begins. Positions then restart there, and no document sees another; None: a document a sequence.
        Returns logits (B, T, vocab), or in a stage that is not the last hidden states.
        """
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        if document_starts is not None:
            positions = positions - document_starts
        if self.is_first:
            x = self._embedded(x, positions)
        table = None
        if self.config.positions == "rotary":
            table = make_rotary_table(self.config, shape.compute_rotary_dim(self.config), positions, x.dtype)
        masks: dict[ScoreRule, DocumentMask] = {}  # one for all layers that see the same part of a sequence
        for layer in self.layers.values():
            if document_starts is None:
                x = layer(x, table)
                continue
            core: Any = layer.get_submodule("attention.core")
            if core.rule not in masks:
                masks[core.rule] = core.make_mask(document_starts, x)
            x = layer(x, table, masks[core.rule])
        return self._logits(x) if self.is_last else x

    def _embedded(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.config.positions == "learned":
            x = x + self.positions(positions.unsqueeze(0) if positions.ndim == 1 else positions)
        embedded: Tensor = self.dropout(x)
        return embedded

    def _logits(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        logits: Tensor = self.head(x, self.embed.weight) if self.config.tied_embeddings else self.head(x)
        softcap = self.config.logit_softcap
        if softcap is None:
            return logits
        assert logits.shape[-1] == self.config.vocab_size, "a head that passes hidden states on has no soft-cap"
        return softcap * torch.tanh(logits / softcap)


def _make_norm(config: TransformerConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.hidden, eps=config.norm_eps)
    return nn.LayerNorm(config.hidden, eps=config.norm_eps, bias=config.bias)


def _make_block(config: TransformerConfig, name: str) -> Block:
    attention, feed_forward = _make_attention(config, get_block_index(name)), _make_feed_forward(config, name)
    return Block(attention, feed_forward, partial(_make_norm, config), config.dropout)


def _make_attention(config: TransformerConfig, layer: int) -> nn.Module:
    core = ScaledDotProduct(
        causal=True,
        dropout=config.dropout,
        window=shape.find_window(config, layer),
        softcap=config.attention_softcap,
        backend=config.attention,
    )
    if shape.has_latent_attention(config):
        from hpc_train.models.latent_attention import LatentAttention  # other models need none of this

        return LatentAttention(config.hidden, config.heads, config.latent, core)
    attention = Attention(
        config.hidden,
        config.heads,
        shape.count_kv_heads(config),
        shape.compute_head_dim(config),
        bias=config.bias,
        core=core,
    )
    if config.query_key_norm != "none":
        add_query_key_norms(attention, config.query_key_norm, config.norm_eps)
    return attention


def _make_feed_forward(config: TransformerConfig, name: str) -> nn.Module:
    if not shape.has_experts(config, get_block_index(name)):
        return make_feed_forward(config.hidden, config.feed_forward, config.activation, bias=config.bias)
    from hpc_train.models.experts import MixtureOfExperts  # dense models need none of this

    width, shared = shape.compute_expert_width(config), config.experts.shared
    always = SwiGLU(config.hidden, shared * width, bias=False) if shared else None
    return MixtureOfExperts(config.experts, config.hidden, width, always)
