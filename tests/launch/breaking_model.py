"""A user's own model whose block torch.compile can only compile in two parts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpc_train.models.registry import register


class Block(nn.Module):
    """A linear layer after a graph break."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + self.linear(x)  # type: ignore[no-any-return]


@register("breaking")
class Breaking(nn.Module):
    """Logits of the next byte from this one."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.block = Block(width)
        self.out = nn.Linear(width, 256)

    def blocks(self) -> dict[str, nn.Module]:
        return {"block": self.block}

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.block(self.embed(tokens)))  # type: ignore[no-any-return]
