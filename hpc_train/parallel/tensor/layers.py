"""The layers of tensor parallelism: what each line of a plan makes of a module's forward and of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from hpc_train.compat import check_later
from hpc_train.errors import UserError
from hpc_train.models.linear_group import LinearGroup
from hpc_train.parallel.tensor.axis import Axis
from hpc_train.parallel.tensor.heads import attended
from hpc_train.parallel.tensor.local_parameters import Holding, Holdings

Columns = Callable[[Tensor, list[Tensor]], Sequence[Tensor]]
"""x as it lies between layers, times each weight (N_i, K) of this rank: all positions (B, T, N_i)."""
Rows = Callable[[Tensor, Tensor], Tensor]
"""x (B, T, K) times a weight (N, K) of this rank's columns, summed over ranks, as it lies between layers."""


def column_products(axis: Axis, asynchronous: bool) -> Columns:
    """How the column-parallel layers that share an input compute: it is gathered once, and its gradient summed once.

    The gathered input is kept for backward; keeping a rank's own positions only, as Megatron does, would save
    B T h (1 - 1 / size) numbers for each such group of layers and cost one more all-gather each.
    """
    if asynchronous:
        from hpc_train.parallel.tensor.ring_matmul import Ring, gather_matmul  # its operators take 50 ms

        ring = Ring(axis.group)
        return lambda x, weights: gather_matmul(x, weights, ring)

    def gathered(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
        whole = axis.enter(x)
        return [F.linear(whole, weight) for weight in weights]

    return gathered


def row_product(axis: Axis, asynchronous: bool) -> Rows:
    """How a row-parallel layer computes, without its bias."""
    if asynchronous:
        from hpc_train.parallel.tensor.ring_matmul import Ring, matmul_scatter

        ring = Ring(axis.group)
        return lambda x, weight: matmul_scatter(x, weight, ring)
    return lambda x, weight: axis.leave(F.linear(x, weight))


def _plus(product: Tensor, bias: Tensor | None) -> Tensor:
    return product if bias is None else product + bias


def split_columns(
    parent: nn.Module, layers: dict[str, nn.Linear], axis: Axis, asynchronous: bool, holdings: Holdings
) -> None:
    """Make the layers of `parent` that a plan calls col column-parallel.

    They are split by heads where the parent has a `head_dim`. Where there are fewer key and value heads than ranks, or
    numbers that do not divide, the layers of those heads stay whole and each rank computes the heads that its own query
    heads attend to. Raises UserError where the widest layer does not divide.
    """
    unit = int(getattr(parent, "head_dim", 1))
    heads = max(layer.out_features for layer in layers.values()) // unit
    for name, layer in layers.items():
        units = layer.out_features // unit
        holding = Holding(Shard(0))
        if units % axis.size:
            _check_columns(name, units, heads, axis, unit)
            holding = Holding(partial=True, units=attended(heads, units, axis.rank, axis.size), unit=unit)
        holdings.update({(layer, key): holding for key in ("weight", "bias")})
    _replace_forwards(parent, list(layers.values()), column_products(axis, asynchronous))


def _replace_forwards(parent: nn.Module, layers: list[nn.Linear], products: Columns) -> None:
    """Make `layers` compute this rank's columns: each when called, or all at once in a LinearGroup of `parent`."""

    def compute(x: Tensor, *called: nn.Linear) -> tuple[Tensor, ...]:
        outputs = products(x, [layer.weight for layer in called])
        return tuple(_plus(output, layer.bias) for output, layer in zip(outputs, called, strict=True))

    for layer in layers:
        layer.forward = _single_output(compute, layer)  # type: ignore[method-assign, assignment]
    for group in parent.children():
        if isinstance(group, LinearGroup):
            group.forward = _check_group(compute, layers)  # type: ignore[method-assign]


def _single_output(compute: Callable[..., tuple[Tensor, ...]], layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    return lambda x: compute(x, layer)[0]


def _check_group(
    compute: Callable[..., tuple[Tensor, ...]], columns: list[nn.Linear]
) -> Callable[..., tuple[Tensor, ...]]:
    """Use `compute` if all layers of a LinearGroup are column-parallel; otherwise call them one by one."""

    def forward(x: Tensor, *called: nn.Linear) -> tuple[Tensor, ...]:
        if all(any(layer is column for column in columns) for layer in called):
            return compute(x, *called)
        return tuple(layer(x) for layer in called)

    return forward


def _check_columns(name: str, units: int, heads: int, axis: Axis, unit: int) -> None:
    if units == heads or heads % axis.size:
        what = "columns" if unit == 1 else "heads"
        raise UserError(
            f"parallel.tp={axis.size}: {name} has {units} {what}, which do not divide; use a divisor of {units}"
        )


def split_rows(name: str, layer: nn.Linear, axis: Axis, asynchronous: bool, holdings: Holdings) -> None:
    """Make a layer row-parallel. Raises UserError where its inputs do not divide."""
    if layer.in_features % axis.size:
        raise UserError(
            f"parallel.tp={axis.size}: {name} has {layer.in_features} inputs, which do not divide; "
            f"use a divisor of {layer.in_features}"
        )
    holdings[layer, "weight"] = Holding(Shard(1))
    holdings[layer, "bias"] = Holding(partial=axis.sequence)
    product = row_product(axis, asynchronous)
    layer.forward = lambda x: _plus(product(x, layer.weight), layer.bias)  # type: ignore[method-assign, assignment]


def split_positions(module: nn.Module, axis: Axis, holdings: Holdings) -> None:
    """Make a module work on this rank's positions; one that embeds positions is given all of them and takes its own."""
    for owner in module.modules():
        holdings.update({(owner, key): Holding(partial=True) for key, _ in owner.named_parameters(recurse=False)})
    if isinstance(module, nn.Embedding):
        module.register_forward_pre_hook(lambda _, args: (axis.own(args[0]), *args[1:]))


def split_embedding(name: str, layer: nn.Embedding, axis: Axis, holdings: Holdings) -> None:
    """Split an embedding by vocabulary: each rank looks up what it has, and what it has not is zero in the sum.

    Raises UserError for options of nn.Embedding that need the whole table.
    """
    if layer.padding_idx is not None or layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
        raise UserError(
            f"{name}: an embedding with padding_idx, max_norm, scale_grad_by_freq or sparse is not split; "
            "use parallel.tensor.vocabulary=false"
        )
    holdings[layer, "weight"] = Holding(Shard(0))
    first, rows = first_row(layer.num_embeddings, axis), layer.num_embeddings

    def lookup(tokens: Tensor) -> Tensor:
        check_later(((tokens >= 0) & (tokens < rows)).all(), "a token is not in the vocabulary")
        weight = layer.weight
        mine = (tokens >= first) & (tokens < first + len(weight))
        found = F.embedding((tokens - first).clamp(0, len(weight) - 1), weight)
        return axis.leave(found * mine.unsqueeze(-1))

    layer.forward = lookup  # type: ignore[method-assign, assignment]


def first_row(rows: int, axis: Axis) -> int:
    """Where this rank's part of the vocabulary begins. UserError where a rank would have none."""
    chunk = -(-rows // axis.size)
    if chunk * (axis.size - 1) >= rows:
        raise UserError(
            f"parallel.tp={axis.size}: {chunk} of a vocabulary of {rows} for each leave a rank without; "
            "use a smaller tp, or parallel.tensor.vocabulary=false"
        )
    return chunk * axis.rank


def split_head(head: nn.Module, rows: int, axis: Axis, holdings: Holdings) -> None:
    """Split an output layer by vocabulary: its logits are a DTensor, of which each rank computes and keeps its part.

    rows: size of the vocabulary. A head without parameters is one that gets the embedding's weight at every call.
    """
    first_row(rows, axis)
    holdings.update({(head, key): Holding(Shard(0)) for key, _ in head.named_parameters(recurse=False)})

    def logits(_: nn.Module, args: Any, out: Tensor) -> DTensor:
        shape = torch.Size((*out.shape[:-1], rows))
        stride = torch.empty(shape, device="meta").stride()
        where = (Shard(out.ndim - 1),)
        return DTensor.from_local(out, axis.mesh, where, run_check=False, shape=shape, stride=stride)

    head.register_forward_pre_hook(lambda _, args: (axis.enter(args[0]), *args[1:]))
    head.register_forward_hook(logits)


def keep_vocabulary(module: nn.Module, axis: Axis) -> None:
    """An embedding or an output layer that every rank computes in whole."""
    if isinstance(module, nn.Embedding):
        module.register_forward_hook(lambda _, args, out: axis.split(out))
    else:
        module.register_forward_pre_hook(lambda _, args: (axis.join(args[0]), *args[1:]))
