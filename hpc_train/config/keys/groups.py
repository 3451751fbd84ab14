"""List what each group of conf/ offers, by looking at the files alone: no Hydra, so that tab completion is quick."""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from hpc_train.config.model import (
    CustomDataConfig,
    CustomModelConfig,
    DataConfig,
    HfModelConfig,
    ImageDataConfig,
    ImageFilesDataConfig,
    MixtureDataConfig,
    ModelConfig,
    TokenDataConfig,
    TransformerConfig,
    VisionTransformerConfig,
)

GROUPS = (
    "cluster",
    "model",
    "data",
    "parallel",
    "adapter",
    "optim",
    "precision",
    "checkpoint",
    "launch",
    "container",
    "resilience",
    "loggers",
    "experiment",
)
"""The groups of conf/."""
SCHEMAS: dict[str, dict[str, type[ModelConfig | DataConfig]]] = {
    "model": {
        "transformer_schema": TransformerConfig,
        "vit_schema": VisionTransformerConfig,
        "custom_schema": CustomModelConfig,
        "hf_schema": HfModelConfig,
    },
    "data": {
        "token_schema": TokenDataConfig,
        "image_schema": ImageDataConfig,
        "image_files_schema": ImageFilesDataConfig,
        "mixture_schema": MixtureDataConfig,
        "custom_data_schema": CustomDataConfig,
    },
}
"""Types for the files of a group to build on, by the name that their defaults lists use."""


def find_option_files(group: str, config_dir: str | None = None) -> dict[str, Traversable]:
    """Return the files of the options that `group=` accepts, by name: the shipped ones, and those of config_dir."""
    folders: list[Traversable] = [files("hpc_train.conf").joinpath(group)]
    if config_dir is not None:
        folders.append(Path(config_dir, group))
    option_files = (
        file for folder in folders if folder.is_dir() for file in folder.iterdir() if file.name.endswith(".yaml")
    )
    return {file.name.removesuffix(".yaml"): file for file in sorted(option_files, key=lambda file: file.name)}


def find_option_type(group: str, option: str, config_dir: str | None = None) -> type | None:
    """Return the type that an option of `model` or `data` builds on; None if its file names none."""
    file = find_option_files(group, config_dir).get(option)
    named = [name for name in _read_defaults(file) if isinstance(name, str)] if file else []
    return next((SCHEMAS[group][name] for name in named if name in SCHEMAS.get(group, {})), None)


def read_default_options() -> dict[str, str]:
    """Return the option that each group has when nothing is chosen."""
    pairs = (item for item in _read_defaults(files("hpc_train.conf").joinpath("config.yaml")) if isinstance(item, dict))
    return {group: option for pair in pairs for group, option in pair.items() if group in GROUPS}


def _read_defaults(file: Traversable) -> list[Any]:
    import yaml  # type: ignore[import-untyped]

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return []  # composing says what is wrong with it
    defaults = content.get("defaults") if isinstance(content, dict) else None
    return defaults if isinstance(defaults, list) else []
