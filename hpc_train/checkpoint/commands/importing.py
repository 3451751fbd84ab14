"""`hpc-train checkpoint import`: weights of another library as step 0 of a run."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from hpc_train.checkpoint.catalogue import found
from hpc_train.checkpoint.commands.show import print_json, progress, size
from hpc_train.checkpoint.formats import dcp, family_config, pickled, safetensors_files
from hpc_train.checkpoint.formats.bounded_files import read_json
from hpc_train.checkpoint.formats.dcp_metadata import parse_metadata
from hpc_train.checkpoint.formats.fit import check_fit, run_config
from hpc_train.checkpoint.offline.cutting import cut
from hpc_train.checkpoint.offline.rewriting import About, write_step
from hpc_train.checkpoint.offline.source import Held, Tensors
from hpc_train.checkpoint.weights import is_weight, marked
from hpc_train.config.compose import compose
from hpc_train.config.model import ModelConfig
from hpc_train.errors import UserError
from hpc_train.models.huggingface import family, from_huggingface

_BASES = {"llama": "llama_tiny", "gpt2": "gpt2_tiny", "vit": "vit_tiny"}


@dataclass(frozen=True)
class Options:
    """Of the command."""

    format: str
    prefix: str
    dtype: str | None
    ranks: int


@dataclass(frozen=True)
class _Read:
    """What was found in the other library's files."""

    source: Tensors
    model: ModelConfig | None
    left_out: int
    """Tensors that are not of the model: optimizer state, and names without the prefix."""


def import_weights(source: str, run_dir: str, options: Options, json: bool) -> int:
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
        check_fit(tensors, model, source)
    total = sum(it.rectangle.volume * it.itemsize for it in tensors)
    run.mkdir(parents=True, exist_ok=True, mode=0o700)
    extra = marked({"imported": {"format": options.format, "from": path.name}})
    with progress("import", total, json) as tell:
        step = write_step(directory, 0, read.source, cut(tensors, options.ranks, 0), About(extra), tell)
    overrides = [f"run_dir={run}", *(_overrides(read.model) if read.model is not None else [])]
    if json:
        facts = {"path": str(step), "tensors": len(tensors), "bytes": total, "left_out": read.left_out}
        print_json({**facts, "overrides": overrides})
        return 0
    print(f"{step}: {len(tensors):,} tensors, {size(total)}; {read.left_out} left out")
    print(f"to train from them, at step 0 with a fresh optimizer: hpc-train train {' '.join(overrides)}")
    return 0


def _destination(run: Path) -> tuple[Path, ModelConfig | None]:
    """(directory of checkpoints, model of the run if it has one). Raises UserError if it has steps."""
    config = run_config(run / "config.yaml") if (run / "config.yaml").is_file() else None
    elsewhere = config.checkpoint.dir if config is not None else None
    directory = Path(elsewhere).expanduser().absolute() if elsewhere else run / "checkpoints"
    if steps := found(directory):
        raise UserError(
            f"{directory}: has steps already ({', '.join(map(str, sorted(steps)))}); use a new run directory"
        )
    return directory, config.model if config is not None else None


def _read(path: Path, options: Options) -> _Read:
    if options.format == "hf":
        return _read_family(path, options)
    if options.format == "dcp":
        known = parse_metadata(path)
        names = _chosen(list(known), options.prefix)
        dtypes = {ours: _dtype(known[theirs].dtype, options) for ours, theirs in names.items()}
        return _Read(dcp.Stored(path, known, names, dtypes), None, len(known) - len(names))
    state = pickled.read(path) if options.format == "torch" else safetensors_files.read(path)
    names = _chosen(list(state), options.prefix)
    return _Read(_held({ours: state[theirs] for ours, theirs in names.items()}, options), None, len(state) - len(names))


def _read_family(path: Path, options: Options) -> _Read:
    file = path / "config.json"
    try:
        body = read_json(file)
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read ({type(error).__name__}); give a folder of save_pretrained") from error
    model = family_config.from_json(body, path.name)
    theirs = safetensors_files.read(path)
    layers = getattr(model, "layers", 0)
    if layers > len(theirs):  # a hostile number would take all the memory
        raise UserError(f"{file}: has {layers} layers, and {path} has {len(theirs)} tensors")
    state = from_huggingface(theirs, model)
    source = _held(state, options)
    check_fit(source.tensors, model, str(path))
    return _Read(source, model, 0)


def _chosen(names: list[str], prefix: str) -> dict[str, str]:
    """Our name of each weight -> theirs."""
    return {
        name.removeprefix(prefix): name
        for name in names
        if name.startswith(prefix) and is_weight(name.removeprefix(prefix)) and name != prefix
    }


def _held(state: dict[str, torch.Tensor], options: Options) -> Held:
    return Held(state, {name: _dtype(tensor.dtype, options) for name, tensor in state.items()})


def _dtype(own: torch.dtype, options: Options) -> torch.dtype:
    """What a run keeps its parameters in."""
    if not own.is_floating_point:
        return own
    if options.dtype is not None:
        return torch.float64 if options.dtype == "float64" else torch.float32
    return torch.float32 if own.itemsize < torch.float32.itemsize else own


def _overrides(model: ModelConfig) -> list[str]:
    """What makes a shipped model the imported one."""
    base = _BASES[family(model)]
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
