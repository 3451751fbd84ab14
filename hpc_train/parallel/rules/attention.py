"""Rules of the attention of our own transformer: kernels, windows and soft-caps."""

from __future__ import annotations

from hpc_train.config.model import TransformerConfig
from hpc_train.config.parallel import Degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError


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
            f"{option}: takes no masks of weights, which model.dropout={model.dropout:g} needs; use auto, or "
            "model.dropout=0"
        )
    if degrees.cp > 1 and config.parallel.context.method == "ring":
        raise UserError(
            f"{option}: without effect at parallel.cp={degrees.cp}, where the ring computes attention in blocks of its "
            "own; use auto, or parallel.context.method=ulysses"
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
