"""A decoder-only transformer of the Llama, Gemma, OLMo or GPT family, whole or one pipeline stage of it."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpc_train.config.model import TransformerConfig
from hpc_train.models import shape
from hpc_train.models.attention.attention_kernels import DocumentMask
from hpc_train.models.attention.plain_attention import ScoreRule
from hpc_train.models.attention.rotary import RotaryTable, compute_query_factor, make_rotary_table
from hpc_train.models.dropout import Dropout
from hpc_train.models.initial_values import ZEROS, Normal
from hpc_train.models.layers import (
    Attention,
    Block,
    BlockModel,
    OutputNormBlock,
    PostNormBlock,
    RMSNorm1p,
    ScaledDotProduct,
    SwiGLU,
    add_query_key_norms,
    find_stage_ends,
    get_block_index,
    list_block_names,
    make_feed_forward,
    make_stage_blocks,
    match_tensor_plan,
)

TENSOR_PLAN = {
    "embed": "vocab",
    "positions": "seq",
    "layers.*.attention_norm": "seq",
    "layers.*.attention_output_norm": "seq",
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
    "layers.*.feed_forward_output_norm": "seq",
    "layers.*.feed_forward.gate": "col",
    "layers.*.feed_forward.up": "col",
    "layers.*.feed_forward.down": "row",
    "norm": "seq",
    "head": "vocab",
}
"""Megatron's split (Shoeybi et al. 2019, arXiv:1909.08053; seq: Korthikanti et al. 2022, arXiv:2205.05198).

Latent attention makes its narrow vectors from a rank's own positions, so that only these are gathered.
"""


def _make_tensor_plan(config: TransformerConfig, names: list[str]) -> dict[str, str]:
    """Return the lines for the blocks `names` of a model of this shape, whether or not it has all their modules."""
    plan = {f"{name}.feed_forward": "expert" for name in names if shape.has_experts(config, get_block_index(name))}
    if config.query_key_norm == "full":
        plan["layers.*.attention.[qk]_norm"] = "all_heads"
    return {**TENSOR_PLAN, **plan}


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
        self.logit_softcap = config.logit_softcap
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
        self.plan = match_tensor_plan(_make_tensor_plan(config, block_names), self)

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
            x = self._embed(x, positions)
        tables = self._make_tables(positions, x.dtype)
        masks: dict[ScoreRule, DocumentMask] = {}  # one for all layers that see the same part of a sequence
        for key, layer in self.layers.items():
            table = tables.get(self._is_local(int(key)))
            if document_starts is None:
                x = layer(x, table)
                continue
            core: Any = layer.get_submodule("attention.core")
            if core.rule not in masks:
                masks[core.rule] = core.make_mask(document_starts, x)
            x = layer(x, table, masks[core.rule])
        return self._compute_logits(x) if self.is_last else x

    def _is_local(self, layer: int) -> bool:
        """Whether a layer has the rotary base of layers with a window."""
        return self.config.rope.local_theta is not None and shape.find_window(self.config, layer) is not None

    def _make_tables(self, positions: Tensor, dtype: torch.dtype) -> dict[bool, RotaryTable]:
        """Make the rotary tables of the layers here: of those that are local, and of all others."""
        if self.config.positions != "rotary":
            return {}
        width = shape.compute_rotary_dim(self.config)
        kinds = {self._is_local(int(key)) for key in self.layers}
        return {local: make_rotary_table(self.config, width, positions, dtype, local=local) for local in sorted(kinds)}

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.config.scaled_embeddings:
            x = x * math.sqrt(self.config.hidden)
        if self.config.positions == "learned":
            x = x + self.positions(positions.unsqueeze(0) if positions.ndim == 1 else positions)
        embedded: Tensor = self.dropout(x)
        return embedded

    def _compute_logits(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        logits: Tensor = self.head(x, self.embed.weight) if self.config.tied_embeddings else self.head(x)
        softcap = self.logit_softcap  # None where a loss in chunks makes the logits
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def init_rule(self, name: str) -> Normal:
        """Return GPT-2's distribution of initial values for a parameter; norms begin as factors of 1."""
        is_norm = name.rpartition(".")[0].endswith("norm")
        return ZEROS if is_norm and self.config.norm == "rmsnorm_1p" else super().init_rule(name)


def _make_norm(config: TransformerConfig) -> nn.Module:
    if config.norm == "layernorm":
        return nn.LayerNorm(config.hidden, eps=config.norm_eps, bias=config.bias)
    return _make_rms_norm(config, config.hidden)


def _make_rms_norm(config: TransformerConfig, width: int) -> nn.Module:
    return (RMSNorm1p if config.norm == "rmsnorm_1p" else nn.RMSNorm)(width, eps=config.norm_eps)


def _make_block(config: TransformerConfig, name: str) -> Block:
    attention, feed_forward = _make_attention(config, get_block_index(name)), _make_feed_forward(config, name)
    kinds = {(True, False): Block, (True, True): PostNormBlock, (False, True): OutputNormBlock}
    kind = kinds[config.pre_norms, config.post_norms]
    return kind(attention, feed_forward, partial(_make_norm, config), config.dropout)


def _make_attention(config: TransformerConfig, layer: int) -> nn.Module:
    core = ScaledDotProduct(
        causal=True,
        dropout=config.dropout,
        window=shape.find_window(config, layer),
        softcap=config.attention_softcap,
        backend=config.attention,
    )
    factor = compute_query_factor(config, shape.compute_head_dim(config))
    if shape.has_latent_attention(config):
        from hpc_train.models.attention.latent_attention import LatentAttention  # other models need none of this

        return LatentAttention(config.hidden, config.heads, config.latent, core, factor)
    attention = Attention(
        config.hidden,
        config.heads,
        shape.count_kv_heads(config),
        shape.compute_head_dim(config),
        bias=config.bias,
        core=core,
        query_factor=factor,
    )
    if config.query_key_norm != "none":
        add_query_key_norms(attention, config.query_key_norm, partial(_make_rms_norm, config))
    return attention


def _make_feed_forward(config: TransformerConfig, name: str) -> nn.Module:
    if not shape.has_experts(config, get_block_index(name)):
        return make_feed_forward(config.hidden, config.feed_forward, config.activation, bias=config.bias)
    from hpc_train.models.experts import MixtureOfExperts  # dense models need none of this

    width, shared = shape.compute_expert_width(config), config.experts.shared
    always = SwiGLU(config.hidden, shared * width, bias=False) if shared else None
    return MixtureOfExperts(config.experts, config.hidden, width, always)
