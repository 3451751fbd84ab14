"""Private parts of torch.distributed.pipelining: orders of actions, memory of a stage, backwards of a sharded stage.

A step of torch's pipeline runtime works through this rank's actions. What differs from torch, in order of time:

    gather    fully_shard's own hooks gather parameters, not the runtime (take_over_gathering)
    receive   a buffer exists from the receive to its use, not for the whole step (defer_receive_memory,
              allocate_received, release_received)
    forward   the last stage keeps a loss, not the logits (drop_last_output)
    backward  each fully_shard group is reduced and freed as soon as its gradients are there (compute_gradients,
              compute_input_gradients, compute_weight_gradients)

parallel/pipeline/stage.py calls them at these places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from hpc_train._torch.fully_shard import gather_group, list_gathered_weights, list_groups

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti

PipelineLoss = Callable[[Tensor, Tensor], Tensor]
"""(output of the last stage, target) -> what its backward starts from."""


def make_pipeline_runtime(
    stages: list[PipelineStage], ranks: tuple[int, ...], order: list[list[str]], micro_batches: int, loss: PipelineLoss
) -> PipelineScheduleMulti:
    """Make torch's pipeline runtime for any order of actions.

    order: the actions of each pp rank, as torch writes them ("2F0": forward of stage 2, micro-batch 0); without any
    backward, the runtime is for `eval` alone. ranks: the pp rank of each stage. Private because torch's public
    schedules have only their own orders, and their `eval` fails where two neighbouring stages are on one rank.
    """
    from torch.distributed.pipelining import schedules  # takes most of a second, and few runs need it

    runtime = schedules._PipelineScheduleRuntime(stages, micro_batches, loss_fn=loss, scale_grads=False)  # type: ignore[no-untyped-call]
    actions = {rank: [schedules._Action.from_str(text) for text in row] for rank, row in enumerate(order)}
    if any("B" in text or "W" in text for row in order for text in row):
        runtime._prepare_schedule_with_comms(actions)
        return runtime
    # The same steps without torch's validation, which demands a backward for every forward.
    runtime.stage_index_to_group_rank = dict(enumerate(ranks))
    for stage in stages:
        stage.stage_index_to_group_rank = runtime.stage_index_to_group_rank
    gathered = {rank: schedules._add_unshard_reshard(row) for rank, row in actions.items()}
    sending = schedules._add_send_recv(gathered, ranks.__getitem__, len(ranks))
    if hasattr(schedules, "_add_wait_send"):  # from torch 2.15 on each send has an action that waits for it
        sending = schedules._add_wait_send(sending)
    runtime.pipeline_order_with_comms = sending
    return runtime


def take_over_gathering(schedule: PipelineScheduleMulti, gather_ahead: bool) -> None:
    """Let fully_shard's own hooks decide when the parameters of stages are gathered and freed.

    torch's runtime would gather a whole stage before its first use, and free it if more than two others come first.
    gather_ahead: still gather a stage before its first use, overlapped with computation; it stays gathered.
    """
    from torch.distributed.pipelining.schedules import RESHARD, UNSHARD

    def unshard(action: Any, context: Any) -> None:
        runtime, index = context.schedule_ref, action.stage_index
        runtime.unsharded_stages.add(index)
        (stage,) = (stage for stage in runtime._stages if stage.stage_index == index)
        modules = [module for module in stage.submod.modules() if isinstance(module, FSDPModule)]
        if gather_ahead and modules:
            runtime.unshard_ops[index] += [module.unshard(async_op=True) for module in modules]

    def reshard(action: Any, context: Any) -> None:
        context.schedule_ref.unsharded_stages.discard(action.stage_index)

    runtime: Any = schedule
    runtime.register_custom_function(UNSHARD, unshard)
    runtime.register_custom_function(RESHARD, reshard)


@contextmanager
def defer_receive_memory(stage: PipelineStage) -> Iterator[None]:
    """Inside this context a stage describes what it will receive, but allocates no memory for it.

    Private, as are the next two, because torch's stages keep receive buffers for every micro-batch of a step, although
    only a few are in flight at once.
    """
    device, stage.device = stage.device, torch.device("meta")
    try:
        yield
    finally:
        stage.device = device


def allocate_received(received: Sequence[Any], device: torch.device) -> None:
    """Allocate the receive buffers of one micro-batch. received: torch's descriptions of them."""
    for info in received:
        if info.buffer is not None and info.buffer.is_meta:
            info.buffer = torch.empty_like(info.buffer, device=device)


