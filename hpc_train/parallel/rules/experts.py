"""Rules of mixtures of experts and of expert parallelism."""

from __future__ import annotations

from hpc_train.config.model import CustomModelConfig, TransformerConfig
from hpc_train.config.parallel import Degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.models.shape import check_transformer, compute_expert_width
from hpc_train.traffic.stages import splits_backward


def check_expert_rules(config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError for what models with experts, and expert parallelism, cannot do."""
    model, ep = config.model, config.parallel.ep
    has_experts = isinstance(model, TransformerConfig) and model.experts.count > 0
    if isinstance(model, TransformerConfig):
        check_transformer(model)
    if ep > 1:
        _check_degree(config, degrees)
        if not has_experts and not isinstance(model, CustomModelConfig):
            raise UserError(f"parallel.ep={ep}: model={model.name} has no experts; leave it out")
    if isinstance(model, TransformerConfig) and has_experts:
        _check_experts(model, config, degrees)


def _check_degree(config: RunConfig, degrees: Degrees) -> None:
    parallel, ep = config.parallel, config.parallel.ep
    if parallel.strategy == "ddp":
        raise UserError(f"parallel.ep={ep}: ddp keeps all experts on each rank; use parallel.strategy=zero1, 2 or 3")
    ranks = degrees.dp_shard * degrees.cp
    if ranks % ep:
        legal = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        raise UserError(
            f"parallel.ep={ep}: is a view of dp_shard {degrees.dp_shard} x cp {degrees.cp} = {ranks} ranks, which do "
            f"not divide by it; ep can be {legal}"
        )
    if parallel.offload.parameters != "none":
        raise UserError(
            f"parallel.offload.parameters={parallel.offload.parameters}: not with parallel.ep={ep}; use "
            "parallel.offload.optimizer, or ep=1"
        )
    if parallel.recompute.mode == "selective":
        raise UserError(
            f"parallel.recompute.mode=selective: cannot keep results while experts of parallel.ep={ep} are gathered; "
            "use mode=full"
        )
    if parallel.compile:
        raise UserError(
            f"parallel.compile=true: the exchange of parallel.ep={ep} does not compile; leave one of them out"
        )


def _check_experts(model: TransformerConfig, config: RunConfig, degrees: Degrees) -> None:
    parallel, count = config.parallel, model.experts.count
    if parallel.ep > 1 and count % parallel.ep:
        legal = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        raise UserError(f"parallel.ep={parallel.ep}: does not divide model.experts.count={count}; ep can be {legal}")
    width = compute_expert_width(model)
    if width % degrees.tp:
        raise UserError(
            f"parallel.tp={degrees.tp}: does not divide the width {width} of an expert; use a divisor of it"
        )
    if parallel.server.mode != "none":
        raise UserError(
            f"parallel.server.mode={parallel.server.mode}: the loads of experts are summed over all ranks in every "
            "step, and workers do not wait for each other; use ddp or a zero strategy"
        )
    if parallel.compile:
        raise UserError(
            f"parallel.compile=true: model={model.name} has experts, whose numbers of tokens are known only as they "
            "run, so blocks do not compile; leave it out"
        )
    if degrees.pp > 1:
        _check_pipeline(config, degrees)


def _check_pipeline(config: RunConfig, degrees: Degrees) -> None:
    pipeline, train = config.parallel.pipeline, config.train
    if splits_backward(pipeline):
        raise UserError(
            f"parallel.pipeline.schedule={pipeline.schedule}: splits the backward, which experts do not support; use "
            "1f1b or interleaved_1f1b"
        )
    share = train.global_batch // degrees.data_parallel
    if share % min(train.micro_batch, share):
        raise UserError(
            f"train.micro_batch={train.micro_batch}: a pipeline pads the last of {share} sequences per rank, and "
            f"padding would count in the loads of experts; use a divisor of {share}"
        )
