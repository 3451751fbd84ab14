"""LoRA and DoRA: freeze a model, and add trained adapters to the linear layers that the config names.

This is the first pass over a model: it changes layers before anything splits them. Tensor parallelism splits A or B as
it splits the layer's weight (tensor/layers.py).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from hpc_train.config.adapter import AdapterConfig
from hpc_train.errors import UserError
from hpc_train.models.adapters.adapted_linear import (
    add_adapter,
    computes_as_linear,
    is_conv1d,
    list_nf4_layers,
    quantize_layer,
)
from hpc_train.models.adapters.names import ADAPTER_LEAVES, choose_targets, matches_target
from hpc_train.models.adapters.nf4 import import_bitsandbytes
from hpc_train.models.adapters.nf4_sizes import NF4_BLOCK
from hpc_train.parallel.user_model import get_named_blocks, name_model


def attach_adapters(model: nn.Module, config: AdapterConfig) -> str:
    """Freeze all parameters of `model` and add an adapter to each target, in place; returns a line about it.

    Raises UserError for a glob that matches no linear layer, or one whose code would not call an adapter.
    """
    layers = find_target_layers(model, config.targets)
    _check_rank(layers, config.rank)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for layer in layers.values():
        add_adapter(layer, config.rank, config.alpha, config.dropout, magnitude=config.kind == "dora")
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in model.parameters())
    return (
        f"adapter: {config.kind}, rank {config.rank}, on {len(layers)} linear layers; {trained:,} of {total:,} "
        f"parameters are trained ({trained / total:.2%})"
    )


def quantize_base(part: nn.Module) -> str:
    """Keep the frozen weights of linear layers in the blocks of `part` in 4 bits, in place; returns a line about it.

    `materialise_parameters` gives them their values. Raises UserError where no layer can be kept so.
    """
    import_bitsandbytes()
    blocks = list(get_named_blocks(part))
    layers = list_nf4_layers(part, blocks)
    if not layers:
        raise UserError(
            f"adapter.base=nf4: no linear layer of {name_model(part)} has a number of inputs that is a multiple of "
            f"{NF4_BLOCK}; use adapter.base=full"
        )
    linear_count = sum(
        isinstance(module, nn.Linear) for name in blocks for module in part.get_submodule(name).modules()
    )
    numbers = sum(layer.weight.numel() for layer in layers.values())
    for layer in layers.values():
        quantize_layer(layer)
    skipped = f", {linear_count - len(layers)} left alone for their sizes" if linear_count > len(layers) else ""
    return f"base: nf4, {len(layers)} linear layers with {numbers:,} numbers of 4.5 bits{skipped}"


def store_base_in_bf16(part: nn.Module) -> str:
    """Keep the frozen weights in the blocks of `part` in bfloat16, in place; returns a line about it.

    Vectors, such as norms, stay as they are: they take little memory, and autocast computes norms in float32.
    """
    low: dict[nn.Parameter, nn.Parameter] = {}
    for name in get_named_blocks(part):
        for parameter in part.get_submodule(name).parameters():
            if not parameter.requires_grad and parameter.ndim > 1 and parameter.dtype == torch.float32:
                low[parameter] = nn.Parameter(parameter.detach().to(torch.bfloat16), requires_grad=False)
                low[parameter].__dict__.update(parameter.__dict__)
    if not low:
        raise UserError(
            f"adapter.base=bf16: the blocks of {name_model(part)} have no frozen matrix; use adapter.base=full"
        )
    # Modules that share a parameter share the new one.
    for module in part.modules():
        for leaf, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter in low:
                setattr(module, leaf, low[parameter])
    numbers = sum(parameter.numel() for parameter in low)
    return f"base: bf16, {numbers:,} numbers"


def _check_rank(layers: dict[str, nn.Module], rank: int) -> None:
    """Raise UserError for a square Conv1D of the adapter's own rank: shapes would not say that it is transposed."""
    for name, layer in layers.items():
        if is_conv1d(layer) and tuple(layer.weight.shape) == (rank, rank):  # type: ignore[arg-type]
            raise UserError(f"adapter.rank={rank}: {name} is no larger than that; use a smaller rank")


def find_target_layers(model: nn.Module, globs: list[str]) -> dict[str, nn.Module]:
    """Return the linear layers that the globs name, by module name, in the model's order; see AdapterConfig.targets."""
    layers = {name: module for name, module in model.named_modules() if _takes_adapter(module)}
    if not layers:
        raise UserError(f"adapter.kind: {name_model(model)} has no nn.Linear or Conv1D that an adapter could change")
    if not globs:
        blocks = tuple(f"{name}." for name in get_named_blocks(model))
        routers = tuple(f"{name}." for name, module in model.named_modules() if type(module).__name__ == "Router")
        layers = {name: layer for name, layer in layers.items() if not name.startswith(routers)} if routers else layers
        inside = {name: layer for name, layer in layers.items() if name.startswith(blocks)}
        if blocks and not inside:
            raise UserError(
                f"adapter.kind: {name_model(model)} has no nn.Linear or Conv1D in its blocks that an adapter could "
                f"change; name layers with adapter.targets: {', '.join(layers)}"
            )
        return inside or layers
    return {name: layers[name] for name in choose_targets(list(layers), globs, partial(_describe_others, model))}


def _takes_adapter(module: nn.Module) -> bool:
    """Whether this is a linear layer without an adapter that computes with its own forward, which one replaces.

    nn.MultiheadAttention reads the weight of its out_proj without calling it.
    """
    if is_conv1d(module):
        return True
    kind = type(module)
    inherits = isinstance(module, nn.Linear) and kind.forward is nn.Linear.forward
    if issubclass(kind, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return False
    if any(hasattr(module, leaf) for leaf in ADAPTER_LEAVES):
        return False
    return inherits or computes_as_linear(kind)  # type: ignore[arg-type]  # torch: __hash__(object)


def _describe_others(model: nn.Module, glob: str) -> str:
    """Return which modules that take no adapter a glob names; empty: none."""
    others = {type(module).__name__ for name, module in model.named_modules() if matches_target(name, glob)}
    return f" but {', '.join(sorted(others))}; only nn.Linear and Conv1D take an adapter" if others else ""
