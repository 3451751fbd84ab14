"""Rules of transformers models: what is exact for a family, decided from config.json before any rank starts."""

from __future__ import annotations

from hpc_train.config.model import HfModelConfig
from hpc_train.config.parallel import Degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.models.hf.config_file import ConfigFile, find_task, read_config_file

_NOT_IN_FLOAT64 = ("xglm", "switch_transformers", "nllb-moe")
"""Families whose own code makes constants that only hold float32, or casts a parameter to it for good."""
_INSTEAD = "use parallel=fsdp, hsdp, zero1, zero2 or ddp, which take every model"


def check_transformers_rules(config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError for what this family of transformers, or this model of it, cannot do."""
    model = config.model
    if not isinstance(model, HfModelConfig):
        return
    file = read_config_file(model)
    if config.precision.name == "fp64" and file.model_type in _NOT_IN_FLOAT64:
        raise UserError(
            f"precision=fp64: the code of {file.family.name} in transformers cannot compute in float64; use "
            "precision=fp32 or bf16"
        )
    _check_family(file, degrees)
    if find_task(model, file) != file.family.task and degrees.tp * degrees.pp * degrees.cp > 1:
        raise UserError(f"model.task={model.task}: only {file.family.task} of {file.family.name} is split; {_INSTEAD}")
    if degrees.tp > 1:
        _check_heads(file, degrees.tp)
    if degrees.tp > 1 or degrees.cp > 1:
        _check_dropout(file, degrees)
    if degrees.cp > 1:
        _check_window(file, config, degrees)
    _check_length(model, file, config)


def _check_family(file: ConfigFile, degrees: Degrees) -> None:
    family = file.family
    for axis, reason in (("tp", family.tensor), ("pp", family.pipeline), ("cp", family.context)):
        if getattr(degrees, axis) > 1 and reason is not None:
            raise UserError(
                f"parallel.{axis}={getattr(degrees, axis)}: not for {family.name} of transformers, because {reason}; "
                f"{_INSTEAD}"
            )


def _check_heads(file: ConfigFile, tp: int) -> None:
    for key in file.family.unsplit_with:
        if file.body.get(key):
            raise UserError(
                f"parallel.tp={tp}: not for {file.family.name} of transformers with {key}={file.body[key]} in its "
                f"config.json; {_INSTEAD}"
            )
    if (groups := file.family.groups_of_heads) and groups % tp:
        raise UserError(
            f"parallel.tp={tp}: not for {file.family.name} of transformers, which has its heads in {groups} groups; "
            f"use a divisor of {groups}, or {_INSTEAD}"
        )
    part = "vision_config" if file.family.task == "image_classification" else "text_config"
    heads = file.get_number("num_attention_heads", "n_head", "n_heads", "num_heads", part=part)
    key_heads = (file.key_heads if part == "text_config" else None) or heads
    if key_heads == 1 and file.family.one_key_projections:
        key_heads = heads  # each rank has the one key
    sides = [f"{side}_{key}" for side in ("encoder", "decoder") for key in ("attention_heads", "ffn_dim")]
    for key, count in (
        ("num_attention_heads", heads),
        ("num_key_value_heads", key_heads),
        ("intermediate_size", file.get_number("intermediate_size", "ffn_dim", "d_ff", "n_inner", part=part)),
        ("num_experts", file.get_number("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")),
        *((key, file.get_number(key)) for key in sides),
    ):
        if count is not None and count % tp:
            raise UserError(f"parallel.tp={tp}: does not divide {key}={count} of {file.folder / 'config.json'}")


def _check_dropout(file: ConfigFile, degrees: Degrees) -> None:
    if (dropout := file.find_dropout()) is not None:
        axis = "tp" if degrees.tp > 1 else "cp"
        raise UserError(
            f"parallel.{axis}={getattr(degrees, axis)}: {file.folder / 'config.json'} has {dropout}, and transformers "
            f"would drop the same places on ranks that have other tokens; set it to 0, or {_INSTEAD}"
        )


def _check_window(file: ConfigFile, config: RunConfig, degrees: Degrees) -> None:
    """Refuse windows of attention that a sequence does not fit into."""
    window = file.window
    unused = file.body.get("use_sliding_window") is False
    if window is not None and not unused and config.train.sequence_length > window:
        raise UserError(
            f"parallel.cp={degrees.cp}: {file.folder / 'config.json'} has sliding_window={window}, and no ring "
            f"computes windows; use train.sequence_length={window} at most, or {_INSTEAD}"
        )


def _check_length(model: HfModelConfig, file: ConfigFile, config: RunConfig) -> None:
    longest = file.max_positions
    reads_text = find_task(model, file) != "image_classification"
    if longest is not None and reads_text and config.train.sequence_length > longest:
        raise UserError(
            f"train.sequence_length={config.train.sequence_length}: longer than the {longest} positions of "
            f"{file.folder / 'config.json'}"
        )
