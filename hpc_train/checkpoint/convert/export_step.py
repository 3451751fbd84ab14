"""Export a step to transformers, safetensors or torch's distributed checkpoint (DCP)."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from hpc_train.checkpoint.convert import model_config
from hpc_train.checkpoint.convert.averaged_weights import AveragedTensors, check_average, is_schedule_free
from hpc_train.checkpoint.convert.formats import dcp, peft_files, safetensors_files
from hpc_train.checkpoint.convert.merge_adapters import (
    MergedTensors,
    find_adapted_layers,
    list_transposed_layers,
    read_adapters,
)
from hpc_train.checkpoint.convert.model_config import check_tensors_fit_model, load_model_config, load_run_config
from hpc_train.checkpoint.convert.quantized_base import add_base, needs_base
from hpc_train.checkpoint.convert.rewrite import OnBytes, Progress
from hpc_train.checkpoint.convert.tensor_sources import SavedStepTensors, TensorSource
from hpc_train.checkpoint.convert.tied_weights import add_tied_weights, list_missing_weights
from hpc_train.checkpoint.format.hdf5_layout import dtype_name, parse_dtype
from hpc_train.checkpoint.format.shard_layout import SavedTensor
from hpc_train.checkpoint.storage.file_system import sync_tree
from hpc_train.checkpoint.storage.retention import make_token
from hpc_train.checkpoint.storage.step_directory import is_weight
from hpc_train.checkpoint.storage.step_selection import CheckpointTarget, OpenStep
from hpc_train.config.model import DataConfig, HfModelConfig, ModelConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.models.adapters.names import is_adapter_parameter
from hpc_train.models.huggingface import to_huggingface
from hpc_train.models.huggingface_family import find_model_family
from hpc_train.regular_files import sync_directory


@dataclass(frozen=True)
class ExportOptions:
    """Format and content of an export."""

    format: str
    """hf, safetensors, dcp, or adapter: only the adapters, as PEFT's files."""
    weights: bool
    """Leave out the optimizer state; hf never has it."""
    dtype: str | None
    """Convert floating-point tensors; None: as saved."""
    config: Path | None
    """hf and adapters: config.yaml of the run; None: the one in the run directory."""
    merged: bool = False
    """Add the adapters to the weights they change."""
    averaged: bool = False
    """Write the moving average of the weights in their place."""
    base: str | None = None
    """Where the folder of a model of transformers is now; None: where the run found it."""


@dataclass(frozen=True)
class ExportedStep:
    """The folder that was written."""

    folder: Path
    tensors: int
    bytes: int
    files: list[str]
    problem: str | None = None
    """Why adapters would not compute in PEFT what was trained."""


