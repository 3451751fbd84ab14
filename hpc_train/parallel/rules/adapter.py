"""Rules of adapters (LoRA, DoRA)."""

from __future__ import annotations

from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

from hpc_train.config.adapter import AdapterConfig
from hpc_train.config.model import HfModelConfig, ModelConfig
from hpc_train.config.parallel import Degrees
from hpc_train.config.run import RunConfig, is_loose
from hpc_train.errors import UserError
from hpc_train.models.adapters.nf4_sizes import NF4_BLOCK
from hpc_train.models.hf.config_file import read_config_file
from hpc_train.models.shape import CountedTransformer


def check_adapter_rules(config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError for what adapters cannot be combined with, and for their settings without one."""
    adapter, parallel = config.adapter, config.parallel
    if adapter.kind == "none":
        _check_unused_settings(adapter)
        return
    option = f"adapter={adapter.kind}"
    if parallel.server.mode != "none":
        raise UserError(f"{option}: parameter servers hold whole models; use parallel=ddp or parallel=fsdp")
    if parallel.tensor.asynchronous:
        raise UserError(f"{option}: parallel.tensor.asynchronous overlaps products with the weight alone; leave it out")
    if parallel.ep > 1:
        raise UserError(f"{option}: is not combined with experts over ranks; use parallel.ep=1")
    if adapter.dropout > 0 and degrees.tp > 1:
        raise UserError(
            f"adapter.dropout={adapter.dropout:g}: drops inputs of layers, which parallel.tp={degrees.tp} splits; use "
            "adapter.dropout=0 or parallel.tp=1"
        )
    if adapter.base == "bf16" and config.precision.name != "bf16":
        raise UserError(
            f"adapter.base=bf16: products would still be computed in {config.precision.name}; use precision=bf16, or "
            "adapter.base=full"
        )
    if adapter.base == "nf4":
        _check_nf4(config, degrees)


def _check_nf4(config: RunConfig, degrees: Degrees) -> None:
    """Refuse what a base in 4 bits cannot be combined with, and a base that nothing could read again."""
    option, model = "adapter.base=nf4", config.model
    if not isinstance(model, CountedTransformer):  # by which the planner replaces a model that it has checked
        _check_base_files(model)
    if config.parallel.offload.parameters != "none":
        raise UserError(f"{option}: is not combined with parallel.offload.parameters; leave one of them out")
    if config.parallel.compile:
        raise UserError(f"{option}: is not combined with parallel.compile; leave one of them out")
    if is_loose(config):
        raise UserError(f"{option}: is not combined with copies that train apart; use parallel=ddp or parallel=fsdp")
    if config.adapter.kind == "dora" and config.adapter.path is not None:
        raise UserError(f"{option}: adapter.path starts LoRA only, not DoRA; use adapter.base=full")
    if find_spec("bitsandbytes") is None:
        raise UserError(f"{option}: needs the package bitsandbytes: pip install 'hpc_train[qlora]'")
    if degrees.tp > 1 and isinstance(model, HfModelConfig):
        _check_blocks(model, degrees.tp)


def _check_base_files(model: ModelConfig) -> None:
    """Refuse a base in 4 bits of a model that no files have."""
    if not isinstance(model, HfModelConfig):
        raise UserError(explain_missing_base(model))
    if model.weights == "draw" or not any(Path(model.path).expanduser().glob("*.safetensors")):
        raise UserError(
            f"adapter.base=nf4: model.path={model.path} is trained from scratch here; give a folder with weights"
        )


def explain_missing_base(model: ModelConfig) -> str:
    """Return why a model that is not read from files cannot have its frozen weights in 4 bits."""
    return (
        f"adapter.base=nf4: the base is read from files at every start, and model={model.name} has none; use model=hf "
        "model.path=FOLDER (`hpc-train checkpoint export RUN FOLDER --format hf` writes one), or adapter.base=full"
    )


def _check_blocks(model: HfModelConfig, tp: int) -> None:
    """Refuse row-parallel layers whose parts would be no whole blocks of numbers; the layers themselves check again."""
    file = read_config_file(model)
    for key in ("hidden_size", "intermediate_size"):
        size = file.get_number(key)
        if size is not None and size % NF4_BLOCK == 0 and (size // tp) % NF4_BLOCK:
            raise UserError(
                f"adapter.base=nf4: parallel.tp={tp} would split blocks of {NF4_BLOCK} numbers in {key}={size} of "
                f"{file.folder / 'config.json'}; use parallel=fsdp, or adapter.base=full"
            )


def _check_unused_settings(adapter: AdapterConfig) -> None:
    default = AdapterConfig()
    for item in fields(adapter):
        if getattr(adapter, item.name) != getattr(default, item.name):
            raise UserError(f"adapter.{item.name}: has no effect without an adapter; add adapter=lora or leave it out")
