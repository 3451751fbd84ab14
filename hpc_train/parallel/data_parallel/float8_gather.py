"""Gather the weights of 8-bit linear layers in 8 bits: half the bytes of bfloat16.

Without this, fully_shard gathers a weight in bfloat16 and the layer then rounds it to 8 bits. Here each rank rounds its
shard before the gather (torchao's WeightWithDynamicFloat8CastTensor, which torchtitan uses too). The scale must be that
of the whole weight, so ranks agree on the largest magnitude of every weight, all weights in one all-reduce, before the
first forward of a step and before an evaluation.

The parameters stay what they are: fully_shard asks a shard whether it has the two methods of its extension, and only
these are added. So optimizers, checkpoints and averages of weights see tensors without any rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from hpc_train._torch.fully_shard import extend_gather, iterate_shards
from hpc_train._torch.tensors import find_largest_magnitudes


class WeightCast:
    """Rounds this rank's shard of one weight before a gather, and makes a weight in 8 bits of what was gathered."""

    def __init__(self, layer: Any) -> None:
        """layer: a Float8Linear whose weight fully_shard holds."""
        assert isinstance(layer.weight, DTensor)
        self.weight, self._products = layer.weight, layer.linear_mm_config
        self.float8: torch.dtype = layer.config.cast_config_weight.target_dtype
        self.scale: Tensor | None = None
        """Factor on a weight before it is rounded, a float32 scalar; WeightScales sets it before each step."""

    def round_shard(
        self, mesh: DeviceMesh, size: torch.Size, stride: Sequence[int], module: nn.Module, policy: MixedPrecisionPolicy
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return (the shard in 8 bits, filled up to the same size on every rank), (the scale); fully_shard's hook."""
        assert self.scale is not None, "a gather before WeightScales.update"
        (bits,), scale = self._wrap(self.scale).fsdp_pre_all_gather(mesh)
        bits = bits.view(torch.uint8)  # not every backend moves float8
        rows = -(-size[0] // mesh.size())
        if len(bits) < rows:
            bits = torch.cat((bits, bits.new_zeros(rows - len(bits), *bits.shape[1:])))
        return (bits,), scale

    def make_weight(
        self, gathered: tuple[Tensor, ...], scale: tuple[Tensor, ...], dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """Return (the gathered weight, whose products have `dtype`), (its memory); fully_shard's hook.

        out: a weight made before, whose memory the gather has filled; it gets the scale.
        """
        bits = tuple(tensor.view(self.float8) for tensor in gathered)
        return self._wrap(None).fsdp_post_all_gather(bits, scale, dtype, out=out)

    def _wrap(self, scale: Tensor | None) -> Any:
        from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

        with torch.no_grad():
            shard = self.weight.to_local()
        return WeightWithDynamicFloat8CastTensor(shard, self._products, self.float8, scale)


class WeightScales:
    """The scales of all weights of some parts that are gathered in 8 bits."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        casts = (getattr(module, "weight_cast", None) for part in parts for module in part.modules())
        self._casts: list[WeightCast] = [cast for cast in casts if cast is not None]

    @torch.no_grad()
    def update(self) -> None:
        """Set the scale of every weight as it is now; ranks that shard a weight agree on it by one all-reduce."""
        if not self._casts:  # a stage without such layers
            return
        from torchao.float8.float8_utils import amax_to_scale

        shards = [cast.weight.to_local() for cast in self._casts]
        filled = [shard for shard in shards if shard.numel()]  # another rank may have all rows
        magnitudes = iter(find_largest_magnitudes(filled) if filled else [])
        zero = shards[0].new_zeros(())
        largest = torch.stack([next(magnitudes) if shard.numel() else zero for shard in shards])
        mesh = self._casts[0].weight.device_mesh  # shards are on its last axis, copies on the one before
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group(mesh.ndim - 1))
        for cast, scale in zip(self._casts, amax_to_scale(largest, self._casts[0].float8), strict=True):
            cast.scale = scale


def gather_in_8_bits(part: nn.Module) -> str:
    """Have fully_shard gather the weights of the 8-bit linear layers of `part` in 8 bits; returns a line about it.

    Comes after the parameters have their memory. A weight that another kind of layer shares is left alone.
    """
    count = 0
    for module in part.modules():
        if isinstance(module, FSDPModule):
            count += sum(_round_before_gather(shard, owners) for shard, owners in iterate_shards(module))
    return f"float8: {count} weights gathered in 8 bits"


def _round_before_gather(shard: Any, owners: Sequence[Any]) -> bool:
    """Have a parameter of these modules gathered in 8 bits; False if it is no weight that all of them round."""
    if shard.sharded_param.ndim != 2 or not all(hasattr(owner, "linear_mm_config") for owner in owners):
        return False
    owners[0].weight_cast = cast = WeightCast(owners[0])
    extend_gather(shard, cast.round_shard, cast.make_weight)
    return True
