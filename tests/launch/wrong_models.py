"""User models with one mistake each, selected by `kind`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hpc_train.models.registry import register


class Plain(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(256, width), nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Any:
        return self.out(self.embed(tokens))


class Two(Plain):
    def forward(self, tokens: Tensor, mask: Tensor) -> Any:
        return super().forward(tokens) * mask


class Dict(Plain):
    def forward(self, tokens: Tensor) -> Any:
        return {"scores": super().forward(tokens), "hidden": None}


class Raises(Plain):
    def forward(self, tokens: Tensor) -> Any:
        return self.out(self.out(self.embed(tokens)))


class Shape(Plain):
    def forward(self, tokens: Tensor) -> Any:
        return super().forward(tokens)[:, -1]


class Few(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 10)


class Vector(Plain):
    def loss_sum(self, out: Tensor, target: Tensor) -> Any:
        return nn.functional.cross_entropy(out.flatten(0, 1), target.flatten(), reduction="none")


class Detached(Plain):
    def loss_sum(self, out: Tensor, target: Tensor) -> Any:
        return out.detach().sum()


class Triple(Plain):
    def loss_sum(self, out: Tensor, target: Tensor, weight: Tensor) -> Any:
        return out.sum()


class Bug(Plain):
    def loss_sum(self, out: Tensor, target: Tensor) -> Any:
        return out.gather(-1, target).sum()


class Listed(Plain):
    def blocks(self) -> Any:
        return [self.out]


class Broken(Plain):
    def blocks(self) -> Any:
        return {"x": self.absent}


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


class Lazy(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.LazyLinear(256)


def raising() -> nn.Module:
    raise ValueError("no\nluck")


def directly() -> nn.Module:
    from transformers import GPT2Config, GPT2Model

    return GPT2Model(GPT2Config(vocab_size=256, n_positions=16, n_embd=8, n_layer=1, n_head=2))


KINDS = {
    kind.__name__.lower(): kind
    for kind in (Two, Dict, Raises, Shape, Few, Vector, Detached, Triple, Bug, Listed, Broken, Empty, Lazy)
}


@register("wrong")
def wrong(kind: str) -> nn.Module:
    return raising() if kind == "raising" else directly() if kind == "directly" else KINDS[kind]()
