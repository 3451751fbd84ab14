"""The feed-forward layer, with SwiGLU (Shazeer 2020, arXiv:2002.05202) or GELU (Hendrycks 2016, arXiv:1606.08415)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from hpc_train.models.linear_group import LinearGroup


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
        out: Tensor = self.down(F.silu(gate) * up)
        return out


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


def feed_forward(hidden: int, width: int, activation: str, *, bias: bool) -> nn.Module:
    """The layer for an activation of conf/model: swiglu, gelu or gelu_tanh."""
    if activation == "swiglu":
        return SwiGLU(hidden, width, bias=bias)
    assert activation in ("gelu", "gelu_tanh"), activation
    return GELU(hidden, width, bias=bias, tanh=activation == "gelu_tanh")
