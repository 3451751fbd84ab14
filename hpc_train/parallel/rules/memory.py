"""Rules of techniques that save memory or launches: recomputation, CUDA graphs, offload, and the chunked loss."""

from __future__ import annotations

from hpc_train.config.model import TransformerConfig
from hpc_train.config.parallel import Degrees, RecomputeConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.traffic.stages import splits_backward

_NEEDS_NO_LOGITS = ("perplexity",)


def check_memory_rules(config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError for recomputation that cannot be done or has no effect."""
    _check_recompute(config.parallel.recompute)
    _check_schedule(config, degrees)


def _check_recompute(recompute: RecomputeConfig) -> None:
    mode, default = recompute.mode, RecomputeConfig()
    if mode == "none" and recompute.every != default.every:
        raise UserError(
            f"parallel.recompute.every={recompute.every}: has no effect with mode=none; use mode=full or mode=selective"
        )
    if mode != "selective" and recompute.keep != default.keep:
        raise UserError(f"parallel.recompute.keep: has no effect with mode={mode}; use mode=selective")
    if mode == "selective" and not recompute.keep:
        raise UserError("parallel.recompute.keep=[]: selective without anything to keep; use mode=full")
    if mode == "selective" and recompute.offload:
        raise UserError(
            "parallel.recompute.offload=true: what mode=selective keeps cannot be moved; use mode=full or mode=none"
        )


def _check_schedule(config: RunConfig, degrees: Degrees) -> None:
    """Refuse, in a split backward, what recomputes by operator or moves arguments: see memory.recompute_once."""
    pipeline, recompute = config.parallel.pipeline, config.parallel.recompute
    if degrees.pp == 1 or not splits_backward(pipeline):
        return
    schedule = f"parallel.pipeline.schedule={pipeline.schedule} splits backward"
    if recompute.mode == "selective":
        raise UserError(
            f"parallel.recompute.mode=selective: {schedule}, and torch hands out what an operator left only once; use "
            "mode=full, or 1f1b or interleaved_1f1b"
        )
    if recompute.mode == "full" and recompute.offload:
        raise UserError(
            f"parallel.recompute.offload=true: {schedule}, and keeps what it recomputes for the gradients of weights; "
            "leave it out, or use 1f1b or interleaved_1f1b"
        )


_GRAPHS = "parallel.cuda_graphs=true"


def check_graph_rules(config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError where kernels cannot be recorded: a replay finds all memory where it was."""
    parallel, train = config.parallel, config.train
    if not parallel.cuda_graphs:
        return
    if not parallel.compile:
        raise UserError(f"{_GRAPHS}: records compiled blocks; set parallel.compile=true, or leave it out")
    if parallel.strategy != "ddp":
        raise UserError(
            f"{_GRAPHS}: parallel.strategy={parallel.strategy} gathers parameters into other memory each time; use ddp"
        )
    for axis in ("pp", "cp", "tp"):
        if getattr(degrees, axis) > 1:
            raise UserError(
                f"{_GRAPHS}: parallel.{axis}={getattr(degrees, axis)} exchanges within blocks, or has several forwards "
                f"before a backward; spread over dp_replicate, or leave it out"
            )
    if parallel.recompute.offload:
        raise UserError(f"{_GRAPHS}: parallel.recompute.offload=true moves what a replay needs; leave one of them out")
    share = -(-train.global_batch // degrees.data_parallel)
    if share > train.micro_batch:
        raise UserError(
            f"{_GRAPHS}: the {-(-share // train.micro_batch)} micro-batches of a step would write their gradients into "
            f"the same memory; use train.micro_batch={share}"
        )


def check_offload_rules(config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError for what cannot be offloaded."""
    offload, strategy = config.parallel.offload, config.parallel.strategy
    offloads = {
        name: getattr(offload, name) for name in ("optimizer", "parameters") if getattr(offload, name) != "none"
    }
    for name, storage in offloads.items():
        if strategy == "ddp":
            raise UserError(
                f"parallel.offload.{name}={storage}: only what the zero strategies shard can live elsewhere, ddp keeps "
                "all on each rank; use parallel=zero1, zero2 or fsdp"
            )
    if offload.dir is not None and "file" not in offloads.values():
        raise UserError(
            f"parallel.offload.dir={offload.dir}: has no effect, nothing is offloaded to a file; set "
            "parallel.offload.optimizer=file or parallel.offload.parameters=file"
        )


def check_loss_rules(config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError for what a loss in chunks cannot be combined with."""
    train = config.train
    if not train.loss_chunk:
        return
    option = f"train.loss_chunk={train.loss_chunk}"
    if not isinstance(config.model, TransformerConfig):
        raise UserError(
            f"{option}: model={config.model.name} is not one of our transformers, whose output layer and loss are "
            "known; use train.loss_chunk=0"
        )
    if train.loss is not None:
        raise UserError(f"{option}: train.loss={train.loss} takes all logits; use train.loss_chunk=0")
    needing = [name for name in train.metrics if name not in _NEEDS_NO_LOGITS]
    if needing:
        raise UserError(f"{option}: the metric {needing[0]} takes all logits; leave it out, or use train.loss_chunk=0")
    if config.parallel.unused_parameters:
        raise UserError(
            f"{option}: uses the output layer after the model's forward, where parallel.unused_parameters=true does "
            "not see it; leave one of them out"
        )
