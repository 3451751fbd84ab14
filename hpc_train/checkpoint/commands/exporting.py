"""`hpc-train checkpoint export`: a step in the format of another library, whole or not at all."""

from __future__ import annotations

import json as json_module
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from hpc_train.checkpoint.commands.show import print_json, progress, size
from hpc_train.checkpoint.commands.target import Step, one_step, target
from hpc_train.checkpoint.dtypes import dtype_name, dtype_of
from hpc_train.checkpoint.files import sync_directory, sync_tree
from hpc_train.checkpoint.formats import dcp, family_config, safetensors_files
from hpc_train.checkpoint.formats.fit import check_fit, run_config
from hpc_train.checkpoint.holdings import Tensor
from hpc_train.checkpoint.offline.source import Saved
from hpc_train.checkpoint.retention import new_token
from hpc_train.checkpoint.weights import is_weight
from hpc_train.config.model import ModelConfig
from hpc_train.errors import UserError
from hpc_train.models.huggingface import family, to_huggingface

Tell = Callable[[int], object]


@dataclass(frozen=True)
class Options:
    """Of the command."""

    format: str
    weights: bool
    dtype: str | None
    config: str | None


def export(where: str, out: str, options: Options, json: bool) -> int:
    """Write the step into the new folder `out`, and print what is in it; returns 0."""
    step = one_step(where)
    folder = Path(out).expanduser().absolute()
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{out}: exists; export into a new folder")
    tensors = [it for it in step.manifest.holdings.tensors if is_weight(it.name) or not _weights_only(options)]
    total = sum(it.rectangle.volume * it.itemsize for it in tensors)
    temporary = folder.with_name(f".{folder.name}.tmp-{new_token()}")
    temporary.mkdir(parents=True)
    try:
        with progress(f"step {step.manifest.step}", total, json) as tell:
            files = _write(temporary, step, tensors, options, where, tell)
        sync_tree(temporary)
        temporary.rename(folder)
        sync_directory(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if json:
        print_json({"path": str(folder), "format": options.format, "tensors": len(tensors), "files": files})
    else:
        print(f"{folder}: {len(tensors):,} tensors, {size(total)}, as {options.format} in {len(files)} files")
    return 0


def _weights_only(options: Options) -> bool:
    return options.weights or options.format == "hf"


def _write(folder: Path, step: Step, tensors: list[Tensor], options: Options, where: str, tell: Tell) -> list[str]:
    dtype = dtype_of(options.dtype) if options.dtype else None
    with Saved(step.path, step.manifest, step.where) as source:
        if options.format == "dcp":
            return dcp.write(folder, source, tensors, dtype, tell)
        if options.format == "safetensors":
            groups = [[tensor] for tensor in tensors]
            return safetensors_files.write(folder, source, groups, lambda it: safetensors_files.cast(it, dtype), tell)
        return _write_family(folder, source, tensors, _model(options, where), dtype, tell)


def _write_family(
    folder: Path, source: Saved, tensors: list[Tensor], model: ModelConfig, dtype: torch.dtype | None, tell: Tell
) -> list[str]:
    check_fit(tensors, model, "this step")
    family(model)
    groups = _blocks(tensors)
    files = safetensors_files.write(
        folder, source, groups, lambda it: safetensors_files.cast(to_huggingface(it, model), dtype), tell
    )
    text = json_module.dumps(family_config.to_json(model, dtype_name(dtype) if dtype else tensors[0].dtype), indent=2)
    (folder / "config.json").write_text(text + "\n")
    return [*files, "config.json"]


def _blocks(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Tensors that are converted together: those of one block, as some become one; each other alone."""
    groups: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        parts = tensor.name.split(".")
        groups.setdefault(".".join(parts[:2]) if parts[0] == "layers" else tensor.name, []).append(tensor)
    return list(groups.values())


def _model(options: Options, where: str) -> ModelConfig:
    file = Path(options.config).expanduser() if options.config else target(where).run / "config.yaml"
    if not options.config and not file.is_file():
        raise UserError(f"{file}: is not there, and it says which model this is; give it with --config FILE")
    return run_config(file).model
