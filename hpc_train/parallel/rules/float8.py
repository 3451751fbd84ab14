"""Rules of products in 8 bits (precision.float8)."""

from __future__ import annotations

from hpc_train.config.model import TransformerConfig
from hpc_train.config.parallel import Degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError


def check_float8_rules(config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError for what products in 8 bits cannot be combined with."""
    precision, parallel = config.precision, config.parallel
    if precision.float8_gather:
        _check_gather(config, degrees)
    if precision.float8_experts:
        _check_experts(config)
    if precision.float8 == "none":
        return
    option = f"precision.float8={precision.float8}"
    if precision.name == "fp16":
        raise UserError(
            f"{option}: is not combined with the loss scale of fp16; use precision=fp8, which is bf16 elsewhere"
        )
    if degrees.tp > 1 and parallel.tensor.asynchronous:
        raise UserError(
            f"{option}: asynchronous tensor parallelism has products of its own, in the format of precision.name; use "
            "parallel.tensor.asynchronous=false, or precision=bf16"
        )
    if config.adapter.kind != "none":
        raise UserError(f"{option}: adapter={config.adapter.kind} changes the same layers; use precision=bf16")
    if parallel.server.mode != "none":
        raise UserError(f"{option}: is not combined with parameter servers; use parallel=ddp or parallel=fsdp")


def _check_experts(config: RunConfig) -> None:
    """Raise UserError where experts cannot compute in 8 bits."""
    option, recipe = "precision.float8_experts=true", config.precision.float8
    if not recipe.startswith("mxfp8"):
        raise UserError(
            f"{option}: precision.float8={recipe} has no products of experts, whose numbers of tokens are known only "
            "as they run; use precision=mxfp8"
        )
    if not isinstance(config.model, TransformerConfig) or not config.model.experts.count:
        raise UserError(f"{option}: model={config.model.name} has no experts of our own; leave it out")


_GATHER = "precision.float8_gather=true"


def _describe_scales(recipe: str) -> str:
    if recipe == "none":
        return "computes nothing in 8 bits"
    return "has one for each block of a row" if recipe.startswith("mxfp8") else "has one for each row"


def _check_gather(config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError where no weight can be gathered in 8 bits."""
    parallel, recipe = config.parallel, config.precision.float8
    if recipe != "tensorwise":
        raise UserError(
            f"{_GATHER}: needs one scale for a whole weight, and precision.float8={recipe} "
            f"{_describe_scales(recipe)}; use precision.float8=tensorwise"
        )
    if parallel.strategy == "ddp":
        raise UserError(f"{_GATHER}: ddp gathers nothing; use parallel=zero1, zero2 or fsdp")
    if degrees.tp > 1:
        raise UserError(f"{_GATHER}: is not combined with parallel.tp={degrees.tp}; leave one of them out")
    if degrees.dp_shard * degrees.cp == 1:
        raise UserError(f"{_GATHER}: has no effect with dp_shard 1; leave it out, or use more ranks")
    if parallel.offload.parameters != "none":
        raise UserError(
            f"{_GATHER}: is not combined with parallel.offload.parameters={parallel.offload.parameters}, whose shards "
            "are gathered from the host; leave one of them out, or use parallel.offload.optimizer"
        )
