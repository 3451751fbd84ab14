"""A linear layer with an adapter: a frozen weight, and a trained change of low rank.

LoRA (Hu et al. 2021, arXiv:2106.09685) computes (W + s B A) x with s = alpha / rank. DoRA (Liu et al. 2024,
arXiv:2402.09353) also trains the length m of each row: it multiplies the above by m / |W + s B A|, where the norm of
each row counts as a constant in the gradient, as in PEFT. We train the difference of m from |W|: it is zero at the
start, whatever W is loaded later, and gives the same updates.

The parameters of an adapter are the layer's own, so that the weights keep their names. Conv1D of transformers, in
GPT-2's family, is a linear layer whose weight is transposed; its A and B are transposed with it, so that shapes say
which it is.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpc_train.models.adapters.names import ADAPTER_A, ADAPTER_MAGNITUDE, is_adapter_parameter
from hpc_train.models.adapters.nf4 import Nf4Linear, Nf4Weight, replace_weight
from hpc_train.models.adapters.nf4_sizes import NF4_BLOCK
from hpc_train.models.dropout import Dropout
from hpc_train.models.initial_values import Normal, Region, draw_values, get_whole_region
from hpc_train.models.linear import multiply_weight


class AdaptedLayer(nn.Module):
    """A layer with an adapter; `add_adapter` turns a layer without one into it, in place."""

    weight: Any
    bias: Any
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    lora_magnitude: nn.Parameter | None
    lora_dropout: Dropout | None
    scale: float
    """alpha / rank."""
    sum_squares: Callable[[Tensor], Tensor] | None
    """Sums squared lengths of rows over the ranks that have a part of each row; None: rows are whole."""
    inputs_dim: int
    """Dimension of the weight that has the inputs: 1 of nn.Linear, 0 of Conv1D."""

    def forward(self, input: Tensor) -> Tensor:
        """x (..., inputs) -> (..., outputs)."""
        base = self.multiply_weight(input)
        dropped = input if self.lora_dropout is None else self.lora_dropout(input)
        low = self.multiply_a(dropped)
        if self.lora_magnitude is None or dropped is input:
            out = self.combine(base, low)
        else:  # with DoRA, dropout applies to the change of the weight, not to the frozen weight
            product = self.multiply_weight(dropped)
            out = base + self.combine(product, low) - product
        return out if self.bias is None else out + self.bias

    def combine(self, base: Tensor, low: Tensor) -> Tensor:
        """Return this layer's output without bias from W x (..., outputs) and A x (..., rank)."""
        out = base + self.scale * self.multiply_b(low)
        return out if self.lora_magnitude is None else out * self.compute_row_factors().to(out.dtype)

    def compute_row_factors(self) -> Tensor:
        """Return DoRA's factor of each output, m / |W + s B A|: (outputs,), in at least float32."""
        assert self.lora_magnitude is not None
        with torch.no_grad():
            weight = self.weight
            compute_dtype = torch.promote_types(weight.dtype, torch.float32)
            weight = weight.to(compute_dtype)
            changed = weight + self.scale * self.multiply_factors(compute_dtype)
            squares = torch.stack([weights.square().sum(self.inputs_dim) for weights in (weight, changed)])
            before, after = (squares if self.sum_squares is None else self.sum_squares(squares)).sqrt()
        factors: Tensor = (before + self.lora_magnitude) / after
        return factors

    def extra_repr(self) -> str:
        """Describe the layer for print."""
        kind = "lora" if self.lora_magnitude is None else "dora"
        return f"{super().extra_repr()}, {kind}, rank={self.rank}, scale={self.scale:g}"

    @property
    def rank(self) -> int:
        """Rank of the adapter."""
        return self.lora_a.shape[1 - self.inputs_dim]

    def multiply_weight(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs), without the adapter."""
        raise NotImplementedError

    def multiply_a(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., rank)."""
        raise NotImplementedError

    def multiply_b(self, low: Tensor) -> Tensor:
        """(..., rank) -> (..., outputs)."""
        raise NotImplementedError

    def multiply_factors(self, dtype: torch.dtype) -> Tensor:
        """Return the product of the two factors, in a dtype, laid out as the weight is."""
        raise NotImplementedError


class AdaptedLinear(AdaptedLayer, nn.Linear):
    """nn.Linear with an adapter."""

    inputs_dim = 1

    def multiply_weight(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs), without the adapter."""
        return multiply_weight(self, x)

    def multiply_a(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., rank)."""
        return F.linear(x, self.lora_a)

    def multiply_b(self, low: Tensor) -> Tensor:
        """(..., rank) -> (..., outputs)."""
        return F.linear(low, self.lora_b)

    def multiply_factors(self, dtype: torch.dtype) -> Tensor:
        """Return B A: (outputs, inputs)."""
        return self.lora_b.to(dtype) @ self.lora_a.to(dtype)


