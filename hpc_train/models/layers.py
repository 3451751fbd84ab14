"""Layers of our own transformers: attention, feed-forward, norms, blocks, and the loss.

Multi-head (arXiv:1706.03762) and grouped-query attention (arXiv:2305.13245); SwiGLU and GeGLU (Shazeer 2020,
arXiv:2002.05202) or GELU (Hendrycks 2016, arXiv:1606.08415). `LinearGroup`, `NormGroup` and
`ScaledDotProduct` are separate modules so that a technique can replace them.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpc_train.config.model import TransformerConfig, VisionTransformerConfig
from hpc_train.interfaces import IGNORED_TARGET
from hpc_train.models.attention.attention_kernels import DocumentMask, attend, make_document_mask
from hpc_train.models.attention.plain_attention import ScoreRule, attend_plainly
from hpc_train.models.attention.rotary import RotaryTable, apply_rotary
from hpc_train.models.dropout import Dropout, DropoutSite, list_positions
from hpc_train.models.initial_values import Normal, gpt2_init_rule


class LinearGroup(nn.Module):
    """Apply several linear layers to one input; has no parameters of its own.

    It is a module so that a technique can replace its forward: tensor parallelism gathers the input once for all layers
    of the group, and sums their input gradients once.
    """

    def forward(self, x: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
        """Map x (..., K) to the output (..., N_i) of each layer."""
        return tuple(layer(x) for layer in layers)


class NormGroup(nn.Module):
    """Apply norms to one input each; has no parameters of its own.

    It is a module so that a technique can replace its forward: tensor parallelism sums over ranks once for all norms.
    """

    def forward(self, inputs: tuple[Tensor, ...], norms: tuple[nn.Module, ...]) -> tuple[Tensor, ...]:
        """Map each input (..., N_i) to its norm's output of the same shape."""
        return tuple(norm(x) for x, norm in zip(inputs, norms, strict=True))


class ScaledDotProduct(nn.Module):
    """softmax(q k^T / sqrt(head_dim)) v. A module of its own so that a technique can put another in its place."""

    site: DropoutSite | None = None
    """Site at which weights are dropped; see models.dropout."""

    def __init__(
        self,
        *,
        causal: bool,
        dropout: float,
        window: int | None = None,
        softcap: float | None = None,
        backend: str = "auto",
    ) -> None:
        """window, softcap: see ScoreRule. backend: a value of model.attention."""
        super().__init__()
        self.rule = ScoreRule(causal, window, softcap)
        self.dropout = dropout
        self.backend = backend

    @property
    def causal(self) -> bool:
        """Whether a query sees keys at its own and earlier positions only."""
        return self.rule.causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: DocumentMask | None = None) -> Tensor:
        """q (B, heads, T, head_dim); k and v (B, kv_heads, T, head_dim) -> (B, heads, T, head_dim).

        mask: of packed documents, from make_mask; without dropout only.
        """
        dropout = self.dropout if self.training else 0.0
        assert mask is None or dropout == 0.0, "the rules refuse dropout beside packed documents"
        if dropout > 0 and self.site is not None:
            places = list_positions(q.shape[2], q.device)
            return attend_plainly(q, k, v, places, None, self.rule, site=self.site, p=dropout)
        return attend(q, k, v, self.rule, self.backend, mask, dropout)

    def make_mask(self, document_starts: Tensor, like: Tensor) -> DocumentMask:
        """Make the mask of packed documents from document_starts (B, T); see make_document_mask."""
        return make_document_mask(document_starts, self.rule, self.backend, like)


class Attention(nn.Module):
    """q, k, v by their own linear layers, attention, and the output layer o.

    The number of heads is what the outputs of q, k and v hold, so that a rank which has only some of their columns
    attends with its own heads.
    """

    normed: str = "none"
    """Norm of queries and keys; see add_query_key_norms."""
    q_norm: nn.Module
    k_norm: nn.Module
    qk_norms: NormGroup

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        bias: bool,
        core: ScaledDotProduct,
        query_factor: float = 1.0,
    ) -> None:
        """query_factor: on queries, where scores are not q k / sqrt(head_dim)."""
        super().__init__()
        self.head_dim = head_dim
        self.q = nn.Linear(hidden, heads * head_dim, bias=bias)
        self.k = nn.Linear(hidden, kv_heads * head_dim, bias=bias)
        self.v = nn.Linear(hidden, kv_heads * head_dim, bias=bias)
        self.o = nn.Linear(heads * head_dim, hidden, bias=bias)
        self.qkv = LinearGroup()
        self.core = core
        self.query_factor = query_factor

    def forward(self, x: Tensor, table: RotaryTable | None = None, mask: DocumentMask | None = None) -> Tensor:
        """x (B, T, hidden) -> (B, T, hidden); `table` is the rotary one of the T positions, mask as the core's."""
        q, k, v = self.qkv(x, self.q, self.k, self.v)
        if self.normed == "full":
            q, k = self.qk_norms((q, k), (self.q_norm, self.k_norm))
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))
        if self.normed == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if table is not None:
            q, k = apply_rotary(q, table), apply_rotary(k, table)
        if self.query_factor != 1.0:
            q = q * self.query_factor
        masks = () if mask is None else (mask,)  # a core that a technique put there knows none
        mixed: Tensor = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), *masks)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out


