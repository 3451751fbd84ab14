"""The parameter groups of fully_shard (FSDP2): gather, reduce and move them outside of its hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hpc_train._torch.dtensor import set_local


def list_groups(module: FSDPModule) -> list[Any]:
    """Return fully_shard's groups of a stage; the group of what is in no block comes first."""
    states = module._get_fsdp_state()._state_ctx.all_states
    return [group for state in states for group in state._fsdp_param_groups]


def list_gathered_weights(group: Any) -> list[nn.Parameter]:
    """Return the weights a group's modules compute with, whether or not they are gathered right now."""
    return [
        fsdp_param._unsharded_param for fsdp_param in group.fsdp_params if fsdp_param._unsharded_param.requires_grad
    ]


def gather_group(group: Any, wait: bool) -> None:
    """Start to gather a group's parameters for its backward. wait: until they have arrived."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    group._training_state = TrainingState.PRE_BACKWARD
    group.unshard(group.unshard_async_op)
    if wait:
        group.wait_for_unshard()


def finish_backward(module: FSDPModule) -> None:
    """Reduce and free the groups of a stage that autograd has not reached: those of the inputs of the first stage.

    Private because from torch 2.15 on a pipeline leaves such groups gathered until the end of the step.
    """
    for group in reversed(list_groups(module)):
        if getattr(group, "_post_backward_pending", False) and group.reduce_grads:
            state = group._training_state
            group.post_backward()
            group._training_state = state


def move_shards(module: FSDPModule, move: Callable[[Tensor], Tensor]) -> None:
    """Give the shards of a module's own fully_shard groups another memory.

    move: from a flat shard, filled up to the same length on every rank, to a copy of it, contiguous. Private because
    fully_shard allocates its shards itself, and would copy an uneven one that it is given into such a filled-up one.
    """
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for fsdp_param in group.fsdp_params:
            flat, shard = move(fsdp_param._sharded_param_data), fsdp_param.sharded_param
            assert isinstance(shard, DTensor)
            fsdp_param._sharded_param_data = flat
            set_local(shard, flat.as_strided(fsdp_param.sharded_size, fsdp_param.contiguous_sharded_stride))


def iterate_shards(module: FSDPModule) -> Iterator[tuple[Any, list[nn.Module]]]:
    """Yield each parameter that fully_shard holds for a module's own groups, with the modules that it belongs to."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for fsdp_param in group.fsdp_params:
            info = fsdp_param._module_info
            yield fsdp_param, [info.module, *info.shared_modules]


def extend_gather(fsdp_param: Any, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Have fully_shard call `before` on a shard to get what is gathered, and `after` to make a parameter of that.

    The public form is a tensor subclass that has these two methods before fully_shard sees it, and that everything else
    then has to know. Private because a plain shard gets them after it got its memory, which torch learns of first: it
    would otherwise fill up an uneven shard later, in a new tensor without the methods.
    """
    fsdp_param.reset_sharded_param()
    shard = fsdp_param.sharded_param._local_tensor
    shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = before, after
    fsdp_param._init_extensions()
