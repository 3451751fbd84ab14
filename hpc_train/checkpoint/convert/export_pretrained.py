"""Export a run of model=hf to a folder that transformers loads: weights, config.json, tokenizer, generation config."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from hpc_train.checkpoint.convert.formats import safetensors_files
from hpc_train.checkpoint.convert.formats.torch_files import read_bounded_file
from hpc_train.checkpoint.convert.tensor_sources import TensorSource
from hpc_train.checkpoint.convert.tied_weights import check_untied, find_tied_names
from hpc_train.checkpoint.format.hdf5_layout import dtype_name
from hpc_train.checkpoint.format.shard_layout import SavedTensor
from hpc_train.config.model import HfModelConfig
from hpc_train.errors import UserError
from hpc_train.models.hf.adapter import HfModel
from hpc_train.models.hf.build import build_hf_model
from hpc_train.models.hf.config_file import find_task, read_config_file
from hpc_train.models.hf.library import list_side_files, revert_conversion

_MAX_SIDE_BYTES = 256 << 20


def write_pretrained(
    folder: Path,
    source: TensorSource,
    tensors: list[SavedTensor],
    config: HfModelConfig,
    dtype: torch.dtype | None,
    on_bytes: Callable[[int], object],
) -> list[str]:
    """Write the files into `folder`, and return their names. Weights get the names that the model's files have.

    Raises UserError if the step is not one of this model, or model.path is no longer there.
    """
    with torch.device("meta"):
        model = build_hf_model(config)
    _check_tensors(tensors, model, config)
    tied, file = find_tied_names(model), read_config_file(config)
    untied = [tensor.name for tensor in tensors if tensor.name in tied]
    check_untied(untied, find_task(config, file))
    files = safetensors_files.write_safetensors(
        folder,
        source,
        _group_by_block(tensors, model),
        lambda state: safetensors_files.cast_state(revert_conversion(model, state), dtype),
        on_bytes,
    )
    body = {key: value for key, value in file.body.items() if key not in ("torch_dtype", "dtype")}
    body |= {"architectures": [type(model).__name__], "dtype": dtype_name(dtype) if dtype else tensors[0].dtype}
    if untied:
        body["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(body, indent=2) + "\n")
    side_files = [str(path.relative_to(file.folder)) for path in list_side_files(file.folder)]
    for name in side_files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(read_bounded_file(file.folder / name, _MAX_SIDE_BYTES))
    return [*files, "config.json", *side_files]


def _check_tensors(tensors: list[SavedTensor], model: HfModel, config: HfModelConfig) -> None:
    kind = type(model).__name__
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    wanted |= {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in wanted}
    given = {tensor.name: tuple(tensor.shape) for tensor in tensors}
    missing = [name for name, _ in model.named_parameters() if name not in given]
    other = [name for name, shape in given.items() if wanted.get(name) != shape]
    if missing or other:
        raise UserError(
            f"this step is not one of model.path={config.path}: {(missing or other)[0]} "
            f"{'is missing' if missing else f'is not one of {kind}, or of another shape'}"
        )


def _group_by_block(tensors: list[SavedTensor], model: HfModel) -> list[list[SavedTensor]]:
    """Group the tensors of each layer, some of which the files have in other parts; any other is its own group."""
    groups: dict[str, list[SavedTensor]] = {}
    for tensor in tensors:
        block = next((name for name in model.block_names if tensor.name.startswith(f"{name}.")), tensor.name)
        groups.setdefault(block, []).append(tensor)
    return list(groups.values())
