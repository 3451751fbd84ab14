"""Rules of attention: sequences split over ranks (context parallelism), kernels, windows and soft-caps."""

from __future__ import annotations

from hpc_train.config.model import TransformerConfig, VisionTransformerConfig
from hpc_train.config.parallel import ContextConfig, Degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError


def check_context_rules(config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError for what context parallelism cannot do."""
    context, model = config.parallel.context, config.model
    if degrees.cp == 1:
        _check_unused(context)
        return
    if context.method == "ulysses" and not context.balanced:
        raise UserError(
            "parallel.context.balanced=false: has no effect with method=ulysses, whose ranks all have whole sequences; "
            "leave it out"
        )
    if isinstance(model, VisionTransformerConfig):
        raise UserError(
            f"parallel.cp={degrees.cp}: model={model.name} has a class token, so its sequence does not divide into "
            "equal parts; spread over dp_replicate and dp_shard"
        )
    if isinstance(model, TransformerConfig):
        _check_model(model, config, degrees)
    _check_length(config, degrees)


def _check_unused(context: ContextConfig) -> None:
    default = ContextConfig()
    for name in ("method", "balanced"):
        value = getattr(context, name)
        if value != getattr(default, name):
            written = str(value).lower()
            raise UserError(f"parallel.context.{name}={written}: has no effect with parallel.cp=1; leave it out")


def _check_model(model: TransformerConfig, config: RunConfig, degrees: Degrees) -> None:
    heads = model.heads // degrees.tp
    if config.parallel.context.method == "ulysses" and heads % degrees.cp:
        per_tp = f" / parallel.tp={degrees.tp}" if degrees.tp > 1 else ""
        raise UserError(
            f"parallel.context.method=ulysses: model.heads={model.heads}{per_tp} do not divide over "
            f"parallel.cp={degrees.cp} ranks; use parallel.context.method=ring"
        )


def _check_length(config: RunConfig, degrees: Degrees) -> None:
    """Check that every rank of cp gets as many tokens; rules/tensor.py checks how tp splits them again."""
    length, context, cp = config.train.sequence_length, config.parallel.context, degrees.cp
    balanced = context.method == "ring" and context.balanced
    parts = 2 * cp if balanced else cp
    if length % parts == 0:
        return
    lower = length // parts * parts
    legal = f"{lower} or {lower + parts}" if lower else str(parts)
    divisor = f"{parts} chunks, two per rank of parallel.cp={cp}" if balanced else f"parallel.cp={cp} ranks"
    other = ", or parallel.context.balanced=false" if balanced and length % cp == 0 else ""
    raise UserError(f"train.sequence_length={length}: does not divide into {divisor}; use {legal}{other}")


def check_attention_rules(config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError for a kernel that cannot compute this attention, or that another technique takes the place of."""
    model = config.model
    if not isinstance(model, TransformerConfig):
        return
    if model.attention == "auto":
        return
    option, kernel = f"model.attention={model.attention}", model.attention
    if kernel not in ("flex", "math") and model.attention_softcap is not None:
        raise UserError(
            f"{option}: has no soft-caps, and model.attention_softcap={model.attention_softcap:g}; use flex, math or "
            "auto"
        )
    if kernel != "math" and model.dropout > 0:
        raise UserError(
            f"{option}: has no dropout of attention weights, which model.dropout={model.dropout:g} needs; use auto, or "
            "model.dropout=0"
        )
    if degrees.cp > 1 and config.parallel.context.method == "ring":
        raise UserError(
            f"{option}: has no effect with parallel.cp={degrees.cp}, where the ring computes attention in blocks of "
            "its own; use auto, or parallel.context.method=ulysses"
        )
    if config.precision.name in ("fp64", "fp32") and kernel in ("cudnn", "flash") and config.cluster.gpu.name:
        raise UserError(
            f"{option}: computes in 16 bits on GPUs, and precision={config.precision.name}; use precision=bf16, or auto"
        )
    if config.precision.name == "fp64" and kernel == "flex":
        raise UserError(f"{option}: does not compute in float64; use another precision, or auto")


def explain_missing_kernel(kernel: str, is_cpu: bool) -> str | None:
    """Say why this kind of device has no such kernel of attention; None if it may have it."""
    if is_cpu and kernel == "flex":
        return "torch has no backward of FlexAttention on CPUs; use auto, flash or math"
    if is_cpu and kernel in ("cudnn", "efficient"):
        return "is a kernel of GPUs, and this is a CPU; use auto, flash or math"
    return None
