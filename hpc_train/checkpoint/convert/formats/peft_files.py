"""Convert adapters between PEFT's format (adapter_model.safetensors and adapter_config.json) and our parameters.

Both sides have A (rank, inputs) and B (outputs, rank). PEFT stores DoRA's magnitude m; we store how much it differs
from the lengths of the weight's rows (models/adapters/adapted_linear.py). GPT-2 of transformers has q, k and v in one
layer: their three adapters become one, whose rank is the sum of theirs and whose B is block-diagonal.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpc_train.checkpoint.convert.formats.safetensors_files import read_safetensors, save_state
from hpc_train.checkpoint.convert.formats.torch_files import read_bounded_json
from hpc_train.config.adapter import AdapterConfig
from hpc_train.config.model import CustomModelConfig, HfModelConfig, ModelConfig
from hpc_train.errors import UserError
from hpc_train.models.adapters.names import ADAPTER_A, ADAPTER_B, ADAPTER_MAGNITUDE
from hpc_train.models.hf.config_file import find_task, read_config_file
from hpc_train.models.huggingface import name_huggingface_module
from hpc_train.models.huggingface_family import find_model_family
from hpc_train.terminal import one_line
from hpc_train.units import join_first

State = dict[str, Tensor]
WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_SUFFIXES = {".lora_A.weight": ADAPTER_A, ".lora_B.weight": ADAPTER_B, ".lora_magnitude_vector": ADAPTER_MAGNITUDE}
_UNSUPPORTED = (
    "modules_to_save", "layer_replication", "lora_bias", "target_parameters", "trainable_token_indices", "use_qalora",
    "alora_invocation_tokens", "use_bdlora", "arrow_config", "kasa_config", "velora_config", "monteclora_config",
)  # fmt: skip
"""Settings of PEFT that add something which plain LoRA and DoRA do not compute."""
_TASK_TYPES = {"causal_lm": "CAUSAL_LM", "seq2seq_lm": "SEQ_2_SEQ_LM"}
"""Tasks for which PEFT has a class that generates text."""
_MODULE_NAME = re.compile(r"\^?[\w.]+")
"""A key of alpha_pattern that names modules: the end of a name or, after ^, all of it."""


@dataclass(frozen=True)
class LayerAdapter:
    """The adapter of one linear layer."""

    a: Tensor
    b: Tensor
    magnitude: Tensor | None
    """DoRA's m (outputs,), as PEFT keeps it."""
    scale: float
    """Factor of B A."""


@dataclass(frozen=True)
class PeftBase:
    """The model that an adapter belongs to."""

    model: ModelConfig
    path: str | None
    """Where the base model is, for PEFT's config."""
    transposed: bool
    """Whether adapted weights are (inputs, outputs), as in Conv1D of transformers."""


def group_adapters(state: Mapping[str, Tensor], scale: float) -> dict[str, LayerAdapter]:
    """Return the adapters by our layer's name, from our parameters, with magnitudes made absolute already."""
    layers = {name.rpartition(".")[0] for name in state}
    return {
        layer: LayerAdapter(
            state[f"{layer}.{ADAPTER_A}"],
            state[f"{layer}.{ADAPTER_B}"],
            state.get(f"{layer}.{ADAPTER_MAGNITUDE}"),
            scale,
        )
        for layer in sorted(layers)
    }