class RMSNorm1p(nn.RMSNorm):
    """RMSNorm that multiplies by one plus its weight, so that weight decay draws towards one (Gemma)."""

    def forward(self, x: Tensor) -> Tensor:
        """x (..., width) -> (..., width)."""
        weight: Tensor = self.weight
        return F.rms_norm(x, self.normalized_shape, weight + 1, self.eps)


def add_query_key_norms(attention: Attention, normed: str, make_norm: Callable[[int], nn.Module]) -> None:
    """Add norms of queries and keys: of each `head`, or of all heads together (`full`). make_norm: takes the width."""
    for name, layer in (("q_norm", attention.q), ("k_norm", attention.k)):
        width = attention.head_dim if normed == "head" else layer.out_features
        attention.add_module(name, make_norm(width))
    if normed == "full":
        attention.qk_norms = NormGroup()
    attention.normed = normed


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, width: int, *, bias: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, width, bias=bias)
        self.up = nn.Linear(hidden, width, bias=bias)
        self.down = nn.Linear(width, hidden, bias=bias)
        self.inputs = LinearGroup()

    def forward(self, x: Tensor) -> Tensor:
        """x (..., hidden) -> (..., hidden)."""
        gate, up = self.inputs(x, self.gate, self.up)
        out: Tensor = self.down(self.activate(gate) * up)
        return out

    def activate(self, gate: Tensor) -> Tensor:
        """Return the activation of the gate's branch."""
        return F.silu(gate)


class GeGLU(SwiGLU):
    """down(gelu(gate(x)) * up(x)), with the tanh approximation of GELU."""

    def activate(self, gate: Tensor) -> Tensor:
        """Return the activation of the gate's branch."""
        return F.gelu(gate, approximate="tanh")


class GELU(nn.Module):
    """down(gelu(up(x))), with the exact GELU or its tanh approximation."""

    def __init__(self, hidden: int, width: int, *, bias: bool, tanh: bool) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, width, bias=bias)
        self.down = nn.Linear(width, hidden, bias=bias)
        self.approximate = "tanh" if tanh else "none"

    def forward(self, x: Tensor) -> Tensor:
        """x (..., hidden) -> (..., hidden)."""
        out: Tensor = self.down(F.gelu(self.up(x), approximate=self.approximate))
        return out


