"""Rules of adapters (LoRA, DoRA)."""

from __future__ import annotations

from dataclasses import fields

from hpc_train.config.adapter import AdapterConfig
from hpc_train.config.parallel import Degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError


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


def _check_unused_settings(adapter: AdapterConfig) -> None:
    default = AdapterConfig()
    for item in fields(adapter):
        if getattr(adapter, item.name) != getattr(default, item.name):
            raise UserError(f"adapter.{item.name}: has no effect without an adapter; add adapter=lora or leave it out")