def export_step(step: OpenStep, folder: Path, options: ExportOptions, progress: Progress) -> ExportedStep:
    """Write `step` into the new folder `folder`, whole or not at all.

    Raises UserError for a model that the format cannot hold, CheckpointError for a damaged step.
    """
    base = _open_base(step, options)
    tensors = _select_tensors(step, base, options)
    written = tensors
    if options.format == "adapter":  # of the weights, only the lengths of DoRA's rows are read
        written = [tensor for tensor in tensors if is_adapter_parameter(tensor.name)]
    total = sum(tensor.rectangle.volume * tensor.itemsize for tensor in written)
    temporary = folder.with_name(f".{folder.name}.tmp-{make_token()}")
    try:
        temporary.mkdir(parents=True)
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise UserError(f"{folder}: cannot be made there ({error.strerror}); export into a folder of yours") from error
    try:
        with progress(f"step {step.manifest.step}", total) as on_bytes:
            files = _write_files(temporary, step, base, tensors, options, on_bytes)
        sync_tree(temporary)
        temporary.rename(folder)
        sync_directory(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return ExportedStep(folder, len(written), total, files, _find_base_problem(step, tensors, options))


def _find_base_problem(step: OpenStep, tensors: list[SavedTensor], options: ExportOptions) -> str | None:
    """Return why PEFT would not compute what was trained from exported adapters and the files of model.path."""
    if options.format != "adapter":
        return None
    model = _read_config_of_step(options, step).model
    if not isinstance(model, HfModelConfig):
        return None
    from hpc_train.checkpoint.convert.adapted_base import (
        explain_lost_layers,
        explain_missing_base,
        read_adapted_weights,
    )

    if (lost := explain_lost_layers(list(find_adapted_layers(tensors)), model)) is not None:
        return f"{lost}; export with --merged, or train with other adapter.targets"
    if needs_base(step.manifest):
        return None  # compared with its base already
    with SavedStepTensors(step.path, step.manifest, step.where) as saved:
        reason = explain_missing_base(read_adapted_weights(_open_source(saved, step, None, options), tensors), model)
    return reason and f"{reason}; PEFT needs a base with those weights: --base FOLDER, or export with --merged"


def _open_base(step: OpenStep, options: ExportOptions) -> HfModelConfig | None:
    """Return the model that has the weights of a step with adapters only; None for any other step."""
    if not needs_base(step.manifest):
        return None
    model = _read_config_of_step(options, step, builds_model=True).model
    assert isinstance(model, HfModelConfig)
    return model


def _write_files(
    folder: Path,
    step: OpenStep,
    base: HfModelConfig | None,
    tensors: list[SavedTensor],
    options: ExportOptions,
    on_bytes: OnBytes,
) -> list[str]:
    """Write the tensors in the chosen format, and return the names of the files."""
    dtype = parse_dtype(options.dtype) if options.dtype else None
    with SavedStepTensors(step.path, step.manifest, step.where) as saved:
        opened = _open_source(saved, step, base, options)
        if options.format == "adapter":
            return _write_adapter(folder, opened, tensors, _read_config_of_step(options, step), dtype, on_bytes)
        source = opened
        if options.merged:
            source = MergedTensors(opened, _read_config_of_step(options, step).adapter)
        if options.format == "dcp":
            return dcp.write_dcp(folder, source, tensors, dtype, on_bytes)
        if options.format == "safetensors":
            groups = [[tensor] for tensor in tensors]
            return safetensors_files.write_safetensors(
                folder, source, groups, lambda state: safetensors_files.cast_state(state, dtype), on_bytes
            )
        config = _read_config_of_step(options, step, builds_model=True)
        files = _write_hugging_face(folder, source, tensors, config.model, dtype, on_bytes)
        return files if "tokenizer.json" in files else [*files, *_write_tokenizer(folder, config.data)]


def _exports_result(step: OpenStep, options: ExportOptions) -> bool:
    """Return whether this exports a schedule-free run's weights alone: they are then the average, its result."""
    return _has_weights_only(options) and is_schedule_free(step.manifest.step_layout.tensors)


def _has_weights_only(options: ExportOptions) -> bool:
    return options.weights or options.merged or options.averaged or options.format in ("hf", "adapter")


def _open_source(
    saved: SavedStepTensors, step: OpenStep, base: HfModelConfig | None, options: ExportOptions
) -> TensorSource:
    """Return the tensors of a step with what an export needs beside them: a base, averages, weights of tied layers."""
    opened: TensorSource = saved if base is None else add_base(saved, step.manifest, base, step.where)
    opened = AveragedTensors(opened) if options.averaged or _exports_result(step, options) else opened
    needs_weights = options.merged or options.format == "adapter"
    if not needs_weights or not list_missing_weights(opened.tensors):
        return opened
    return add_tied_weights(opened, _read_config_of_step(options, step, builds_model=True).model)


def _select_tensors(step: OpenStep, base: HfModelConfig | None, options: ExportOptions) -> list[SavedTensor]:
    """Return the tensors to export. Raises UserError if adapters exist but were not asked for, or vice versa."""
    if options.averaged:
        check_average(step.manifest.step_layout.tensors, step.where)
    with SavedStepTensors(step.path, step.manifest, step.where) as saved:
        every = _open_source(saved, step, base, options).tensors
    tensors = [tensor for tensor in every if is_weight(tensor.name) or not _has_weights_only(options)]
    adapted = {f"{layer}.weight" for layer in find_adapted_layers(tensors)}
    if not adapted and (options.merged or options.format == "adapter"):
        raise UserError(f"{step.where}: has no adapters; export it with --format alone")
    if adapted and options.format == "hf" and not options.merged:
        raise UserError(f"{step.where}: has adapters; add --merged to export weights with them, or use --adapter")
    if options.format == "adapter":
        return [tensor for tensor in tensors if is_adapter_parameter(tensor.name) or tensor.name in adapted]
    return [tensor for tensor in tensors if not options.merged or not is_adapter_parameter(tensor.name)]


def _write_adapter(
    folder: Path,
    source: TensorSource,
    tensors: list[SavedTensor],
    config: RunConfig,
    dtype: torch.dtype | None,
    on_bytes: OnBytes,
) -> list[str]:
    """Write PEFT's files. tensors: the adapters, and the weights of their layers."""
    state = safetensors_files.cast_state(read_adapters(source, tensors, on_bytes), dtype)
    adapters = peft_files.group_adapters(state, config.adapter.alpha / config.adapter.rank)
    base = peft_files.PeftBase(
        config.model, getattr(config.model, "path", None), transposed=bool(list_transposed_layers(tensors))
    )
    return peft_files.write_peft(folder, adapters, base, config.adapter)


def _write_hugging_face(
    folder: Path,
    source: TensorSource,
    tensors: list[SavedTensor],
    model: ModelConfig,
    dtype: torch.dtype | None,
    on_bytes: OnBytes,
) -> list[str]:
    """Write weights and config.json of a transformers model; returns the files' names. dtype: None: as saved."""
    if isinstance(model, HfModelConfig):
        from hpc_train.checkpoint.convert.export_pretrained import write_pretrained

        return write_pretrained(folder, source, tensors, model, dtype, on_bytes)
    check_tensors_fit_model(tensors, model, "this step")
    find_model_family(model)
    groups = _group_by_block(tensors)
    files = safetensors_files.write_safetensors(
        folder,
        source,
        groups,
        lambda state: safetensors_files.cast_state(to_huggingface(state, model), dtype),
        on_bytes,
    )
    text = json.dumps(model_config.encode_hf_config(model, dtype_name(dtype) if dtype else tensors[0].dtype), indent=2)
    (folder / "config.json").write_text(text + "\n")
    return [*files, "config.json"]


def _write_tokenizer(folder: Path, data: DataConfig) -> list[str]:
    """Write the tokenizer of the run's data, and return the names of the files; none where it has no such form.

    The data may be on another machine: then the export has no tokenizer.
    """
    from hpc_train.data.tokenizers.data_tokenizer import open_data_tokenizer
    from hpc_train.data.tokenizers.tokenizer_folder import write_tokenizer_folder

    try:
        tokenizer = open_data_tokenizer(data)
    except UserError:
        return []
    return [] if tokenizer is None else write_tokenizer_folder(tokenizer, folder)


def _group_by_block(tensors: list[SavedTensor]) -> list[list[SavedTensor]]:
    """Group the tensors of each block, some of which the other format merges; every other tensor is its own group."""
    groups: dict[str, list[SavedTensor]] = {}
    for tensor in tensors:
        parts = tensor.name.split(".")
        groups.setdefault(".".join(parts[:2]) if parts[0] == "layers" else tensor.name, []).append(tensor)
    return list(groups.values())


def _read_config_of_step(options: ExportOptions, step: OpenStep, builds_model: bool = False) -> RunConfig:
    file = options.config or CheckpointTarget(step.directory).run / "config.yaml"
    if not options.config and not file.is_file():
        raise UserError(f"{file}: is not there, and it says which model this is; give it with --config FILE")
    return (load_model_config if builds_model else load_run_config)(file, options.base)
