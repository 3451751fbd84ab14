"""Build a model's module from its config: the kinds in this package, and users' own models by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from hpc_train.components import MODELS
from hpc_train.config.model import (
    CustomModelConfig,
    HfModelConfig,
    ModelConfig,
    TransformerConfig,
    VisionTransformerConfig,
)
from hpc_train.errors import UserError
from hpc_train.near_names import suggest_names

if TYPE_CHECKING:
    from torch import nn

F = TypeVar("F", bound="Callable[..., nn.Module]")


def register(name: str) -> Callable[[F], F]:
    """Decorate a function that returns an nn.Module, or a subclass of it: `model=custom model.name=<name>` finds it.

    Raises UserError if another function already has the name.
    """
    return MODELS.register(name)


def build_model(config: ModelConfig, seed: int = 0) -> nn.Module:
    """Build the module that `config` describes, on torch's default device (torch.device("meta"): without memory).

    A transformer and a vision transformer get their values later, from `initial_values.initialise_parameters`. A custom
    module and a model of transformers draw their own in the constructor, under torch's generators seeded with `seed`,
    so that all ranks draw the same.
    Raises UserError for an unknown kind or name, a shape that does not fit, or wrong arguments of a custom model.
    """
    if isinstance(config, TransformerConfig):
        from hpc_train.models.transformer import Transformer

        return Transformer(config)
    if isinstance(config, VisionTransformerConfig):
        from hpc_train.models.vision_transformer import VisionTransformer

        return VisionTransformer(config)
    if isinstance(config, CustomModelConfig):
        return _build_custom(config, seed)
    if isinstance(config, HfModelConfig):
        from hpc_train.models.hf.build import build_hf_model

        return build_hf_model(config, seed)
    raise UserError(
        f"model.kind={config.kind}: no such kind; {suggest_names(config.kind, ('transformer', 'vit', 'hf', 'custom'))}"
    )


def _build_custom(config: CustomModelConfig, seed: int) -> nn.Module:
    import torch
    from torch import nn

    factory = MODELS.find(config.name, config.module)
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        module = MODELS.call(config.name, factory, config.args)
    if not isinstance(module, nn.Module):
        raise UserError(
            f"model.name={config.name}: returned a {type(module).__name__}; it must return a torch.nn.Module"
        )
    return module
