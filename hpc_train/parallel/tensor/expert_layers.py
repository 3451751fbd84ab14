"""Tensor parallelism of a mixture of experts: every tp rank has a slice of the width of each expert.

All ranks of a tp group route all tokens of the group, so the layer gathers positions once, for router, routed and
shared experts together, and sums their outputs once. Each rank computes only the part of the router's gradient that
comes through its slices; the parts are summed over the group.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import Shard

from hpc_train.errors import UserError
from hpc_train.models.adapters.adapted_linear import AdaptedLinear
from hpc_train.models.adapters.names import ADAPTER_A, ADAPTER_B, ADAPTER_LEAVES, ADAPTER_MAGNITUDE
from hpc_train.models.experts import WIDTH_DIMENSIONS, MixtureOfExperts
from hpc_train.models.layers import SwiGLU
from hpc_train.parallel.tensor.layers import TensorAxis
from hpc_train.parallel.tensor.local_parameters import ParameterLayout, ParameterLayouts


def split_mixture(name: str, mixture: nn.Module, axis: TensorAxis, layouts: ParameterLayouts) -> None:
    """Split the experts of a mixture by width. Raises UserError where that does not divide, or for other modules."""
    if not isinstance(mixture, MixtureOfExperts):
        raise UserError(
            f"{name}: is {type(mixture).__name__}, and only hpc_train.models.experts.MixtureOfExperts can be expert"
        )
    for key, dimension in WIDTH_DIMENSIONS.items():
        layouts[mixture.experts, key] = ParameterLayout(Shard(dimension))
        # Not get_parameter: expert parallelism may have put its own part behind the name.
        _check_width(name, dict(mixture.experts.named_parameters())[key].shape[dimension], axis)
    if mixture.shared is not None:
        _split_shared(f"{name}.shared", mixture.shared, axis, layouts)
    layouts.update({(mixture.router.gate, key): ParameterLayout(partial=True) for key in ("weight", *ADAPTER_LEAVES)})
    mixture.router.balance.copies = axis.size
    mixture.register_forward_pre_hook(lambda _, args: (axis.enter(args[0]), *args[1:]))
    mixture.register_forward_hook(lambda _, args, out: axis.leave(out))


def _split_shared(name: str, shared: nn.Module, axis: TensorAxis, layouts: ParameterLayouts) -> None:
    if not isinstance(shared, SwiGLU) or any(True for name, _ in shared.named_parameters() if name.endswith("bias")):
        raise UserError(f"{name}: only a SwiGLU without biases can be split over parallel.tp={axis.size}")
    _check_width(name, shared.down.in_features, axis)
    # Without forwards of their own: the mixture gathers positions and sums outputs for all of its layers together.
    for layer in (shared.gate, shared.up):
        layouts.update({(layer, key): ParameterLayout(Shard(0)) for key in ("weight", ADAPTER_B, ADAPTER_MAGNITUDE)})
        layouts[layer, ADAPTER_A] = ParameterLayout(partial=True)
    layouts.update({(shared.down, key): ParameterLayout(Shard(1)) for key in ("weight", ADAPTER_A)})
    layouts.update({(shared.down, key): ParameterLayout(partial=True) for key in (ADAPTER_B, ADAPTER_MAGNITUDE)})
    if isinstance(shared.down, AdaptedLinear):
        shared.down.sum_squares = axis.sum


def _check_width(name: str, width: int, axis: TensorAxis) -> None:
    if width % axis.size:
        raise UserError(f"parallel.tp={axis.size}: {name} has a width of {width}, which does not divide")
