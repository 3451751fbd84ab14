"""Compute the linear layers of blocks in 8 bits, with torchao.

The formats are those of Micikevicius et al. 2022, arXiv:2209.05433; the scales and recipes are torchao's (float8). The
parameters keep their dtype: each product rounds its inputs again. So parameters, optimizer state and checkpoints are
the same as in a run without float8, and so is what fully_shard gathers, unless data_parallel/float8_gather.py rounds it
first. Embedding, head, norms and routers are not converted. mxfp8.py has the layers with a scale for each block of 32
values, and the routed experts (precision.float8_experts).

A CPU has no 8-bit products. There torchao rounds to 8 bits and multiplies in the dtype of the layer, so that a layout
can be proved equal to a single process without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hpc_train.config.train import PrecisionConfig
from hpc_train.errors import UserError
from hpc_train.models.experts import ExpertProduct, list_mixtures
from hpc_train.models.linear import multiply_weight
from hpc_train.parallel.adapters import find_target_layers
from hpc_train.parallel.materialise import is_rehearsal
from hpc_train.parallel.user_model import name_model
from hpc_train.quiet_imports import without_warnings
from hpc_train.traffic.weights import FLOAT8_MULTIPLE, MXFP8_BLOCK


def convert_linear_layers(part: nn.Module, config: PrecisionConfig, device: torch.device, tp: int = 1) -> str:
    """Have the linear layers of the blocks of `part` compute in 8 bits, in place; returns a line about it.

    Layers whose sizes are not multiples of 16 (mxfp8: 32) are left alone, with tp also those whose parts over tp ranks
    would not be. Raises UserError without torchao, or if no layer is left.
    """
    torchao = _import_torchao()
    in_blocks = config.float8.startswith("mxfp8")
    multiple = (MXFP8_BLOCK if in_blocks else FLOAT8_MULTIPLE) * tp
    linear_layers = {
        name: module for name, module in find_target_layers(part, []).items() if isinstance(module, nn.Linear)
    }
    convertible = {
        name
        for name, layer in linear_layers.items()
        if not (layer.in_features % multiple or layer.out_features % multiple)
    }
    if not convertible:
        raise UserError(
            f"precision.float8={config.float8}: none of the {len(linear_layers)} linear layers of {name_model(part)} "
            f"has sizes that are multiples of {multiple}{f' (parallel.tp={tp})' if tp > 1 else ''}; choose such a "
            "width, or precision=bf16"
        )
    emulates = device.type != "cuda" and not is_rehearsal()  # a rehearsal counts the memory of a GPU's products
    mixtures = ""
    if in_blocks:
        products = _import_block_products(config)
        wide = config.float8.endswith("_with_gw_hp")
        for name in convertible:
            set_product(part.get_submodule(name), products.make_mxfp8_product(wide, device))
        if config.float8_experts:
            mixtures = _convert_experts(part, products.make_mxfp8_expert_product(wide, device), multiple)
    else:
        recipe = replace(torchao.Float8LinearConfig.from_recipe_name(config.float8), emulate=emulates)
        _convert_by_torchao(torchao, part, convertible, recipe, device)
    skipped_count = len(linear_layers) - len(convertible)
    skipped = f", {skipped_count} left alone for their sizes" if skipped_count else ""
    emulation = ", emulated: this device has no products of 8 bits" if emulates else ""
    return f"float8: {config.float8}, {len(convertible)} linear layers{skipped}{mixtures}{emulation}"


def _import_block_products(config: PrecisionConfig) -> ModuleType:
    try:
        return import_module("hpc_train.parallel.precision.mxfp8")
    except ImportError as error:  # a prototype of torchao, which a release may move
        raise UserError(
            f"precision.float8={config.float8}: this torchao has no such products ({error}); pip install "
            "'torchao>=0.18,<0.19', or use precision=fp8"
        ) from None


def _convert_experts(part: nn.Module, product: ExpertProduct, multiple: int) -> str:
    """Have the routed experts of `part` compute by `product`, in place; returns the end of the line about it.

    Raises UserError for sizes that are no multiples of `multiple`; tp divides the width.
    """
    mixtures = list_mixtures(part)
    for name, mixture in mixtures.items():
        _, hidden, width = mixture.experts.gate.shape
        if hidden % MXFP8_BLOCK or width % multiple:
            raise UserError(
                f"precision.float8_experts=true: {name} has hidden states of {hidden} and experts of {width}, which "
                f"must be multiples of {MXFP8_BLOCK} and {multiple}; leave it out, or choose such widths"
            )
        mixture.experts.product = product
    return f", experts of {len(mixtures)} layers"


def _convert_by_torchao(
    torchao: Any, part: nn.Module, names: Collection[str], recipe: Any, device: torch.device
) -> None:
    torchao.convert_to_float8_training(part, config=recipe, module_filter_fn=lambda _, name: name in names)
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    def multiply_in_float8(layer: Any, x: Tensor, weight: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):  # torchao's own forward knows only the autocast of GPUs
            x = x.to(torch.get_autocast_dtype(x.device.type))
        product: Tensor = matmul_with_hp_or_float8_args.apply(x, weight.t(), layer.linear_mm_config, layer.config)
        return product

    for name in names:
        layer = part.get_submodule(name)
        set_product(layer, partial(multiply_in_float8, layer))


def set_product(layer: nn.Module, product: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Have a linear layer compute by `product`: (x (..., K), weight (N, K)) -> (..., N), the product without the bias.

    Layers that are split over tp call it too, with their own parts of x and the weight.
    """
    assert isinstance(layer, nn.Linear)
    layer.product = product  # type: ignore[assignment]

    def forward(x: Tensor) -> Tensor:
        out = multiply_weight(layer, x)
        return out if layer.bias is None else out + layer.bias.to(out.dtype)

    layer.forward = forward  # type: ignore[method-assign, assignment]


def _import_torchao() -> Any:
    try:
        with without_warnings():  # of compiled parts for GPUs that are not here
            from torchao import float8
    except ImportError:
        raise UserError("precision.float8 needs the package torchao: pip install 'hpc_train[float8]'") from None
    return float8