def make_feed_forward(hidden: int, width: int, activation: str, *, bias: bool) -> nn.Module:
    """Make the layer for an activation of conf/model: swiglu, geglu, gelu or gelu_tanh."""
    if activation in ("swiglu", "geglu"):
        return (SwiGLU if activation == "swiglu" else GeGLU)(hidden, width, bias=bias)
    assert activation in ("gelu", "gelu_tanh"), activation
    return GELU(hidden, width, bias=bias, tanh=activation == "gelu_tanh")


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)), with dropout on both branches."""

    def __init__(
        self, attention: nn.Module, feed_forward: nn.Module, norm: Callable[[], nn.Module], dropout: float
    ) -> None:
        super().__init__()
        self.attention_norm = norm()
        self.attention = attention
        self.feed_forward_norm = norm()
        self.feed_forward = feed_forward
        self.attention_dropout = Dropout(dropout)
        self.feed_forward_dropout = Dropout(dropout)

    def forward(self, x: Tensor, table: RotaryTable | None = None, mask: DocumentMask | None = None) -> Tensor:
        """x (B, T, hidden) -> (B, T, hidden)."""
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), table, mask))
        out: Tensor = x + self.feed_forward_dropout(self.feed_forward(self.feed_forward_norm(x)))
        return out


class PostNormBlock(Block):
    """A block that also normalises the results of attention and of the feed-forward layer (Gemma 2)."""

    def __init__(
        self, attention: nn.Module, feed_forward: nn.Module, norm: Callable[[], nn.Module], dropout: float
    ) -> None:
        super().__init__(attention, feed_forward, norm, dropout)
        self.attention_output_norm = norm()
        self.feed_forward_output_norm = norm()

    def forward(self, x: Tensor, table: RotaryTable | None = None, mask: DocumentMask | None = None) -> Tensor:
        """x (B, T, hidden) -> (B, T, hidden)."""
        attended = self.attention_output_norm(self.attention(self.attention_norm(x), table, mask))
        x = x + self.attention_dropout(attended)
        widened = self.feed_forward_output_norm(self.feed_forward(self.feed_forward_norm(x)))
        out: Tensor = x + self.feed_forward_dropout(widened)
        return out


class OutputNormBlock(Block):
    """A block that normalises only the results of attention and of the feed-forward layer (OLMo 2)."""

    def __init__(
        self, attention: nn.Module, feed_forward: nn.Module, norm: Callable[[], nn.Module], dropout: float
    ) -> None:
        super().__init__(attention, feed_forward, norm, dropout)
        del self.attention_norm, self.feed_forward_norm
        self.attention_output_norm = norm()
        self.feed_forward_output_norm = norm()

    def forward(self, x: Tensor, table: RotaryTable | None = None, mask: DocumentMask | None = None) -> Tensor:
        """x (B, T, hidden) -> (B, T, hidden)."""
        x = x + self.attention_dropout(self.attention_output_norm(self.attention(x, table, mask)))
        out: Tensor = x + self.feed_forward_dropout(self.feed_forward_output_norm(self.feed_forward(x)))
        return out


def list_block_names(layers: int) -> list[str]:
    """List the module names of all blocks of a model, in order."""
    return [f"layers.{index}" for index in range(layers)]


def get_block_index(name: str) -> int:
    """Return the index, from 0, of the block of this name in the whole model."""
    return int(name.removeprefix("layers."))


def find_stage_ends(names: list[str], layers: int) -> tuple[bool, bool]:
    """Whether the stage with the blocks `names` is the first of its model, and whether it is the last."""
    all_names = list_block_names(layers)
    assert names, "a stage holds at least one block"
    assert names == [name for name in all_names if name in names], f"not blocks of this model in its order: {names}"
    return names[0] == all_names[0], names[-1] == all_names[-1]


def make_stage_blocks(names: list[str], make: Callable[[str], Block]) -> nn.ModuleDict:
    """Make the blocks `names`, each from its name, whose parameters keep the names they have in the whole model."""
    return nn.ModuleDict({name.removeprefix("layers."): make(name) for name in names})


def match_tensor_plan(plan: dict[str, str], module: nn.Module) -> dict[str, str]:
    """Return the lines of a plan that match a module here: a stage and a variant of a model lack some."""
    names = [name for name, _ in module.named_modules()]
    return {glob: style for glob, style in plan.items() if any(fnmatchcase(name, glob) for name in names)}


def cross_entropy_sum(logits: Tensor, target: Tensor) -> Tensor:
    """Sum of the cross entropy in nats over all targets that are not IGNORED_TARGET, a scalar in at least float32.

    logits: (..., classes). target: (...), int64.
    """
    logits_fp32 = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits_fp32.flatten(0, -2), target.flatten(), ignore_index=IGNORED_TARGET, reduction="sum")


class BlockModel(nn.Module):
    """A model of blocks, or the stage that holds some of them: what its families share of interfaces.Model.

    Its constructor takes a config and the names of the stage's blocks.
    """

    config: TransformerConfig | VisionTransformerConfig
    layers: nn.ModuleDict

    def blocks(self) -> dict[str, nn.Module]:
        """Return the blocks by module name, in order."""
        return {f"layers.{key}": block for key, block in self.layers.items()}

    def stage(self, names: list[str]) -> Self:
        """Return the part that holds the blocks `names`, on the meta device, in this model's dtype."""
        with torch.device("meta"):
            return type(self)(self.config, names).to(next(self.parameters()).dtype)

    def loss_sum(self, out: Tensor, target: Tensor) -> Tensor:
        """Return the summed cross entropy in nats. out: logits (..., classes); target: (...), int64."""
        return cross_entropy_sum(out, target)

    def init_rule(self, name: str) -> Normal:
        """Return GPT-2's distribution of initial values for a parameter."""
        return gpt2_init_rule(name, self.config.init_std, self.config.layers)
