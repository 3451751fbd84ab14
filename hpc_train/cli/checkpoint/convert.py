"""`hpc-train checkpoint reshard`, `export` and `import`: write a step again in other files or in another format.

Each result appears whole or not at all, and tensors pass through in pieces, so that memory stays small.
"""

from __future__ import annotations

import json as json_module
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from hpc_train.checkpoint.convert import dcp, model_config, safetensors_files, torch_files
from hpc_train.checkpoint.convert.dcp import parse_dcp_metadata
from hpc_train.checkpoint.convert.model_config import check_tensors_fit_model, load_run_config
from hpc_train.checkpoint.convert.rewrite import (
    SavedStepTensors,
    StateDictTensors,
    StepMetadata,
    TensorSource,
    cut_rows,
    write_step,
)
from hpc_train.checkpoint.convert.torch_files import read_bounded_json
from hpc_train.checkpoint.format.hdf5_layout import dtype_name, parse_dtype
from hpc_train.checkpoint.format.shard_layout import SavedTensor
from hpc_train.checkpoint.storage.file_system import sync_directory, sync_tree
from hpc_train.checkpoint.storage.retention import make_token
from hpc_train.checkpoint.storage.step_directory import (
    find_steps,
    is_weight,
    mark_bad,
    mark_weights_only,
    read_bad_mark,
)
from hpc_train.cli.checkpoint.selection import CheckpointTarget, OpenStep, find_target, open_one_step
from hpc_train.cli.output import print_json, progress_bar
from hpc_train.config.compose import compose
from hpc_train.config.model import ModelConfig
from hpc_train.errors import UserError
from hpc_train.models.huggingface import find_model_family, from_huggingface, to_huggingface
from hpc_train.units import format_bytes

_STEP_NAMES = re.compile(r"step-[0-9]+|\.?lock.*")


def reshard_command(where: str, out: str, ranks: int, dim: int, json: bool) -> int:
    """Write the step anew under the directory `out`, and print where it is; returns 0."""
    step = open_one_step(where)
    manifest = step.manifest
    directory = Path(out).expanduser().absolute()
    _check_output(directory, step.path.resolve().parent)
    total = sum(it.rectangle.volume * it.itemsize for it in manifest.holdings.tensors)
    about = StepMetadata(manifest.extra, manifest.finite, manifest.validation_loss, manifest.origin)
    with (
        SavedStepTensors(step.path, manifest, step.where) as source,
        progress_bar(f"step {manifest.step}", total, json) as tell,
    ):
        files = cut_rows(manifest.holdings.tensors, ranks, dim)
        path = write_step(directory, manifest.step, source, files, about, tell)
    _copy_bad_mark(step, directory)
    count = sum(bool(rows) for rows in files)
    if json:
        print_json({"step": manifest.step, "path": str(path), "files": count, "bytes": total})
    else:
        print(f"{path}: {format_bytes(total)} in {count} files")
    return 0


def _check_output(out: Path, directory: Path) -> None:
    """Raise UserError if a copy would pass for one of a run's own steps, or lie among other files.

    directory: of the checkpoints that are read, with links resolved.
    """
    place = out.resolve()
    for own in (CheckpointTarget(directory).run, directory):
        if place == own or own in place.parents:
            raise UserError(f"{out}: is inside of what is read, {own}; choose a directory outside of it")
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file; choose a new or an empty directory")
    names = sorted(entry.name for entry in out.iterdir()) if out.is_dir() else []
    strange = [name for name in names if not _STEP_NAMES.fullmatch(name)]
    if strange:
        raise UserError(f"{out}: holds {strange[0]}; choose a new or an empty directory, or one of resharded steps")
    if names and any((place.parent / name).exists() for name in ("job.json", "config.yaml")):
        raise UserError(f"{out}: holds the checkpoints of a run; choose a new or an empty directory")


def _copy_bad_mark(step: OpenStep, directory: Path) -> None:
    """A step that was marked bad stays so."""
    with suppress(FileNotFoundError):
        mark_bad(directory, step.manifest.step, read_bad_mark(step.path))


Tell = Callable[[int], object]


@dataclass(frozen=True)
class ExportOptions:
    """Of the command."""

    format: str
    weights: bool
    dtype: str | None
    config: str | None


