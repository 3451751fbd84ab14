"""Import weights of transformers, safetensors, torch or its distributed checkpoint (DCP) as step 0 of a run."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from hpc_train.checkpoint.convert import model_config
from hpc_train.checkpoint.convert.formats import dcp, safetensors_files, torch_files
from hpc_train.checkpoint.convert.formats.dcp import parse_dcp_metadata
from hpc_train.checkpoint.convert.formats.torch_files import read_bounded_json
from hpc_train.checkpoint.convert.hf_config.published_files import (
    drop_next_token_layers,
    expand_block_scales,
    is_block_scale,
)
from hpc_train.checkpoint.convert.model_config import check_tensors_fit_model, load_run_config
from hpc_train.checkpoint.convert.rewrite import Progress, StepMetadata, cut_rows, write_step
from hpc_train.checkpoint.convert.tensor_sources import StateDictTensors, TensorSource
from hpc_train.checkpoint.storage.step_directory import find_steps, is_weight, mark_weights_only
from hpc_train.config.compose import compose
from hpc_train.config.keys.overrides import format_override_value
from hpc_train.config.model import ModelConfig
from hpc_train.errors import UserError
from hpc_train.models.huggingface import from_huggingface
from hpc_train.models.huggingface_family import find_model_family

_BASES = {
    "llama": "llama_tiny",
    "mistral": "llama_tiny",
    "ministral": "llama_tiny",
    "gemma2": "gemma_tiny",
    "gemma3_text": "gemma_tiny",
    "olmo2": "llama_tiny",
    "olmo3": "llama_tiny",
    "gpt2": "gpt2_tiny",
    "vit": "vit_tiny",
    "mixtral": "llama_moe_tiny",
    "qwen3_moe": "llama_moe_tiny",
    "olmoe": "llama_moe_tiny",
    "deepseek_v3": "deepseek_tiny",
}
"""Model family -> the shipped model of which an imported model is a variant."""


@dataclass(frozen=True)
class ImportOptions:
    """Format of the source, and what to make of it."""

    format: str
    """hf, safetensors, dcp or torch."""
    prefix: str
    """Import only tensors whose names begin with it, and remove it from the names."""
    dtype: str | None
    """float32 or float64; None: narrower floats are cast to float32."""
    ranks: int
    """Files to write."""


@dataclass(frozen=True)
class ImportedStep:
    """The step that was written, and the overrides with which a run starts from it."""

    path: Path
    tensors: int
    bytes: int
    left_out: int
    """Number of tensors of the source that are no weights of the model."""
    overrides: list[str]


@dataclass(frozen=True)
class _Weights:
    """Weights found in the source."""

    source: TensorSource
    model: ModelConfig | None
    """None where the source does not say."""
    left_out: int
    """Number of tensors that are not of the model: optimizer state, and names without the prefix."""


def import_weights(source: Path, run: Path, options: ImportOptions, progress: Progress) -> ImportedStep:
    """Write checkpoints/step-0 into the run directory `run`.

    Raises UserError for a run that has steps, and for a source that cannot be read or does not fit the run's model.
    """
    directory, model = _find_directory(run)
    weights = _read_weights(source, options)
    tensors = weights.source.tensors
    if not tensors:
        raise UserError(f"{source}: there is no tensor in it{f' below {options.prefix!r}' if options.prefix else ''}")
    if model is not None:
        check_tensors_fit_model(tensors, model, str(source))
    total = sum(tensor.rectangle.volume * tensor.itemsize for tensor in tensors)
    run.mkdir(parents=True, exist_ok=True, mode=0o700)
    metadata = StepMetadata(mark_weights_only({"imported": {"format": options.format, "from": source.name}}))
    with progress("import", total) as on_bytes:
        path = write_step(directory, 0, weights.source, cut_rows(tensors, options.ranks, 0), metadata, on_bytes)
    overrides = [f"run_dir={format_override_value(str(run))}"]
    overrides += _make_model_overrides(weights.model) if weights.model is not None else []
    return ImportedStep(path, len(tensors), total, weights.left_out, overrides)


def _find_directory(run: Path) -> tuple[Path, ModelConfig | None]:
    """Return the directory of checkpoints, and the model if the run has a config. Raises UserError if it has steps."""
    config = load_run_config(run / "config.yaml") if (run / "config.yaml").is_file() else None
    elsewhere = config.checkpoint.dir if config is not None else None
    directory = Path(elsewhere).expanduser().absolute() if elsewhere else run / "checkpoints"
    if steps := find_steps(directory):
        raise UserError(
            f"{directory}: has steps already ({', '.join(map(str, sorted(steps)))}); use a new run directory"
        )
    return directory, config.model if config is not None else None


def _read_weights(path: Path, options: ImportOptions) -> _Weights:
    if options.format == "hf":
        return _read_hugging_face(path, options)
    if options.format == "dcp":
        stored = parse_dcp_metadata(path)
        names = _match_names(list(stored), options.prefix)
        dtypes = {name: _find_parameter_dtype(stored[other].dtype, options) for name, other in names.items()}
        return _Weights(dcp.DcpTensors(path, stored, names, dtypes), None, len(stored) - len(names))
    state = torch_files.read_torch_file(path) if options.format == "torch" else safetensors_files.read_safetensors(path)
    names = _match_names(list(state), options.prefix)
    weights = _wrap_state({name: state[other] for name, other in names.items()}, options)
    return _Weights(weights, None, len(state) - len(names))


def _read_hugging_face(path: Path, options: ImportOptions) -> _Weights:
    file = path / "config.json"
    try:
        body = read_bounded_json(file)
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read ({type(error).__name__}); give a folder of save_pretrained") from error
    model = model_config.parse_hf_config(body, path.name)
    state = safetensors_files.read_safetensors(path)
    layers = getattr(model, "layers", 0)
    # A hostile number would take all the memory below.
    if layers > len(state):
        raise UserError(f"{file}: has {layers} layers, and {path} has {len(state)} tensors")
    weights = drop_next_token_layers(expand_block_scales(state, body), body, layers)
    source = _wrap_state(from_huggingface(weights, model), options)
    check_tensors_fit_model(source.tensors, model, str(path))
    return _Weights(source, model, _count_left_out(state, weights))


def _count_left_out(state: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> int:
    """Count the tensors of the files that are of no part of the model; scales are of their weights."""
    return sum(name not in weights and not is_block_scale(name) for name in state)


def _match_names(names: list[str], prefix: str) -> dict[str, str]:
    """Map our name of each weight to its name in the source."""
    return {
        name.removeprefix(prefix): name
        for name in names
        if name.startswith(prefix) and is_weight(name.removeprefix(prefix)) and name != prefix
    }


def _wrap_state(state: dict[str, torch.Tensor], options: ImportOptions) -> StateDictTensors:
    return StateDictTensors(
        state, {name: _find_parameter_dtype(tensor.dtype, options) for name, tensor in state.items()}
    )


def _find_parameter_dtype(stored_dtype: torch.dtype, options: ImportOptions) -> torch.dtype:
    """Return the dtype in which a run stores this parameter: at least float32."""
    if not stored_dtype.is_floating_point:
        return stored_dtype
    if options.dtype is not None:
        return torch.float64 if options.dtype == "float64" else torch.float32
    return torch.float32 if stored_dtype.itemsize < torch.float32.itemsize else stored_dtype


def _make_model_overrides(model: ModelConfig) -> list[str]:
    """Return the overrides that turn a shipped model into the imported one."""
    base = _BASES[find_model_family(model)]
    shipped: Any = compose([f"model={base}"]).model
    return [f"model={base}", *_list_differences(model, shipped, "model")]


def _list_differences(config: Any, shipped: Any, key: str) -> list[str]:
    """Return the overrides that turn the config `shipped` under `key` into `config`."""
    differences = []
    for field in fields(config):
        value, other = getattr(config, field.name), getattr(shipped, field.name)
        if is_dataclass(value):
            differences += _list_differences(value, other, f"{key}.{field.name}")
        elif field.name != "source" and value != other:
            differences.append(f"{key}.{field.name}={format_override_value(value)}")
    return differences