def write_peft(folder: Path, adapters: Mapping[str, LayerAdapter], base: PeftBase, adapter: AdapterConfig) -> list[str]:
    """Write both files into `folder`; returns their names."""
    model = base.model
    peft_tensors = _name_and_fuse(adapters, model)
    state: State = {}
    for module, layer in peft_tensors.items():
        state[f"{_PREFIX}{module}.lora_A.weight"] = layer.a.contiguous()
        state[f"{_PREFIX}{module}.lora_B.weight"] = layer.b.contiguous()
        if layer.magnitude is not None:
            state[f"{_PREFIX}{module}.lora_magnitude_vector"] = layer.magnitude.contiguous()
    save_state(state, folder / WEIGHTS_FILE)
    ranks = {module: len(layer.a) for module, layer in peft_tensors.items() if len(layer.a) != adapter.rank}
    config = {
        "peft_type": "LORA",
        "task_type": _find_task_type(model),
        "base_model_name_or_path": base.path,
        "inference_mode": True,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "use_dora": adapter.kind == "dora",
        "bias": "none",
        "fan_in_fan_out": base.transposed or _find_family(model) == "gpt2",
        "target_modules": sorted(peft_tensors),
        "rank_pattern": ranks,
        "alpha_pattern": {module: peft_tensors[module].scale * rank for module, rank in ranks.items()},
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    return [WEIGHTS_FILE, CONFIG_FILE]


def _find_task_type(model: ModelConfig) -> str | None:
    """Return the task by which PEFT chooses its class; None for the class that takes any model."""
    if isinstance(model, CustomModelConfig):
        return None
    if isinstance(model, HfModelConfig):
        return _TASK_TYPES.get(find_task(model, read_config_file(model)))
    return _TASK_TYPES["causal_lm"]


def read_peft(folder: Path, model: ModelConfig, layers: Mapping[str, tuple[int, int]]) -> dict[str, LayerAdapter]:
    """Read an adapter that PEFT wrote; returns it by our layers' names.

    layers: (outputs, inputs) of each layer of this run that has an adapter. Raises UserError for files that cannot be
    read, an adapter of another kind, and one for other layers or shapes.
    """
    config = _read_config(folder)
    tensors_of_layer: dict[str, dict[str, Tensor]] = {}
    for name, tensor in read_safetensors(folder / WEIGHTS_FILE).items():
        suffix = next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), None)
        if suffix is None or not name.startswith(_PREFIX):
            raise UserError(
                f"{folder / WEIGHTS_FILE}: {name!r} is not of LoRA or DoRA on a linear layer; save the whole weights "
                "beside them, such as a resized vocabulary, in the base model, and the adapter with "
                "save_embedding_layers=False"
            )
        tensors_of_layer.setdefault(name.removeprefix(_PREFIX).removesuffix(suffix), {})[_SUFFIXES[suffix]] = tensor
    matched = _match_layers(tensors_of_layer, model, layers, folder)
    adapters = {}
    for layer, (module, split) in matched.items():
        adapter = _make_layer_adapter(folder, module, tensors_of_layer[module], config)
        adapters[layer] = _check_shape(folder, layer, split(adapter), layers[layer])
    return adapters


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG_FILE
    try:
        config = read_bounded_json(file)
    except FileNotFoundError:
        lack = f"has no {CONFIG_FILE}" if folder.is_dir() else "no such folder"
        raise UserError(f"adapter.path={folder}: {lack}; give a folder that PEFT saved") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read ({type(error).__name__}); give a folder that PEFT saved") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise UserError(f"{file}: peft_type is {kind!r}; only LORA can be read, with or without use_dora")
    for key in _UNSUPPORTED:
        if config.get(key):
            raise UserError(f"{file}: {key} is set, which is more than LoRA and DoRA; train it without")
    if config.get("bias", "none") != "none":
        raise UserError(f"{file}: bias is {config['bias']!r}; biases are not trained with adapters here")
    return config


def _make_layer_adapter(
    folder: Path, module: str, parts: Mapping[str, Tensor], config: Mapping[str, Any]
) -> LayerAdapter:
    a, b, magnitude = (parts.get(leaf) for leaf in (ADAPTER_A, ADAPTER_B, ADAPTER_MAGNITUDE))
    if a is None or b is None or a.ndim != 2 or b.ndim != 2 or b.shape[1] != a.shape[0]:
        raise UserError(f"{folder / WEIGHTS_FILE}: {module} lacks lora_A or lora_B, or they do not fit together")
    if bool(config.get("use_dora")) != (magnitude is not None):
        found = "has no magnitudes" if magnitude is None else "has magnitudes of DoRA"
        raise UserError(
            f"{folder}: use_dora is {config.get('use_dora')} in its configuration, but {module} in {WEIGHTS_FILE} "
            f"{found}; save the adapter with PEFT again"
        )
    return LayerAdapter(a, b, magnitude, _find_scale(folder, module, len(a), config))


