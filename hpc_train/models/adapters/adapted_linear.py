"""A linear layer with an adapter: a frozen weight, and a trained change of low rank.

LoRA (Hu et al. 2021, arXiv:2106.09685) computes (W + s B A) x with s = alpha / rank. DoRA (Liu et al. 2024,
arXiv:2402.09353) also trains the length of each row: it computes m / |W + s B A| times that; these lengths of
rows count as constants in the gradient, as in PEFT. We train how much m differs from |W|: the trained number is
zero at the start whatever W is loaded later, and the steps are the same.

The parameters of an adapter are the layer's own, so that the weights keep their names.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpc_train.models.adapters.names import ADAPTER_A, ADAPTER_MAGNITUDE, is_adapter_parameter
from hpc_train.models.adapters.nf4 import BLOCK, Nf4Linear, Nf4Weight, multiply, replace_weight
from hpc_train.models.dropout import Dropout
from hpc_train.models.initial_values import Normal, Region, draw_values, whole_region


class AdaptedLinear(nn.Linear):
    """nn.Linear with an adapter; made of an nn.Linear by `add_adapter`, in place."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    lora_magnitude: nn.Parameter | None
    lora_dropout: Dropout | None
    scale: float
    """alpha / rank."""
    sum_squares: Callable[[Tensor], Tensor] | None
    """Sums squared lengths of rows over the ranks that have a part of each row; None: rows are whole."""

    def forward(self, input: Tensor) -> Tensor:
        """x (..., inputs) -> (..., outputs)."""
        base = multiply(self, input)
        dropped = input if self.lora_dropout is None else self.lora_dropout(input)
        low = F.linear(dropped, self.lora_a)
        if self.lora_magnitude is None or dropped is input:
            out = self.combine(base, low)
        else:  # DoRA drops inputs of its change of the weight only
            product = multiply(self, dropped)
            out = base + self.combine(product, low) - product
        return out if self.bias is None else out + self.bias

    def combine(self, base: Tensor, low: Tensor) -> Tensor:
        """Return this layer's output without bias from W x (..., outputs) and A x (..., rank)."""
        out = base + self.scale * F.linear(low, self.lora_b)
        return out if self.lora_magnitude is None else out * self.row_factors().to(out.dtype)

    def row_factors(self) -> Tensor:
        """Return DoRA's factor of each output, m / |W + s B A|: (outputs,), in at least float32."""
        assert self.lora_magnitude is not None
        with torch.no_grad():
            weight = self.weight
            wide = torch.promote_types(weight.dtype, torch.float32)
            weight = weight.to(wide)
            changed = weight + self.scale * (self.lora_b.to(wide) @ self.lora_a.to(wide))
            squares = torch.stack([weight.square().sum(1), changed.square().sum(1)])
            before, after = (squares if self.sum_squares is None else self.sum_squares(squares)).sqrt()
        factors: Tensor = (before + self.lora_magnitude) / after
        return factors

    def extra_repr(self) -> str:
        """Describe the layer for print."""
        kind = "lora" if self.lora_magnitude is None else "dora"
        return f"{super().extra_repr()}, {kind}, rank={self.lora_a.shape[0]}, scale={self.scale:g}"


class AdaptedNf4Linear(Nf4Weight, AdaptedLinear):  # type: ignore[override]  # weight is computed
    """AdaptedLinear over a weight in 4 bits: QLoRA (Dettmers et al. 2023, arXiv:2305.14314)."""


def quantize_layer(layer: nn.Linear) -> None:
    """Put empty parameters of NF4 in the place of the weight of a layer that list_nf4_layers found, in place."""
    replace_weight(layer, AdaptedNf4Linear if isinstance(layer, AdaptedLinear) else Nf4Linear)


def list_nf4_layers(model: nn.Module, blocks: Iterable[str]) -> dict[str, nn.Linear]:
    """Return the linear layers in `blocks`, by module name, whose rows are whole blocks of numbers.

    A layer whose code does not call it, or whose weight another module shares, stays as it is.
    """
    inside = tuple(f"{name}." for name in blocks)
    users = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and name.startswith(inside)
        and type(module) in (nn.Linear, AdaptedLinear)
        and module.in_features % BLOCK == 0
        and users[id(module._parameters["weight"])] == 1
    }


def add_adapter(layer: nn.Linear, rank: int, alpha: float, dropout: float, *, magnitude: bool) -> None:
    """Turn an nn.Linear into an AdaptedLinear, with empty parameters of the adapter on the weight's device.

    magnitude: DoRA. `initialise_adapters` gives the parameters their values.
    """
    outputs, inputs = layer.weight.shape
    layer.__class__ = AdaptedLinear
    adapted = cast("AdaptedLinear", layer)
    adapted.lora_a = nn.Parameter(layer.weight.new_empty(rank, inputs))
    adapted.lora_b = nn.Parameter(layer.weight.new_empty(outputs, rank))
    adapted.register_parameter(ADAPTER_MAGNITUDE, nn.Parameter(layer.weight.new_empty(outputs)) if magnitude else None)
    adapted.lora_dropout = Dropout(dropout) if dropout > 0 else None
    adapted.scale, adapted.sum_squares = alpha / rank, None


def copy_adapters(part: nn.Module, model: nn.Module) -> None:
    """Add an adapter to every layer of `part` that has one in `model`, under the same name."""
    layers = dict(model.named_modules())
    for name, layer in list(part.named_modules()):
        own = layers.get(name)
        if isinstance(own, AdaptedLinear) and isinstance(layer, nn.Linear):
            rank, dropout = own.lora_a.shape[0], 0.0 if own.lora_dropout is None else own.lora_dropout.p
            add_adapter(layer, rank, own.scale * rank, dropout, magnitude=own.lora_magnitude is not None)


@torch.no_grad()
def initialise_adapters(part: nn.Module, seed: int, region: Callable[[Tensor], Region] = whole_region) -> None:
    """Fill the adapters in place: A normal with the variance of PEFT's (Kaiming uniform), all else zero.

    Values are a function of (seed, name, place) only; `region` says what a rank has of a split parameter.
    """
    for name, parameter in part.named_parameters():
        if not is_adapter_parameter(name):
            continue
        own = region(parameter)
        is_a = name.endswith(ADAPTER_A)
        rule = Normal(0.0, 1 / math.sqrt(3 * own.shape[1]) if is_a else 0.0)
        own.local.copy_(draw_values(rule, seed, name, own.shape, own.offset, tuple(own.local.shape)))
