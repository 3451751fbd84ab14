"""Layouts of column-parallel layers that are not one nn.Linear for each projection.

A fused layer makes queries, keys and values at once (Phi-3, GPT-2), or the gate and the up projection of a gated
feed-forward layer (GLM-4): each rank has its share of each part. Conv1D of transformers has its weight transposed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import Shard

from hpc_train.errors import UserError
from hpc_train.models.adapters.adapted_linear import AdaptedLayer, is_conv1d
from hpc_train.parallel.tensor.local_parameters import ParameterLayout
from hpc_train.shard_rectangles import FusedParts
from hpc_train.traffic.model_axes import assign_kv_heads

if TYPE_CHECKING:
    from hpc_train.parallel.tensor.layers import TensorAxis

KEY_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads", "kv_heads")
"""Attributes in which the code of an attention has its number of heads of keys and values."""
FUSED_STYLES = ("fused_qkv", "fused_gate_up")


def find_inputs_dim(layer: nn.Module) -> int:
    """Return the dimension of a layer's weight that has the inputs: 1 of nn.Linear, 0 of Conv1D."""
    if isinstance(layer, AdaptedLayer):
        return layer.inputs_dim
    return 0 if is_conv1d(layer) else 1


def count_outputs(layer: Any) -> int:
    """Return the number of outputs of a nn.Linear or Conv1D."""
    return int(layer.nf if hasattr(layer, "nf") else layer.out_features)


def count_inputs(layer: Any) -> int:
    """Return the number of inputs of a nn.Linear or Conv1D."""
    return int(layer.nx if hasattr(layer, "nx") else layer.in_features)


def orient(layer: nn.Module, matrix: Tensor) -> Tensor:
    """Return a weight of a layer, or A of its adapter, as nn.Linear has it: (outputs, inputs)."""
    return matrix if isinstance(layer, nn.Linear) else matrix.t()


def lay_out_fused(name: str, layer: nn.Module, style: str, parent: nn.Module, axis: TensorAxis) -> ParameterLayout:
    """Lay out a vector with an entry for each output of a fused layer.

    style: fused_gate_up, two equal parts; or fused_qkv, the heads of queries, of keys and of values, each of `head_dim`
    of the parent. Where there are fewer key heads than ranks, each rank has the whole layer, and computes the heads of
    its queries. Raises UserError for other sizes, and where they do not divide.
    """
    outputs = count_outputs(layer)
    if style == "fused_gate_up":
        if outputs % 2 or outputs // 2 % axis.size:
            raise UserError(
                f"parallel.tp={axis.size}: {name} has {outputs} outputs, whose halves (fused_gate_up) do not divide"
            )
        return ParameterLayout(Shard(0), fused=FusedParts(0, (outputs // 2, outputs // 2), axis.size))
    heads, key_heads, head_dim = _count_fused_heads(name, outputs, parent)
    if heads % axis.size:
        raise UserError(
            f"parallel.tp={axis.size}: {name} has {heads} heads, which do not divide; use a divisor of {heads}"
        )
    if key_heads % axis.size == 0:
        keys = key_heads * head_dim
        return ParameterLayout(Shard(0), fused=FusedParts(0, (heads * head_dim, keys, keys), axis.size))
    own = heads // axis.size
    keys_of_rank = assign_kv_heads(heads, key_heads, axis.rank, axis.size)
    units = (
        *range(own * axis.rank, own * (axis.rank + 1)),
        *(heads + head for head in keys_of_rank),
        *(heads + key_heads + head for head in keys_of_rank),
    )
    return ParameterLayout(partial=True, units=units, unit_rows=head_dim)


def _count_fused_heads(name: str, outputs: int, parent: nn.Module) -> tuple[int, int, int]:
    """Return (heads of queries, heads of keys, outputs of a head) of a fused layer."""
    head_dim = getattr(parent, "head_dim", None)
    if not isinstance(head_dim, int) or outputs % head_dim:
        raise UserError(f"{name}: its module has no head_dim that divides its {outputs} outputs (fused_qkv)")
    units = outputs // head_dim
    counts = [getattr(parent, key) for key in KEY_HEAD_COUNTS if hasattr(parent, key)]
    key_heads = int(counts[0]) if counts else units // 3
    heads = units - 2 * key_heads
    if key_heads <= 0 or heads <= 0 or heads % key_heads:
        raise UserError(f"{name}: has {units} heads of {head_dim} outputs, of which {key_heads} are not k and v each")
    return heads, key_heads, head_dim


def lay_out_matrix(name: str, layer: nn.Module, layout: ParameterLayout) -> ParameterLayout:
    """Lay out a matrix of a layer whose outputs have this layout.

    Raises UserError for some heads of a whole Conv1D, which would be columns.
    """
    if find_inputs_dim(layer) == 1:
        return layout
    if layout.units is not None:
        raise UserError(f"{name}: is Conv1D, of which only equal parts are split; use a smaller parallel.tp")
    fused = None if layout.fused is None else replace(layout.fused, dim=1)
    return replace(layout, placement=Shard(1), fused=fused)