def _find_scale(folder: Path, module: str, rank: int, config: Mapping[str, Any]) -> float:
    """Return PEFT's factor of B A for a module, whose alpha may follow a pattern."""
    patterns = config.get("alpha_pattern") or {}
    try:
        named = [alpha for key, alpha in patterns.items() if _names_module(folder, key, module)]
        alpha = float(named[0] if named else config["lora_alpha"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{folder / CONFIG_FILE}: no number lora_alpha in it ({type(error).__name__})") from error
    if not math.isfinite(alpha):
        raise UserError(f"{folder / CONFIG_FILE}: lora_alpha is {alpha}")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _names_module(folder: Path, key: str, module: str) -> bool:
    """Return whether a key of alpha_pattern names this module. Raises UserError for any other regular expression."""
    if not _MODULE_NAME.fullmatch(key):
        raise UserError(
            one_line(
                f"{folder / CONFIG_FILE}: alpha_pattern has the expression {key!r}, and only names of modules are "
                "read; write out the names that it stands for"
            )
        )
    return module == key.removeprefix("^") or module.endswith(f".{key}")


Split = Callable[[LayerAdapter], LayerAdapter]


def _match_layers(
    adapted: Mapping[str, object], model: ModelConfig, layers: Mapping[str, object], folder: Path
) -> dict[str, tuple[str, Split]]:
    """Map each of our layers to PEFT's module, and to how its part is taken from that module's adapter."""
    module_of_layer = {layer: name_module(layer, model) for layer in layers}
    unknown = sorted(set(adapted) - set(module_of_layer.values()))
    if unknown:
        raise UserError(
            f"{folder}: has adapters of {join_first(unknown, 3)}, which this run has not; see adapter.targets"
        )
    return {
        layer: (module, _make_split(layer) if _is_fused(layer, model) else _keep_whole)
        for layer, module in module_of_layer.items()
        if module in adapted
    }


def _keep_whole(adapter: LayerAdapter) -> LayerAdapter:
    return adapter


def _make_split(layer: str) -> Split:
    """Return how to take q, k or v out of the adapter of GPT-2's joint layer."""
    index = "qkv".index(layer[-1])

    def split(adapter: LayerAdapter) -> LayerAdapter:
        rows = len(adapter.b) // 3
        part = slice(index * rows, (index + 1) * rows)
        magnitude = None if adapter.magnitude is None else adapter.magnitude[part]
        b = adapter.b[part]
        used = b.abs().sum(0) > 0  # of an adapter that we wrote, only this layer's block
        if not bool(used.any()) or bool(used.all()):
            return LayerAdapter(adapter.a, b, magnitude, adapter.scale)
        return LayerAdapter(adapter.a[used], b[:, used], magnitude, adapter.scale)

    return split


def _check_shape(folder: Path, layer: str, adapter: LayerAdapter, shape: tuple[int, int]) -> LayerAdapter:
    outputs, inputs = shape
    fits = adapter.b.shape[0] == outputs and adapter.a.shape[1] == inputs
    if not fits or (adapter.magnitude is not None and tuple(adapter.magnitude.shape) != (outputs,)):
        raise UserError(
            f"{folder}: the adapter of {layer} is for {adapter.a.shape[1]} inputs and {adapter.b.shape[0]} outputs, "
            f"and this model's layer has {inputs} and {outputs}; is it of another model?"
        )
    return adapter


def name_module(layer: str, model: ModelConfig) -> str:
    """Return PEFT's name of one of our layers: that of transformers, or for a user's own module its own."""
    if _find_family(model) == "vit":
        raise UserError(
            f"model={model.name}: transformers names ViT's layers differently in each release; use --merged"
        )
    return layer if _has_own_names(model) else name_huggingface_module(layer, model)


def _find_family(model: ModelConfig) -> str:
    return "own" if _has_own_names(model) else find_model_family(model)


def _has_own_names(model: ModelConfig) -> bool:
    """Whether our names of layers are those that PEFT sees: of a user's module, and of a model of transformers."""
    return isinstance(model, (CustomModelConfig, HfModelConfig))


def _is_fused(layer: str, model: ModelConfig) -> bool:
    return _find_family(model) == "gpt2" and layer.endswith((".attention.q", ".attention.k", ".attention.v"))


def _name_and_fuse(adapters: Mapping[str, LayerAdapter], model: ModelConfig) -> dict[str, LayerAdapter]:
    """Return the adapters by PEFT's module names."""
    named: dict[str, LayerAdapter] = {}
    fused: dict[str, dict[str, LayerAdapter]] = {}
    for layer, adapter in adapters.items():
        if _is_fused(layer, model):
            fused.setdefault(name_module(layer, model), {})[layer[-1]] = adapter
        else:
            named[name_module(layer, model)] = adapter
    return named | {module: _fuse(module, parts) for module, parts in fused.items()}


def _fuse(module: str, parts: Mapping[str, LayerAdapter]) -> LayerAdapter:
    """Join the adapters of q, k and v into one of their joint layer; a layer without one gets rows of zeros."""
    given = [parts[which] for which in "qkv" if which in parts]
    if len(given) < 3 and given[0].magnitude is not None:
        raise UserError(f"{module}: PEFT's DoRA needs q, k and v adapted together here; train with all three, or lora")
    rows, ranks = len(given[0].b), sum(len(part.a) for part in given)
    a, b, column = torch.cat([part.a for part in given]), given[0].b.new_zeros(3 * rows, ranks), 0
    for index, which in enumerate("qkv"):
        if which in parts:
            rank = len(parts[which].a)
            b[index * rows : (index + 1) * rows, column : column + rank] = parts[which].b
            column += rank
    magnitudes = [part.magnitude for part in given if part.magnitude is not None]
    return LayerAdapter(a, b, torch.cat(magnitudes) if magnitudes else None, given[0].scale)
