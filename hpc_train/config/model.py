"""conf/model: the shapes of the models that can be trained."""

from __future__ import annotations

from omegaconf import MISSING

from hpc_train.config.schema import schema, setting


@schema
class ModelConfig:
    """What every model has; the kinds below add their own fields."""

    kind: str = MISSING
    """Name in the registry of models: transformer, vit, custom."""
    name: str = MISSING


@schema
class TransformerConfig(ModelConfig):
    """A decoder-only transformer of the Llama or the GPT family."""

    kind: str = "transformer"
    source: list[str] = setting(default=[])
    """Public pages that the shape comes from."""
    vocab_size: int = setting(default=256, ge=2)
    layers: int = setting(default=4, ge=1)
    hidden: int = setting(default=128, ge=1)
    heads: int = setting(default=4, ge=1)
    kv_heads: int | None = setting(default=None, ge=1)
    """Key and value heads (grouped-query attention); None: as many as heads."""
    head_dim: int | None = setting(default=None, ge=1)
    """None: hidden / heads."""
    feed_forward: int = setting(default=384, ge=1)
    """Width of the feed-forward layer (of each of its two branches for swiglu)."""
    activation: str = setting(default="swiglu", choices=("swiglu", "gelu", "gelu_tanh"))
    norm: str = setting(default="rmsnorm", choices=("rmsnorm", "layernorm"))
    norm_eps: float = setting(default=1e-5, gt=0)
    positions: str = setting(default="rotary", choices=("rotary", "learned"))
    rope_theta: float = setting(default=10000.0, gt=0)
    rope_scaling: str = setting(default="none", choices=("none", "llama3"))
    """llama3: the frequency scaling of Llama 3.1 (low 1, high 4, original length 8192)."""
    rope_factor: float = setting(default=8.0, ge=1)
    """llama3: how much the low frequencies are slowed down; 8 in Llama 3.1, 32 in Llama 3.2."""
    max_positions: int = setting(default=2048, ge=1)
    """Longest sequence (rows of a learned position table)."""
    bias: bool = False
    """Biases in linear layers (GPT family) and in layernorm."""
    tied_embeddings: bool = False
    dropout: float = setting(default=0.0, ge=0, lt=1)
    init_std: float = setting(default=0.02, gt=0)


@schema
class VisionTransformerConfig(ModelConfig):
    """A vision transformer classifier (Dosovitskiy et al. 2020, arXiv:2010.11929)."""

    kind: str = "vit"
    source: list[str] = setting(default=[])
    image_size: int = setting(default=8, ge=1)
    """Height and width of an image, pixels."""
    patch_size: int = setting(default=2, ge=1)
    """Height and width of a patch, pixels; divides image_size."""
    channels: int = setting(default=1, ge=1)
    classes: int = setting(default=10, ge=2)
    layers: int = setting(default=4, ge=1)
    hidden: int = setting(default=64, ge=1)
    heads: int = setting(default=4, ge=1)
    feed_forward: int = setting(default=256, ge=1)
    norm_eps: float = setting(default=1e-6, gt=0)
    dropout: float = setting(default=0.0, ge=0, lt=1)
    init_std: float = setting(default=0.02, gt=0)


@schema
class CustomModelConfig(ModelConfig):
    """A user's own module, by the name it was registered under."""

    kind: str = "custom"
    name: str = MISSING
    """Name given to `hpc_train.models.register`, or of an entry point in the group hpc_train.models."""
    module: str | None = None
    """Python module to import first, where the decorator is; None for an installed entry point."""
    args: dict[str, float | int | bool | str | None] = setting(default={})
    """Keyword arguments of the registered function."""
