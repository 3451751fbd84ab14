"""Convert config.json of transformers from and to our model config, for the families of models/huggingface_family.py.

`check_tensors_fit_model` compares tensors with a model before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf.errors import OmegaConfBaseException

from hpc_train.checkpoint.convert.hf_config import dense, experts, gemma, olmo
from hpc_train.checkpoint.convert.hf_config.rotary import Json
from hpc_train.checkpoint.format.shard_layout import SavedTensor
from hpc_train.config.model import (
    CustomModelConfig,
    HfModelConfig,
    ModelConfig,
)
from hpc_train.config.plain_config import config_from_dict, config_to_dict
from hpc_train.config.run import RunConfig
from hpc_train.config.run_file import load_run_file
from hpc_train.errors import UserError
from hpc_train.models.huggingface_family import find_model_family
from hpc_train.models.registry import build_model


@dataclass(frozen=True)
class _ConfigFormat:
    """How the config.json of one family of models is written and read."""

    encode: Callable[..., Json]
    """Takes our model config, and returns the content of config.json."""
    parse: Callable[..., ModelConfig]
    """Takes (content of config.json, name of the model), and returns our model config."""


_FORMATS = {
    "llama": _ConfigFormat(dense.encode_llama, dense.parse_llama),
    "mistral": _ConfigFormat(dense.encode_mistral, dense.parse_mistral),
    "ministral": _ConfigFormat(dense.encode_ministral, dense.parse_ministral),
    "gpt2": _ConfigFormat(dense.encode_gpt2, dense.parse_gpt2),
    "vit": _ConfigFormat(dense.encode_vit, dense.parse_vit),
    "gemma2": _ConfigFormat(gemma.encode_gemma2, gemma.parse_gemma2),
    "gemma3_text": _ConfigFormat(gemma.encode_gemma3, gemma.parse_gemma3),
    "olmo2": _ConfigFormat(olmo.encode_olmo2, olmo.parse_olmo2),
    "olmo3": _ConfigFormat(olmo.encode_olmo3, olmo.parse_olmo3),
    "mixtral": _ConfigFormat(experts.encode_mixtral, experts.parse_mixtral),
    "qwen3_moe": _ConfigFormat(
        partial(experts.encode_many_experts, architecture="Qwen3MoeForCausalLM"), experts.parse_qwen3_moe
    ),
    "olmoe": _ConfigFormat(partial(experts.encode_many_experts, architecture="OlmoeForCausalLM"), experts.parse_olmoe),
    "deepseek_v3": _ConfigFormat(experts.encode_deepseek_v3, experts.parse_deepseek_v3),
}
"""By model_type of config.json."""


def encode_hf_config(config: ModelConfig, dtype: str) -> Json:
    """Return the content of config.json for weights of a dtype. Raises UserError for a model of any other family."""
    model_type = find_model_family(config)
    content = _FORMATS[model_type].encode(config)
    return {**content, "model_type": model_type, "torch_dtype": dtype}


def parse_hf_config(body: Mapping[str, Any], name: str) -> ModelConfig:
    """Return the model that a config.json describes. Raises UserError if our models cannot compute it.

    body: content of the file, which may be anything. name: of the new model.
    """
    model_type = body.get("model_type") if isinstance(body, Mapping) else None
    if not isinstance(model_type, str) or model_type not in _FORMATS:
        raise UserError(f"config.json: model_type {model_type!r} is not supported; supported are {', '.join(_FORMATS)}")
    try:
        return _FORMATS[model_type].parse(body, name)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(f"config.json: {type(error).__name__} {error}: is it of a {model_type} model?") from error


def load_run_config(file: Path, base: str | None = None) -> RunConfig:
    """Load the config.yaml of a run. Raises UserError if it is not one.

    base: new path of a transformers model's folder, if it has moved.
    """
    try:
        config = config_from_dict(load_run_file(file))
        return config if base is None else _move_base(config, base)
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); give the config.yaml of a run") from error
    except (OmegaConfBaseException, AssertionError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file}: is not the config.yaml of a run ({type(error).__name__})") from error


def load_model_config(file: Path, base: str | None = None) -> RunConfig:
    """Load the config.yaml of a run whose model is about to be built; as load_run_config, which checks no folder.

    Also raises UserError, with what to do, if the folder of a model of transformers has moved.
    """
    config = load_run_config(file, base)
    model = config.model
    if base is not None and not Path(base).expanduser().is_dir():
        raise UserError(f"--base {base}: no such folder; give the one that has the model of the run now")
    if isinstance(model, HfModelConfig) and not Path(model.path).expanduser().is_dir():
        raise UserError(
            f"{file}: its model is that of model.path={model.path}, which is not there; say where this folder is now "
            "with --base FOLDER"
        )
    return config


def _move_base(config: RunConfig, base: str) -> RunConfig:
    """Let the model, and a tokenizer from the same folder, be read from `base`."""
    if not isinstance(config.model, HfModelConfig):
        raise UserError(f"--base: model={config.model.name} is not read from a folder of transformers; leave it out")
    plain, old_path = config_to_dict(config), config.model.path
    plain["model"]["path"] = str(Path(base).expanduser().absolute())
    if plain["data"].get("tokenizer") == old_path:
        plain["data"]["tokenizer"] = plain["model"]["path"]
    return config_from_dict(plain)


def check_tensors_fit_model(tensors: Iterable[SavedTensor], config: ModelConfig, where: str) -> None:
    """Raise UserError for the first weight that the model does not have, that is missing, or that has another shape.

    A custom model is not checked: only the run itself can build it.
    """
    if isinstance(config, CustomModelConfig):
        return
    given, expected = {tensor.name: tensor.shape for tensor in tensors}, _list_model_shapes(config)
    unknown = [name for name in given if name not in expected]
    missing = [name for name in expected if name not in given]
    if unknown:
        raise UserError(f"{where}: the tensor {unknown[0]!r} is not one of model={config.name}; name another model")
    if missing:
        raise UserError(f"{where}: model={config.name} needs the tensor {missing[0]!r}, which is not there")
    for name, shape in given.items():
        if shape != expected[name]:
            raise UserError(
                f"{where}: the tensor {name!r} is of shape {shape}, in model={config.name} of {expected[name]}"
            )


def _list_model_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight, by name, from a model on the meta device, which has no data."""
    try:
        with torch.device("meta"):
            model = build_model(config)
    except (RuntimeError, ArithmeticError, TypeError, ValueError, AssertionError) as error:
        text = " ".join(str(error).split())[:200]
        raise UserError(
            f"model={config.name}: cannot be built with these sizes ({type(error).__name__}: {text})"
        ) from None
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