def export_command(where: str, out: str, options: ExportOptions, json: bool) -> int:
    """Write the step into the new folder `out`, and print what is in it; returns 0."""
    step = open_one_step(where)
    folder = Path(out).expanduser().absolute()
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{out}: exists; export into a new folder")
    tensors = [it for it in step.manifest.holdings.tensors if is_weight(it.name) or not _weights_only(options)]
    total = sum(it.rectangle.volume * it.itemsize for it in tensors)
    temporary = folder.with_name(f".{folder.name}.tmp-{make_token()}")
    temporary.mkdir(parents=True)
    try:
        with progress_bar(f"step {step.manifest.step}", total, json) as tell:
            files = _write_export(temporary, step, tensors, options, where, tell)
        sync_tree(temporary)
        temporary.rename(folder)
        sync_directory(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if json:
        print_json({"path": str(folder), "format": options.format, "tensors": len(tensors), "files": files})
    else:
        print(f"{folder}: {len(tensors):,} tensors, {format_bytes(total)}, as {options.format} in {len(files)} files")
    return 0


def _weights_only(options: ExportOptions) -> bool:
    return options.weights or options.format == "hf"


def _write_export(
    folder: Path, step: OpenStep, tensors: list[SavedTensor], options: ExportOptions, where: str, tell: Tell
) -> list[str]:
    dtype = parse_dtype(options.dtype) if options.dtype else None
    with SavedStepTensors(step.path, step.manifest, step.where) as source:
        if options.format == "dcp":
            return dcp.write_dcp(folder, source, tensors, dtype, tell)
        if options.format == "safetensors":
            groups = [[tensor] for tensor in tensors]
            return safetensors_files.write_safetensors(
                folder, source, groups, lambda it: safetensors_files.cast_state(it, dtype), tell
            )
        return _write_hugging_face(folder, source, tensors, _model_of_step(options, where), dtype, tell)


def _write_hugging_face(
    folder: Path,
    source: SavedStepTensors,
    tensors: list[SavedTensor],
    model: ModelConfig,
    dtype: torch.dtype | None,
    tell: Tell,
) -> list[str]:
    check_tensors_fit_model(tensors, model, "this step")
    find_model_family(model)
    groups = _group_by_block(tensors)
    files = safetensors_files.write_safetensors(
        folder, source, groups, lambda it: safetensors_files.cast_state(to_huggingface(it, model), dtype), tell
    )
    text = json_module.dumps(
        model_config.encode_hf_config(model, dtype_name(dtype) if dtype else tensors[0].dtype), indent=2
    )
    (folder / "config.json").write_text(text + "\n")
    return [*files, "config.json"]


def _group_by_block(tensors: list[SavedTensor]) -> list[list[SavedTensor]]:
    """Tensors that are converted together: those of one block, as some become one; each other alone."""
    groups: dict[str, list[SavedTensor]] = {}
    for tensor in tensors:
        parts = tensor.name.split(".")
        groups.setdefault(".".join(parts[:2]) if parts[0] == "layers" else tensor.name, []).append(tensor)
    return list(groups.values())


def _model_of_step(options: ExportOptions, where: str) -> ModelConfig:
    file = Path(options.config).expanduser() if options.config else find_target(where).run / "config.yaml"
    if not options.config and not file.is_file():
        raise UserError(f"{file}: is not there, and it says which model this is; give it with --config FILE")
    return load_run_config(file).model


_BASES = {"llama": "llama_tiny", "gpt2": "gpt2_tiny", "vit": "vit_tiny"}


@dataclass(frozen=True)
class ImportOptions:
    """Of the command."""

    format: str
    prefix: str
    dtype: str | None
    ranks: int


@dataclass(frozen=True)
class _Read:
    """What was found in the other library's files."""

    source: TensorSource
    model: ModelConfig | None
    left_out: int
    """Tensors that are not of the model: optimizer state, and names without the prefix."""


def import_command(source: str, run_dir: str, options: ImportOptions, json: bool) -> int:
    """Make checkpoints/step-0 in the run directory, and print how to train on; returns 0."""
    path, run = Path(source).expanduser().absolute(), Path(run_dir).expanduser().absolute()
    if not path.exists():
        raise UserError(f"{source}: no such file or folder")
    directory, model = _destination(run)
    read = _read(path, options)
    tensors = read.source.tensors
    if not tensors:
        raise UserError(f"{source}: there is no tensor in it{f' below {options.prefix!r}' if options.prefix else ''}")
    if model is not None:
        check_tensors_fit_model(tensors, model, source)
    total = sum(it.rectangle.volume * it.itemsize for it in tensors)
    run.mkdir(parents=True, exist_ok=True, mode=0o700)
    extra = mark_weights_only({"imported": {"format": options.format, "from": path.name}})
    with progress_bar("import", total, json) as tell:
        step = write_step(directory, 0, read.source, cut_rows(tensors, options.ranks, 0), StepMetadata(extra), tell)
    overrides = [f"run_dir={run}", *(_overrides(read.model) if read.model is not None else [])]
    if json:
        facts = {"path": str(step), "tensors": len(tensors), "bytes": total, "left_out": read.left_out}
        print_json({**facts, "overrides": overrides})
        return 0
    print(f"{step}: {len(tensors):,} tensors, {format_bytes(total)}; {read.left_out} left out")
    print(f"to train from them, at step 0 with a fresh optimizer: hpc-train train {' '.join(overrides)}")
    return 0


def _destination(run: Path) -> tuple[Path, ModelConfig | None]:
    """(directory of checkpoints, model of the run if it has one). Raises UserError if it has steps."""
    config = load_run_config(run / "config.yaml") if (run / "config.yaml").is_file() else None
    elsewhere = config.checkpoint.dir if config is not None else None
    directory = Path(elsewhere).expanduser().absolute() if elsewhere else run / "checkpoints"
    if steps := find_steps(directory):
        raise UserError(
            f"{directory}: has steps already ({', '.join(map(str, sorted(steps)))}); use a new run directory"
        )
    return directory, config.model if config is not None else None


def _read(path: Path, options: ImportOptions) -> _Read:
    if options.format == "hf":
        return _read_family(path, options)
    if options.format == "dcp":
        known = parse_dcp_metadata(path)
        names = _chosen(list(known), options.prefix)
        dtypes = {ours: _dtype(known[theirs].dtype, options) for ours, theirs in names.items()}
        return _Read(dcp.DcpTensors(path, known, names, dtypes), None, len(known) - len(names))
    state = torch_files.read_torch_file(path) if options.format == "torch" else safetensors_files.read_safetensors(path)
    names = _chosen(list(state), options.prefix)
    return _Read(_held({ours: state[theirs] for ours, theirs in names.items()}, options), None, len(state) - len(names))


def _read_family(path: Path, options: ImportOptions) -> _Read:
    file = path / "config.json"
    try:
        body = read_bounded_json(file)
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read ({type(error).__name__}); give a folder of save_pretrained") from error
    model = model_config.parse_hf_config(body, path.name)
    theirs = safetensors_files.read_safetensors(path)
    layers = getattr(model, "layers", 0)
    if layers > len(theirs):  # a hostile number would take all the memory
        raise UserError(f"{file}: has {layers} layers, and {path} has {len(theirs)} tensors")
    state = from_huggingface(theirs, model)
    source = _held(state, options)
    check_tensors_fit_model(source.tensors, model, str(path))
    return _Read(source, model, 0)


def _chosen(names: list[str], prefix: str) -> dict[str, str]:
    """Our name of each weight -> theirs."""
    return {
        name.removeprefix(prefix): name
        for name in names
        if name.startswith(prefix) and is_weight(name.removeprefix(prefix)) and name != prefix
    }


def _held(state: dict[str, torch.Tensor], options: ImportOptions) -> StateDictTensors:
    return StateDictTensors(state, {name: _dtype(tensor.dtype, options) for name, tensor in state.items()})


def _dtype(own: torch.dtype, options: ImportOptions) -> torch.dtype:
    """What a run keeps its parameters in."""
    if not own.is_floating_point:
        return own
    if options.dtype is not None:
        return torch.float64 if options.dtype == "float64" else torch.float32
    return torch.float32 if own.itemsize < torch.float32.itemsize else own


def _overrides(model: ModelConfig) -> list[str]:
    """What makes a shipped model the imported one."""
    base = _BASES[find_model_family(model)]
    shipped: Any = compose([f"model={base}"]).model
    values = {it.name: getattr(model, it.name) for it in fields(model) if it.name != "source"}
    differ = {name: value for name, value in values.items() if value != getattr(shipped, name)}
    return [f"model={base}", *(f"model.{name}={_value(value)}" for name, value in differ.items())]


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'" if not value.isidentifier() else value
    return "null" if value is None else str(value)
