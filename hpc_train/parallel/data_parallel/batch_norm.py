"""parallel.sync_batchnorm: BatchNorm over the micro-batches of all data-parallel ranks together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.units import join_first

BATCH_NORM_LAYERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def synchronise_batch_norm(part: nn.Module, config: RunConfig, world: World) -> str | None:
    """Make every BatchNorm layer take its statistics over all ranks; without sync_batchnorm, warn if it does not.

    torch's own SyncBatchNorm works on GPUs only; on CPUs the layers become the one below.
    """
    if not config.parallel.sync_batchnorm:
        return _warn_if_unsynchronised(part, world)
    if isinstance(part, BATCH_NORM_LAYERS):
        raise UserError("parallel.sync_batchnorm=true: the model is a BatchNorm layer itself; put it into a module")
    layers = {
        name: layer
        for name, layer in part.named_modules(remove_duplicate=False)
        if isinstance(layer, BATCH_NORM_LAYERS)
    }
    if not layers:
        raise UserError("parallel.sync_batchnorm=true: the model has no BatchNorm layer; leave it out")
    if world.device.type == "cuda":
        nn.SyncBatchNorm.convert_sync_batchnorm(part)  # type: ignore[no-untyped-call]
    else:
        synchronised = {layer: SyncBatchNorm(layer) for layer in layers.values()}
        for name, layer in layers.items():
            part.set_submodule(name, synchronised[layer])
    return f"SyncBatchNorm: {len(set(layers.values()))} layers over dp_replicate x dp_shard = {world.dp_size}"


def _warn_if_unsynchronised(part: nn.Module, world: World) -> str | None:
    """Return a warning if statistics depend on how samples are spread over the ranks, else None."""
    names = [
        name or type(part).__name__
        for name, layer in part.named_modules()
        if layer.training and (isinstance(layer, BATCH_NORM_LAYERS) or _tracks_statistics(layer))
    ]
    if world.dp_size == 1 or not names:
        return None
    return (
        f"warning: {join_first(names, 1)}: statistics are of each rank's own micro-batch, one of {world.dp_size}, so "
        "the numbers depend on the layout; parallel.sync_batchnorm=true takes them over all ranks"
    )


def _tracks_statistics(layer: nn.Module) -> bool:
    """Whether an InstanceNorm layer keeps running statistics."""
    return getattr(layer, "track_running_stats", False) is True and getattr(layer, "running_mean", None) is not None


class SyncBatchNorm(nn.Module):
    """A BatchNorm layer's parameters and buffers, under their names, with statistics over all ranks.

    Input and output are (N, C, ...) of any floating-point type; N may differ between ranks and may be 0. Statistics are
    computed in at least float32.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        assert isinstance(layer, BATCH_NORM_LAYERS)
        self.eps, self.momentum, self.features = layer.eps, layer.momentum, layer.num_features
        self.register_parameter("weight", layer.weight)
        self.register_parameter("bias", layer.bias)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(layer, name))
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (N, C, ...) by channel; in evaluation by the running statistics, where the layer keeps them."""
        if x.ndim < 2 or x.shape[1] != self.features:
            raise ValueError(f"BatchNorm over {self.features} channels got an input of shape {tuple(x.shape)}")
        if not self.training and self.running_mean is not None and self.running_var is not None:
            moments = (self.running_mean, self.running_var)
            return nn.functional.batch_norm(x, *moments, self.weight, self.bias, eps=self.eps)
        normal, mean, variance, count = _Normalise.apply(x, self.eps)  # type: ignore[no-untyped-call]
        if self.training:
            self._update_running_statistics(mean, variance * (count / (count - 1).clamp(min=1)))
        shape = (1, -1) + (1,) * (x.ndim - 2)
        if self.weight is not None and self.bias is not None:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        out: Tensor = normal.to(x.dtype)
        return out

    @torch.no_grad()
    def _update_running_statistics(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics towards these; variance (C,) is the unbiased one, as in torch's layers."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        weight = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean), weight)
        self.running_var.lerp_(variance.to(self.running_var), weight)


class _Normalise(torch.autograd.Function):
    """y = (x - mean) / sqrt(variance + eps), with mean and variance of each channel over all ranks.

    Ioffe and Szegedy 2015, arXiv:1502.03167. Backward: dx = (dy - mean(dy) - y mean(dy y)) / sqrt(variance + eps), with
    these means over all ranks too.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x_fp32 = x if x.dtype == torch.float64 else x.float()
        mean, variance, count = _compute_moments(x_fp32)
        scale = (variance + eps).rsqrt()
        normal = (x_fp32 - _broadcast(mean, x)) * _broadcast(scale, x)
        ctx.save_for_backward(normal, scale, count)
        ctx.dtype = x.dtype
        ctx.mark_non_differentiable(mean, variance, count)
        return normal, mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor, None]:
        normal, scale, count = ctx.saved_tensors
        sums = torch.stack([_sum_by_channel(gradient), _sum_by_channel(gradient * normal)])
        dist.all_reduce(sums)
        along_mean, along_normal = (_broadcast(row, normal) for row in sums / count)
        dx = (gradient - along_mean - normal * along_normal) * _broadcast(scale, normal)
        return dx.to(ctx.dtype), None


def _compute_moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute mean (C,), biased variance (C,) and values per channel (a scalar) over all ranks, in one collective.

    The ranks' own moments are merged as in Chan, Golub, LeVeque 1983; E[x^2] - E[x]^2 would cancel digits.
    """
    count = x.numel() // x.shape[1]
    mean = _sum_by_channel(x) / max(count, 1)
    square = _sum_by_channel((x - _broadcast(mean, x)).square())
    local_moments = torch.stack([mean, square, torch.full_like(mean, count)])
    # The default group is the data-parallel one: the rules refuse pp, cp and tp.
    all_moments = [torch.empty_like(local_moments) for _ in range(dist.get_world_size())]
    dist.all_gather(all_moments, local_moments)
    means, squares, counts = torch.stack(all_moments).unbind(1)
    total = counts[:, 0].sum()
    common = (means * counts).sum(0) / total
    variance = (squares + counts * (means - common).square()).sum(0) / total
    return common, variance, total


def _sum_by_channel(x: Tensor) -> Tensor:
    """Sum x (N, C, ...) to (C,)."""
    return x.sum([axis for axis in range(x.ndim) if axis != 1])


def _broadcast(values: Tensor, x: Tensor) -> Tensor:
    """View values (C,) so that they broadcast with x (N, C, ...)."""
    return values.view(1, -1, *[1] * (x.ndim - 2))
