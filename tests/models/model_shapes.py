"""Shared by these tests: the configurations of conf/model, and small models with drawn values."""

from pathlib import Path
from typing import Any

import hpc_train.conf
import torch
from omegaconf import OmegaConf
from torch import nn

from hpc_train.config.model import (
    CustomModelConfig,
    HfModelConfig,
    ModelConfig,
    TransformerConfig,
    VisionTransformerConfig,
)
from hpc_train.models.initial_values import initialise_parameters
from hpc_train.models.registry import build_model

FOLDER = Path(hpc_train.conf.__path__[0]) / "model"
SCHEMAS = {
    "transformer_schema": TransformerConfig,
    "vit_schema": VisionTransformerConfig,
    "custom_schema": CustomModelConfig,
    "hf_schema": HfModelConfig,
}
LLAMA = TransformerConfig(name="llama", vocab_size=97, layers=3, hidden=48, heads=6, kv_heads=2, feed_forward=80)
GPT2 = TransformerConfig(
    name="gpt2",
    vocab_size=97,
    layers=3,
    hidden=48,
    heads=4,
    feed_forward=192,
    activation="gelu_tanh",
    norm="layernorm",
    positions="learned",
    max_positions=64,
    bias=True,
    tied_embeddings=True,
)
VIT = VisionTransformerConfig(name="vit", image_size=8, patch_size=2, hidden=48, layers=3, heads=4, feed_forward=96)


def shipped() -> list[str]:
    """Return the names of the models in conf/model that have a shape of their own."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem not in ("custom", "hf"))


def load(name: str) -> ModelConfig:
    """Load a model of conf/model with its schema."""
    plain: Any = OmegaConf.load(FOLDER / f"{name}.yaml")
    first, last = plain.pop("defaults")
    assert last == "_self_"
    config: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(SCHEMAS[first]), plain))
    return config


def drawn(config: ModelConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """Return a model with its initial values."""
    module = build_model(config).to(dtype)
    initialise_parameters(module, seed)
    return module


def tokens(config: TransformerConfig, batch: int = 2, length: int = 33) -> torch.Tensor:
    """Return random tokens (batch, length)."""
    return torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))
