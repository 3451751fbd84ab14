"""Multi-head (arXiv:1706.03762) and grouped-query attention (arXiv:2305.13245)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from hpc_train.models.dropout import Site, every_position
from hpc_train.models.dropped_attention import attend_with_dropout
from hpc_train.models.linear_group import LinearGroup
from hpc_train.models.rotary import Table, rotate


class ScaledDotProduct(nn.Module):
    """softmax(q k^T / sqrt(head_dim)) v. A module of its own so that a technique can put another in its place."""

    site: Site | None = None
    """Where the weights are dropped; see models.dropout."""

    def __init__(self, *, causal: bool, dropout: float) -> None:
        super().__init__()
        self.causal = causal
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B, heads, T, head_dim); k and v (B, kv_heads, T, head_dim) -> (B, heads, T, head_dim)."""
        dropout = self.dropout if self.training else 0.0
        if dropout > 0 and self.site is not None:
            places = every_position(q.shape[2], q.device)
            return attend_with_dropout(q, k, v, places, places, self.causal, self.site, dropout)
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.causal, enable_gqa=grouped)


class Attention(nn.Module):
    """q, k, v by their own linear layers, attention, and the output layer o.

    The number of heads is what the outputs of q, k and v hold, so that a rank which has only some of their columns
    attends with its own heads.
    """

    def __init__(
        self, hidden: int, heads: int, kv_heads: int, head_dim: int, *, bias: bool, causal: bool, dropout: float
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q = nn.Linear(hidden, heads * head_dim, bias=bias)
        self.k = nn.Linear(hidden, kv_heads * head_dim, bias=bias)
        self.v = nn.Linear(hidden, kv_heads * head_dim, bias=bias)
        self.o = nn.Linear(heads * head_dim, hidden, bias=bias)
        self.qkv = LinearGroup()
        self.core = ScaledDotProduct(causal=causal, dropout=dropout)

    def forward(self, x: Tensor, table: Table | None = None) -> Tensor:
        """x (B, T, hidden) -> (B, T, hidden); `table` is the rotary one of the T positions."""
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in self.qkv(x, self.q, self.k, self.v))
        if table is not None:
            q, k = rotate(q, table), rotate(k, table)
        mixed: Tensor = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out