def release_received(received: Sequence[Any]) -> None:
    """Release the receive buffers; whoever uses the tensors keeps them alive."""
    for info in received:
        if info.buffer is not None:
            info.buffer = torch.empty_like(info.buffer, device="meta", requires_grad=False)


def drop_last_output(stage: PipelineStage, micro_batch: int) -> None:
    """Let the last stage forget the output of a micro-batch, whose loss alone its backward starts from.

    Private because torch's stages keep the logits of every micro-batch until its backward. torch 2.15 keeps them in
    another attribute.
    """
    if hasattr(stage, "fwd_cache"):
        _, inputs = stage.fwd_cache.pop(micro_batch)
        if stage.has_backward:
            stage.fwd_cache[micro_batch] = (), inputs
        return
    newer: Any = stage
    states: dict[int, Any] = newer._forward_chunk_states
    state = states.pop(micro_batch)
    if stage.has_backward:
        states[micro_batch] = replace(state, output_grad_edges=(), live_outputs=[], releasable=(), send_pending=[])


def compute_gradients(outputs: Any, gradients: Any, inputs: Any) -> tuple[Tensor | None, ...]:
    """Accumulate the gradients of a stage's parameters, and return its input gradients, which are not kept.

    Private, as are the next two, because torch's stages decide themselves when fully_shard reduces and frees.
    """
    from torch.distributed.pipelining._backward import stage_backward

    return stage_backward(outputs, gradients, inputs)


PendingWeights = list[dict[str, Any]]
"""Inputs of the weight gradients: nodes of the graph, and the gradients of their results."""


def compute_input_gradients(
    outputs: Any, gradients: Any, inputs: Any, module: FSDPModule
) -> tuple[tuple[Tensor | None, ...], PendingWeights]:
    """Return the input gradients of a stage, and what its weight gradients can be computed from later.

    The weights of the graph are the gathered ones, whose memory may have been freed since.
    """
    from torch.distributed.pipelining._backward import stage_backward_input

    weights = [weight for group in list_groups(module) for weight in list_gathered_weights(group)]
    return stage_backward_input(outputs, gradients, inputs, iter(weights))


def compute_weight_gradients(module: FSDPModule, pending: PendingWeights, ahead: int) -> None:
    """Compute a stage's weight gradients, one fully_shard group after another, starting with the last.

    Each group is gathered if needed, then reduced and freed as after any other backward. ahead: number of groups
    gathered before the one that computes. Private because fully_shard's hooks run only where input gradients are
    computed.
    """
    from torch.distributed.pipelining._backward import _get_grad_fn_or_grad_acc, stage_backward_weight

    groups = list(reversed(list_groups(module)))
    group_of = {
        _get_grad_fn_or_grad_acc(weight): number
        for number, group in enumerate(groups)
        for weight in list_gathered_weights(group)
    }
    # An entry may need the weights of several groups, such as those of a layer shared by two blocks.
    waiting = [({group_of[node] for node in entry["params"]}, entry) for entry in pending]
    for number, group in enumerate(groups):
        entries = [(needed, entry) for needed, entry in waiting if number in needed]
        waiting = [(needed, entry) for needed, entry in waiting if number not in needed]
        used = {number}.union(*(needed for needed, _ in entries))
        for index in [*sorted(used), *range(number + 1, min(number + 1 + ahead, len(groups)))]:
            gather_group(groups[index], wait=index in used)
        weights = [weight for index in used for weight in list_gathered_weights(groups[index])]
        stage_backward_weight(iter(weights), [entry for _, entry in entries])
        group.post_backward()
    module._get_fsdp_state()._root_post_backward_final_callback()
