"""Check a config against the rules of every technique, in the order in which a user would read them."""

from __future__ import annotations

from hpc_train.config.parallel import Degrees, resolve_degrees
from hpc_train.config.run import RunConfig, describe_one_copy, is_loose
from hpc_train.parallel.rules import (
    adapter,
    attention,
    data_parallel,
    experts,
    float8,
    loose_sync,
    memory,
    optimizer,
    parameter_server,
    pipeline,
    tensor,
    transformers_models,
)

RULES = (
    parameter_server.check_server_rules,
    loose_sync.check_loose_rules,
    data_parallel.check_data_parallel_rules,
    transformers_models.check_transformers_rules,
    tensor.check_tensor_rules,
    pipeline.check_pipeline_rules,
    attention.check_context_rules,
    attention.check_attention_rules,
    data_parallel.check_gradient_rules,
    memory.check_memory_rules,
    memory.check_graph_rules,
    memory.check_offload_rules,
    memory.check_loss_rules,
    experts.check_expert_rules,
    adapter.check_adapter_rules,
    float8.check_float8_rules,
    optimizer.check_optimizer_rules,
)


def check_support(config: RunConfig, world: int) -> Degrees:
    """Return the degrees of this run on `world` ranks. Raises UserError, naming what would work, if it cannot run.

    An option that would have no effect, such as parallel.tensor.asynchronous without tp, is refused too.
    """
    degrees = resolve_degrees(config.parallel, world)
    for rule in RULES:
        rule(config, degrees)
    if is_loose(config):
        check_support(describe_one_copy(config, degrees)[0], world // degrees.dp_replicate)
    return degrees
