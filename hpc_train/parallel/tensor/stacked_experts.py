"""Tensor parallelism of experts in the code of transformers, whose parameters are stacked over the experts.

Each tp rank has some of the experts, whole, and not a slice of each: a slice of two projections in one matrix would be
two rectangles of it. All ranks route all tokens. A rank computes those that chose its experts, and the outputs are
summed. The library's code leaves out tokens whose expert's index is the number of experts; where it cannot, one of this
rank's experts computes them with a weight of zero.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from hpc_train.errors import UserError
from hpc_train.models.hf.library import can_leave_out_tokens, limit_experts
from hpc_train.parallel.tensor.layers import TensorAxis
from hpc_train.parallel.tensor.local_parameters import ParameterLayout, ParameterLayouts


def share_out_experts(name: str, experts: nn.Module, axis: TensorAxis, layouts: ParameterLayouts) -> None:
    """Give each rank an equal number of the experts of a module called with (tokens, indices, weights of the routing).

    tokens: (N, hidden); indices and weights: (N, experts of a token). Raises UserError where experts do not divide, and
    for a module with other parameters than stacks of them.
    """
    count, keys = getattr(experts, "num_experts", None), [key for key, _ in experts.named_parameters()]
    if not isinstance(count, int) or any(experts.get_parameter(key).shape[0] != count for key in keys):
        raise UserError(f"{name}: {type(experts).__name__} has parameters that are not stacked over its experts")
    if count % axis.size:
        raise UserError(f"parallel.tp={axis.size}: {name} has {count} experts, which do not divide")
    own = count // axis.size
    first = own * axis.rank
    layouts.update({(experts, key): ParameterLayout(Shard(0)) for key in keys})
    limit_experts(experts, own)
    leaves_out = can_leave_out_tokens(experts)

    def enter(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, indices, weights = args
        local = indices - first
        is_elsewhere = (local < 0) | (local >= own)
        x, weights = axis.enter(x), axis.enter(weights)
        if leaves_out:
            return x, torch.where(is_elsewhere, own, local), weights
        return x, torch.where(is_elsewhere, 0, local), torch.where(is_elsewhere, 0, weights)

    def leave(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        # No token may have chosen an expert of this rank: it joins the sums of backward all the same.
        used = args[0], args[2], *(getattr(module, key) for key in keys)
        return axis.leave(out + sum(tensor[:0].sum() for tensor in used))

    experts.register_forward_pre_hook(enter)
    experts.register_forward_hook(leave)
