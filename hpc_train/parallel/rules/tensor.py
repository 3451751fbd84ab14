"""Rules of tensor parallelism, with and without overlapped communication."""

from __future__ import annotations

import math

from hpc_train.config.model import TransformerConfig, VisionTransformerConfig
from hpc_train.config.parallel import Degrees, TensorConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.traffic.stages import splits_backward


def check_tensor_rules(config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError for what tensor parallelism cannot do."""
    options = config.parallel.tensor
    if degrees.tp == 1:
        _check_unused_tensor_options(options)
        return
    if isinstance(config.model, (TransformerConfig, VisionTransformerConfig)):
        _check_widths(config.model, degrees.tp)
    if isinstance(config.model, VisionTransformerConfig):
        _check_images(options)
    if isinstance(config.model, TransformerConfig):
        _check_vocabulary(config.model, options, degrees.tp)
        _check_positions(config, degrees)
    check_async_tensor_rules(config, degrees)


def _check_unused_tensor_options(options: TensorConfig) -> None:
    default = TensorConfig()
    for name in ("sequence", "vocabulary", "asynchronous", "symmetric"):
        if (value := getattr(options, name)) != getattr(default, name):
            raise UserError(
                f"parallel.tensor.{name}={str(value).lower()}: has no effect with parallel.tp=1; leave it out or set tp"
            )


def _check_images(options: TensorConfig) -> None:
    for name in ("sequence", "vocabulary"):
        if not getattr(options, name):
            raise UserError(
                f"parallel.tensor.{name}=false: has no effect on a vision transformer, which has neither positions nor "
                "a vocabulary to split; leave it out"
            )


def _check_widths(model: TransformerConfig | VisionTransformerConfig, tp: int) -> None:
    """Check what tp must divide; not key and value heads, as a rank computes those that its query heads attend to."""
    for key in ("heads", "feed_forward"):
        width = getattr(model, key)
        if width % tp:
            common = math.gcd(model.heads, model.feed_forward)
            legal = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
            raise UserError(f"parallel.tp={tp}: does not divide model.{key}={width}; tp can be {legal}")


def _check_vocabulary(model: TransformerConfig, options: TensorConfig, tp: int) -> None:
    """Check that each rank has a row: all parts but the last have as many as rounding up gives."""
    if options.vocabulary and -(-model.vocab_size // tp) * (tp - 1) >= model.vocab_size:
        raise UserError(
            f"parallel.tp={tp}: a vocabulary of {model.vocab_size} leaves a rank without a part of it; "
            "use a smaller tp, or parallel.tensor.vocabulary=false"
        )


def _check_positions(config: RunConfig, degrees: Degrees) -> None:
    """Check that cp and tp together divide the sequence, whose positions tp splits between layers."""
    length, parts = config.train.sequence_length, degrees.cp * degrees.tp
    if config.parallel.tensor.sequence and length % parts:
        ranks = f"tp={degrees.tp}" if degrees.cp == 1 else f"cp={degrees.cp} x tp={degrees.tp}"
        lower = length // parts * parts
        legal = f"{lower} or {lower + parts}" if lower else str(parts)
        raise UserError(
            f"train.sequence_length={length}: its positions do not divide over {ranks}; use {legal}, "
            "or parallel.tensor.sequence=false"
        )


_ASYNCHRONOUS = "parallel.tensor.asynchronous=true"


def _check_symmetric(config: RunConfig, degrees: Degrees) -> None:
    """Check that torch's symmetric memory reaches all ranks of a tp group: it needs one NVLink domain."""
    domain = config.cluster.node.nvlink_domain_gpus
    if domain and degrees.tp > domain:
        raise UserError(
            f"parallel.tensor.symmetric=true: parallel.tp={degrees.tp} ranks do not fit into an NVLink domain of "
            f"{domain} GPUs (cluster={config.cluster.name}); use tp={domain}, or leave it out"
        )
    if config.parallel.compile:
        raise UserError("parallel.tensor.symmetric=true: is not combined with parallel.compile; leave one of them out")


def check_async_tensor_rules(config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError for what asynchronous tensor parallelism cannot be combined with."""
    parallel = config.parallel
    if not parallel.tensor.asynchronous:
        if parallel.tensor.symmetric:
            raise UserError("parallel.tensor.symmetric=true: has no effect without parallel.tensor.asynchronous=true")
        return
    if parallel.tensor.symmetric:
        _check_symmetric(config, degrees)
    if not parallel.tensor.sequence:
        raise UserError(f"{_ASYNCHRONOUS}: overlaps the exchange of positions; use parallel.tensor.sequence=true")
    if isinstance(config.model, VisionTransformerConfig):
        raise UserError(
            f"{_ASYNCHRONOUS}: overlaps the exchange of positions, and those of a vision transformer do not divide; "
            "leave it out"
        )
    if parallel.recompute.mode == "selective" and "mm" in parallel.recompute.keep:
        raise UserError(
            f"{_ASYNCHRONOUS}: computes products in parts, which parallel.recompute.mode=selective cannot keep; "
            "use parallel.recompute.keep=[attention], or mode=full"
        )
    schedule = parallel.pipeline.schedule
    if degrees.pp > 1 and splits_backward(parallel.pipeline):
        raise UserError(
            f"{_ASYNCHRONOUS}: computes the gradients of activations and weights together, and "
            f"parallel.pipeline.schedule={schedule} asks for each by itself; use 1f1b or interleaved_1f1b"
        )
