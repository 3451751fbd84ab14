"""Rules of optimizers, of groups of parameters, and of the moving average of the weights."""

from __future__ import annotations

from hpc_train.config.keys.overrides import format_changed_setting
from hpc_train.config.optim import OPTIMIZERS, AdafactorConfig, EmaConfig, MuonConfig, OptimConfig, SgdConfig
from hpc_train.config.parallel import Degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.traffic.moment_blocks import explain_cut_blocks, is_quantized, list_split_rows

_SETTINGS = {"muon": MuonConfig, "sgd": SgdConfig, "adafactor": AdafactorConfig}
"""The part of `optim` that belongs to one optimizer, by its name."""


def check_optimizer_rules(config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError for an optimizer that this layout does not allow, and for settings without effect."""
    _check_effect(config)
    _check_servers(config)
    _check_loose_sync(config)
    _check_offload(config)
    _check_schedule_free(config)
    _check_rounded_state(config)
    _check_blocks(config, degrees)


def _check_effect(config: RunConfig) -> None:
    optim = config.optim
    for name, kind in _SETTINGS.items():
        settings = getattr(optim, name)
        if name != optim.name and settings != kind():
            changed = format_changed_setting(settings)
            raise UserError(f"optim.{name}.{changed}: has no effect with optim.name={optim.name}; set optim={name}")
    if optim.groups and optim.name not in OPTIMIZERS:
        raise UserError(
            f"optim.groups: optim.name={optim.name} makes its own groups; give it its settings with optim.args, or use "
            f"optim={', '.join(OPTIMIZERS)}"
        )
    if optim.sgd.nesterov and optim.sgd.momentum == 0:
        raise UserError("optim.sgd.nesterov=true: needs momentum; set optim.sgd.momentum=0.9")
    if optim.ema.decay is None and optim.ema != EmaConfig():
        raise UserError(f"optim.ema.{format_changed_setting(optim.ema)}: has no effect; set optim.ema.decay=0.999")


def _check_servers(config: RunConfig) -> None:
    mode, optim = config.parallel.server.mode, config.optim
    if mode == "none":
        return
    option = f"parallel.server.mode={mode}"
    if optim.name in ("muon", "schedule_free"):
        raise UserError(
            f"optim.name={optim.name}: not with {option}, where no rank has whole updates; use optim=adamw or ddp"
        )
    if optim.groups:
        raise UserError(f"optim.groups: not with {option}, whose servers know no names; use parallel=ddp")
    if optim.ema.decay is not None:
        raise UserError(f"optim.ema.decay={optim.ema.decay:g}: not with {option}; use parallel=ddp")


def _check_loose_sync(config: RunConfig) -> None:
    every, optim = config.parallel.sync.every, config.optim
    if every is None:
        return
    option = f"parallel.sync.every={every}, whose copies differ between exchanges"
    if optim.name in ("muon", "schedule_free"):
        raise UserError(f"optim.name={optim.name}: not with {option}; use optim=adamw, or leave parallel.sync out")
    if optim.ema.decay is not None:
        raise UserError(f"optim.ema.decay={optim.ema.decay:g}: not with {option}; leave one of them out")


def _check_offload(config: RunConfig) -> None:
    offload, optim = config.parallel.offload, config.optim
    for name in ("optimizer", "parameters"):
        option = f"parallel.offload.{name}={getattr(offload, name)}"
        if getattr(offload, name) == "none":
            continue
        if optim.name in ("muon", "adafactor", "schedule_free"):
            raise UserError(
                f"optim.name={optim.name}: not with {option}, which updates a part of the parameters at a time; use "
                "optim=adamw, or leave the offload out"
            )
        if optim.ema.decay is not None:
            raise UserError(f"optim.ema.decay={optim.ema.decay:g}: not with {option}; leave one of them out")


def _check_schedule_free(config: RunConfig) -> None:
    optim = config.optim
    if optim.name != "schedule_free":
        return
    if optim.schedule.name in ("cosine", "linear", "wsd"):
        raise UserError(
            f"optim.name=schedule_free: averages in place of a decay, which optim.schedule.name={optim.schedule.name} "
            "would add; set optim.schedule.name=constant (optim=schedule_free does)"
        )
    if optim.ema.decay is not None:
        raise UserError(
            f"optim.ema.decay={optim.ema.decay:g}: optim.name=schedule_free evaluates with an average of its own; "
            "leave one of them out"
        )
    if config.checkpoint.weights_every:
        raise UserError(
            f"checkpoint.weights_every={config.checkpoint.weights_every}: saves weights without the state of "
            "optim.name=schedule_free, from which their average follows; use checkpoint.keep_every"
        )
    if optim.betas[0] == 0:
        raise UserError("optim.betas.0=0: leaves optim.name=schedule_free without an average; use 0.9, or optim=adamw")
    if optim.implementation != "auto":
        raise UserError(
            f"optim.implementation={optim.implementation}: belongs to torch's AdamW, and has no effect with "
            "optim.name=schedule_free; leave it out"
        )


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
    techniques = {
        "parallel.offload.optimizer": parallel.offload.optimizer != "none",
        "parallel.offload.parameters": parallel.offload.parameters != "none",
        "parallel.sync.every": parallel.sync.every is not None,
        "parallel.server.mode": parallel.server.mode != "none",
    }
    for technique, is_on in techniques.items():
        if is_on:
            raise UserError(f"{option}: not with {technique}; use optim.state=full, or leave {technique} out")
    if optim.state == "8bit" and config.precision.name == "fp64":
        raise UserError(
            f"{option}: torchao computes the update in 32 bits, which would round the parameters of precision=fp64; "
            "use precision=fp32 or optim.state=full"
        )


def _check_blocks(config: RunConfig, degrees: Degrees) -> None:
    """Refuse a tp that cuts the blocks of 8-bit moments: it splits the rows of some matrices."""
    optim = config.optim
    if optim.state != "8bit":
        if optim.block_size != OptimConfig().block_size:
            raise UserError(f"optim.block_size={optim.block_size}: has no effect; set optim.state=8bit")
        return
    for name, shape in list_split_rows(config.model).items():
        part = shape[-1] // degrees.tp
        if is_quantized(shape, optim.block_size) and part % optim.block_size:
            raise UserError(explain_cut_blocks(name, part, optim.block_size))