class AdaptedConv1D(AdaptedLayer):
    """Conv1D of transformers with an adapter; A is (inputs, rank) and B (rank, outputs)."""

    inputs_dim = 0

    def multiply_weight(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs), without the adapter."""
        return cast(Tensor, x @ self.weight)

    def multiply_a(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., rank)."""
        return x @ self.lora_a

    def multiply_b(self, low: Tensor) -> Tensor:
        """(..., rank) -> (..., outputs)."""
        return low @ self.lora_b

    def multiply_factors(self, dtype: torch.dtype) -> Tensor:
        """Return A B: (inputs, outputs)."""
        return self.lora_a.to(dtype) @ self.lora_b.to(dtype)


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
        and (type(module) is AdaptedLinear or computes_as_linear(type(module)))  # type: ignore[arg-type]  # torch: __hash__(object)
        and module.in_features % NF4_BLOCK == 0
        and users[id(module._parameters["weight"])] == 1
    }


@functools.cache
def computes_as_linear(kind: type[nn.Module]) -> bool:
    """Return whether a class is nn.Linear, or has the same parameters and results (FalconLinear of transformers)."""
    if kind is nn.Linear:
        return True
    if not issubclass(kind, nn.Linear):
        return False
    try:
        with torch.random.fork_rng([]), torch.device("cpu"), torch.no_grad():
            layer, plain = kind(3, 5), nn.Linear(3, 5)
            x = torch.linspace(-1, 1, 6).view(2, 3)
            same_results = torch.allclose(layer(x), F.linear(x, layer.weight, layer.bias))
    except Exception:  # of a class that is made or called in its own way
        return False
    return same_results and vars(layer).keys() == vars(plain).keys() and _list_tensors(layer) == _list_tensors(plain)


def _list_tensors(module: nn.Module) -> list[str]:
    return [*module._parameters, *module._buffers, *module._modules]


def is_conv1d(module: nn.Module) -> bool:
    """Return whether this is a Conv1D of transformers, which is not imported for the question."""
    kind = type(module)
    return (kind.__name__, kind.__module__) == ("Conv1D", "transformers.pytorch_utils")


def add_adapter(layer: nn.Module, rank: int, alpha: float, dropout: float, *, magnitude: bool) -> None:
    """Turn an nn.Linear or a Conv1D into an AdaptedLayer, with empty parameters on the weight's device.

    magnitude: DoRA. `initialise_adapters` gives the parameters their values.
    """
    # By another class and not another module, because other modules and lists may hold this one, too.
    layer.__class__ = _make_adapted_conv1d_class(type(layer)) if is_conv1d(layer) else AdaptedLinear  # type: ignore[arg-type]
    adapted = cast("AdaptedLayer", layer)
    weight, inputs_dim = adapted.weight, adapted.inputs_dim
    inputs, outputs = weight.shape[inputs_dim], weight.shape[1 - inputs_dim]
    factors = [(rank, inputs), (outputs, rank)]
    a, b = factors if inputs_dim == 1 else [(second, first) for first, second in factors]
    adapted.lora_a, adapted.lora_b = (nn.Parameter(weight.new_empty(shape)) for shape in (a, b))
    adapted.register_parameter(ADAPTER_MAGNITUDE, nn.Parameter(weight.new_empty(outputs)) if magnitude else None)
    adapted.lora_dropout = Dropout(dropout) if dropout > 0 else None
    adapted.scale, adapted.sum_squares = alpha / rank, None


@functools.cache  # one class for all layers, or compiled code would be made for each
def _make_adapted_conv1d_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Make the class of a Conv1D with an adapter. It inherits from Conv1D, which the model's code may ask for."""
    return type("AdaptedConv1D", (AdaptedConv1D, kind), {})


def copy_adapters(part: nn.Module, model: nn.Module) -> None:
    """Add an adapter to every layer of `part` that has one in `model`, under the same name."""
    layers = dict(model.named_modules())
    for name, layer in list(part.named_modules()):
        adapted = layers.get(name)
        if isinstance(adapted, AdaptedLayer) and (isinstance(layer, nn.Linear) or is_conv1d(layer)):
            dropout = 0.0 if adapted.lora_dropout is None else adapted.lora_dropout.p
            add_adapter(
                layer, adapted.rank, adapted.scale * adapted.rank, dropout, magnitude=adapted.lora_magnitude is not None
            )


@torch.no_grad()
def initialise_adapters(
    part: nn.Module, seed: int, find_regions: Callable[[Tensor], list[Region]] = get_whole_region
) -> None:
    """Fill the adapters in place: A from a normal distribution of the variance that PEFT has, all else with zeros.

    Values depend on seed, name and position only, not on the layout. find_regions: finds what this rank has of a
    split parameter.
    """
    for name, parameter in part.named_parameters():
        if not is_adapter_parameter(name):
            continue
        layer = cast("AdaptedLayer", part.get_submodule(name.rpartition(".")[0]))
        is_a = name.endswith(ADAPTER_A)
        # PEFT draws A uniformly (Kaiming with a = sqrt(5)) from +-1 / sqrt(inputs), whose variance is 1 / (3 inputs).
        rule = Normal(0.0, 1 / math.sqrt(3 * parameter.shape[layer.inputs_dim]) if is_a else 0.0)
        for shard in find_regions(parameter):
            shard.local.copy_(draw_values(rule, seed, name, shard.shape, shard.offset, tuple(shard.local.shape)))
