"""Rules of optimizers, of groups of parameters, and of the moving average of the weights."""

from __future__ import annotations

from hpc_train.config.keys.overrides import format_changed_setting
from hpc_train.config.optim import AdafactorConfig, EmaConfig, MuonConfig, SgdConfig
from hpc_train.config.parallel import Degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.traffic.sharding import uses_fully_shard

_SETTINGS = {"muon": MuonConfig, "sgd": SgdConfig, "adafactor": AdafactorConfig}
"""The part of `optim` that belongs to one optimizer, by its name."""


def check_optimizer_rules(config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError for an optimizer that this layout does not allow, and for settings without effect."""
    _check_effect(config)
    _check_servers(config)
    _check_loose_sync(config)
    _check_offload(config)
    _check_rounded_state(config)
    if uses_fully_shard(config, degrees):
        _check_shards(config)


def _check_effect(config: RunConfig) -> None:
    optim = config.optim
    for name, kind in _SETTINGS.items():
        settings = getattr(optim, name)
        if name != optim.name and settings != kind():
            changed = format_changed_setting(settings)
            raise UserError(f"optim.{name}.{changed}: without effect at optim.name={optim.name}; set optim={name}")
    if optim.groups and optim.name not in ("adamw", *_SETTINGS):
        raise UserError(
            f"optim.groups: optim.name={optim.name} makes its own groups; give it its settings with optim.args, or use "
            f"optim={', '.join(('adamw', *_SETTINGS))}"
        )
    if optim.sgd.nesterov and optim.sgd.momentum == 0:
        raise UserError("optim.sgd.nesterov=true: needs momentum; set optim.sgd.momentum=0.9")
    if optim.ema.decay is None and optim.ema != EmaConfig():
        raise UserError(f"optim.ema.{format_changed_setting(optim.ema)}: without effect; set optim.ema.decay=0.999")


def _check_servers(config: RunConfig) -> None:
    mode, optim = config.parallel.server.mode, config.optim
    if mode == "none":
        return
    where = f"parallel.server.mode={mode}"
    if optim.name == "muon":
        raise UserError(f"optim.name=muon: not with {where}, where no rank has whole updates; use optim=adamw or ddp")
    if optim.groups:
        raise UserError(f"optim.groups: not with {where}, whose servers know no names; use parallel=ddp")
    if optim.ema.decay is not None:
        raise UserError(f"optim.ema.decay={optim.ema.decay:g}: not with {where}; use parallel=ddp")


def _check_loose_sync(config: RunConfig) -> None:
    every, optim = config.parallel.sync.every, config.optim
    if every is None:
        return
    where = f"parallel.sync.every={every}, whose copies differ between exchanges"
    if optim.name == "muon":
        raise UserError(f"optim.name=muon: not with {where}; use optim=adamw, or leave parallel.sync out")
    if optim.ema.decay is not None:
        raise UserError(f"optim.ema.decay={optim.ema.decay:g}: not with {where}; leave one of them out")


def _check_offload(config: RunConfig) -> None:
    offload, optim = config.parallel.offload, config.optim
    for name in ("optimizer", "parameters"):
        where = f"parallel.offload.{name}={getattr(offload, name)}"
        if getattr(offload, name) == "none":
            continue
        if optim.name in ("muon", "adafactor"):
            raise UserError(
                f"optim.name={optim.name}: not with {where}, which updates a part of the parameters at a time; use "
                "optim=adamw, or leave the offload out"
            )
        if optim.ema.decay is not None:
            raise UserError(f"optim.ema.decay={optim.ema.decay:g}: not with {where}; leave one of them out")


def _check_rounded_state(config: RunConfig) -> None:
    optim, parallel = config.optim, config.parallel
    if optim.state == "full":
        return
    option = f"optim.state={optim.state}"
    if optim.name != "adamw":
        raise UserError(
            f"{option}: works for the moments of AdamW only, not with optim.name={optim.name}; set optim=adamw or "
            "optim.state=full"
        )
    if optim.implementation != "auto":
        raise UserError(
            f"optim.implementation={optim.implementation}: is of torch's AdamW, which rounds no moments; leave it out, "
            "or use optim.state=full"
        )
    others = {
        "parallel.offload.optimizer": parallel.offload.optimizer != "none",
        "parallel.offload.parameters": parallel.offload.parameters != "none",
        "parallel.sync.every": parallel.sync.every is not None,
        "parallel.server.mode": parallel.server.mode != "none",
    }
    for other, is_on in others.items():
        if is_on:
            raise UserError(f"{option}: not with {other}; use optim.state=full, or leave {other} out")


def _check_shards(config: RunConfig) -> None:
    optim = config.optim
    if optim.name == "sgd" and optim.implementation == "fused":
        raise UserError("optim.implementation=fused: torch has no fused SGD over shards; use auto, foreach or for_loop")
