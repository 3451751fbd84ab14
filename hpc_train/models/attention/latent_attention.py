"""Multi-head latent attention: keys and values of all heads are expanded from one narrow vector a token.

DeepSeek-V2 (arXiv:2405.04434, section 2.1) and DeepSeek-V3 (arXiv:2412.19437). Each query and key has a part without
positions and one that rotary positions turn; all heads share the latter part of the key. This is the form that trains:
keys and values are expanded, and attention is that of any other model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpc_train.config.model import LatentConfig
from hpc_train.models.attention.attention_kernels import DocumentMask
from hpc_train.models.attention.rotary import RotaryTable, apply_interleaved_rotary, apply_rotary
from hpc_train.models.layers import ScaledDotProduct

NORM_EPS = 1e-6
"""Epsilon in the norms of the latents; DeepSeek's code has it there whatever the norms of the model have."""


class LatentAttention(nn.Module):
    """Narrow layers q_a and kv_a, norms of their results, layers q_b and kv_b that expand these to heads, and o.

    Without a latent of queries, q makes them from the hidden states. The number of heads is what the outputs of q_b (or
    q) and kv_b hold, so that a rank which has only some of their columns attends with its own heads.
    """

    def __init__(
        self, hidden: int, heads: int, config: LatentConfig, core: ScaledDotProduct, query_factor: float
    ) -> None:
        """query_factor: on queries, where scores are not q k / sqrt(head_dim)."""
        super().__init__()
        self.query_factor = query_factor
        self.config = config
        queries = heads * (config.nope_head_dim + config.rope_head_dim)
        if config.q_rank is None:
            self.q = nn.Linear(hidden, queries, bias=False)
        else:
            self.q_a = nn.Linear(hidden, config.q_rank, bias=False)
            self.q_a_norm = nn.RMSNorm(config.q_rank, eps=NORM_EPS)
            self.q_b = nn.Linear(config.q_rank, queries, bias=False)
        self.kv_a = nn.Linear(hidden, config.kv_rank + config.rope_head_dim, bias=False)
        self.kv_a_norm = nn.RMSNorm(config.kv_rank, eps=NORM_EPS)
        self.kv_b = nn.Linear(config.kv_rank, heads * (config.nope_head_dim + config.value_head_dim), bias=False)
        self.rope_key = nn.Identity()  # a module, so that tensor parallelism can gather what all heads share
        self.o = nn.Linear(heads * config.value_head_dim, hidden, bias=False)
        self.core = core

    def forward(self, x: Tensor, table: RotaryTable | None = None, mask: DocumentMask | None = None) -> Tensor:
        """x (B, T, hidden) -> (B, T, hidden); `table` is the rotary one of the T positions, mask as the core's."""
        assert table is not None, "latent attention has rotary positions"
        q = self._make_queries(x, table)
        k, v = self._make_keys_and_values(x, table)
        masks = () if mask is None else (mask,)
        # Fused kernels and the distributed attentions want values as wide as keys.
        padded_v = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
        attended: Tensor = self.core(q.transpose(1, 2), k.transpose(1, 2), padded_v.transpose(1, 2), *masks)
        out: Tensor = self.o(attended[..., : self.config.value_head_dim].transpose(1, 2).flatten(2))
        return out

    def _make_queries(self, x: Tensor, table: RotaryTable) -> Tensor:
        """(B, T, heads, nope_head_dim + rope_head_dim), turned."""
        config = self.config
        q = self.q(x) if config.q_rank is None else self.q_b(self.q_a_norm(self.q_a(x)))
        unrotated, rotated = q.unflatten(-1, (-1, config.nope_head_dim + config.rope_head_dim)).split(
            (config.nope_head_dim, config.rope_head_dim), dim=-1
        )
        queries = torch.cat((unrotated, self._rotate(rotated, table)), dim=-1)
        return queries if self.query_factor == 1.0 else queries * self.query_factor

    def _make_keys_and_values(self, x: Tensor, table: RotaryTable) -> tuple[Tensor, Tensor]:
        """(B, T, heads, nope_head_dim + rope_head_dim), turned, and (B, T, heads, value_head_dim)."""
        config = self.config
        latent, shared = self.kv_a(x).split((config.kv_rank, config.rope_head_dim), dim=-1)
        expanded = self.kv_b(self.kv_a_norm(latent)).unflatten(-1, (-1, config.nope_head_dim + config.value_head_dim))
        unrotated, v = expanded.split((config.nope_head_dim, config.value_head_dim), dim=-1)
        rotated = self._rotate(self.rope_key(shared).unsqueeze(-2), table)
        return torch.cat((unrotated, rotated.expand(*unrotated.shape[:-1], -1)), dim=-1), v

    def _rotate(self, x: Tensor, table: RotaryTable) -> Tensor:
        return apply_interleaved_rotary(x, table) if self.config.interleaved else apply_rotary(x, table)
