"""Compute the traffic of a run's mesh axes in one step, from the configuration alone."""

from __future__ import annotations

from dataclasses import asdict

from hpc_train.config.model import TransformerConfig
from hpc_train.config.parallel import AXES, Degrees, resolve_degrees
from hpc_train.config.run import RunConfig, describe_one_copy, is_loose
from hpc_train.errors import UserError
from hpc_train.models.shape import count_expert_layers
from hpc_train.traffic import axes, model_flows
from hpc_train.traffic.axes import Flow
from hpc_train.traffic.data_flows import list_custom_data_flows, list_data_flows
from hpc_train.traffic.outer_exchange import list_outer_flows
from hpc_train.traffic.shaped_run import describe_run, list_axes_in_use
from hpc_train.traffic.sharding import uses_fully_shard
from hpc_train.traffic.stages import compute_step_work


def list_axis_sizes(config: RunConfig, world: int) -> dict[str, int]:
    """Return the degree of each mesh axis, and with expert parallelism of ep, which is a part of dp_shard x cp."""
    sizes = asdict(resolve_degrees(config.parallel, world))
    return {**sizes, "ep": config.parallel.ep} if config.parallel.ep > 1 else sizes


def compute_flows(config: RunConfig, world: int, parameters: int | None = None) -> tuple[Flow, ...]:
    """Return the flows of every axis in one training step on `world` ranks; an axis of one rank has none.

    On a pipeline, each technique counts the stage with most traffic. Not counted: evaluations, the gradient noise
    scale, and the warm-up steps of gradient compression.
    parameters: number of parameters of a model=custom, which is counted as a single block.
    Raises UserError for a custom model without that number, or with degrees other than data-parallel ones.
    """
    degrees = resolve_degrees(config.parallel, world)
    if is_loose(config):
        copy, copy_degrees = describe_one_copy(config, degrees)
        return (
            *_compute_synchronous_flows(copy, copy_degrees, parameters),
            *_list_loose_flows(config, degrees, parameters),
        )
    return _compute_synchronous_flows(config, degrees, parameters)


def _compute_synchronous_flows(config: RunConfig, degrees: Degrees, parameters: int | None) -> tuple[Flow, ...]:
    """Return the flows of a run whose ranks all take each step together."""
    run = describe_run(config, degrees)
    if run is None:
        _refuse_unknown_traffic(config, degrees, parameters)
        assert parameters is not None
        return (*list_custom_data_flows(config, degrees, parameters), *_list_scalar_flows(config, degrees))
    return (
        *list_data_flows(run),
        *model_flows.list_tensor_flows(run),
        *model_flows.list_context_flows(run),
        *model_flows.list_expert_flows(run),
        *model_flows.list_pipeline_flows(run),
        *_list_scalar_flows(config, degrees),
        *_list_load_flows(config, degrees),
    )


def _refuse_unknown_traffic(config: RunConfig, degrees: Degrees, parameters: int | None) -> None:
    """Raise UserError if the traffic of a custom model depends on what is not known of it."""
    for axis in ("pp", "cp", "tp"):
        if getattr(degrees, axis) > 1:
            raise UserError(
                f"parallel.{axis}={getattr(degrees, axis)}: the traffic of model={config.model.name} over {axis} is "
                "unknown, because its shape is; use dp_replicate and dp_shard, or launch.placement=launcher"
            )
    if parameters is None:
        raise UserError(
            f"model.name={config.model.name}: the traffic of a custom model's gradients is unknown, because its number "
            "of parameters is; a run counts them itself"
        )


def _list_loose_flows(config: RunConfig, degrees: Degrees, parameters: int | None) -> list[Flow]:
    """Return what the copies of a loosely synchronised run exchange."""
    run = describe_run(config, degrees)
    if run is None:
        assert parameters is not None
        elements = float(parameters)
    else:
        elements = run.count_held_elements()
    elements /= degrees.dp_shard * degrees.cp if uses_fully_shard(config, degrees) else 1
    stored = compute_step_work(config, degrees).stored
    outer = list_outer_flows(config.parallel.sync, elements, stored, degrees.dp_replicate)
    return [*outer, *axes.list_scalar_flows(list_axes_in_use(degrees, ("dp_replicate",)), norm=True)]


def _list_scalar_flows(config: RunConfig, degrees: Degrees) -> list[Flow]:
    """Return the small sums of every step; asynchronous workers have none."""
    if config.parallel.server.mode == "asynchronous":
        return []
    return axes.list_scalar_flows(list_axes_in_use(degrees, AXES), uses_fully_shard(config, degrees))


def _list_load_flows(config: RunConfig, degrees: Degrees) -> list[Flow]:
    """Return the sum of the loads of experts: see parallel.expert.balance."""
    model, ranks = config.model, list_axes_in_use(degrees, AXES)
    if not isinstance(model, TransformerConfig) or not model.experts.count or not ranks:
        return []
    # A row of float64 for each layer: the load of each expert, the dropped tokens and the auxiliary loss.
    size = 8 * count_expert_layers(model) * (model.experts.count + 2)
    return [Flow(ranks, "all_reduce", size, 1, "loads of experts")]
