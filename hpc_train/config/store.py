"""The schema, registered where conf/ files can name it in their defaults lists."""

from __future__ import annotations

from hydra.core.config_store import ConfigStore

from hpc_train.config.data import ImageDataConfig, TokenDataConfig
from hpc_train.config.model import CustomModelConfig, TransformerConfig, VisionTransformerConfig
from hpc_train.config.run import RunConfig

GROUPS = (
    "cluster",
    "model",
    "data",
    "parallel",
    "optim",
    "precision",
    "checkpoint",
    "launch",
    "experiment",
)
"""The groups of conf/."""
SCHEMA_SUFFIX = "_schema"
"""Options that end so are types for conf/ files to build on, not choices for a user."""


def register() -> None:
    """Put the dataclasses into Hydra's ConfigStore; calling it again changes nothing."""
    store = ConfigStore.instance()
    store.store("run_schema", RunConfig)
    store.store("transformer_schema", TransformerConfig, group="model")
    store.store("vit_schema", VisionTransformerConfig, group="model")
    store.store("custom_schema", CustomModelConfig, group="model")
    store.store("token_schema", TokenDataConfig, group="data")
    store.store("image_schema", ImageDataConfig, group="data")
