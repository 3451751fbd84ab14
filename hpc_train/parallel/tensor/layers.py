"""The layers of tensor parallelism: how each line of a tensor plan changes a module's forward and parameters.

First what the ranks of the tp axis exchange between layers: activations (B, T, features), whole on each rank or split
over positions. Then column-parallel and row-parallel layers, and embedding and head split by vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hpc_train._torch.process_groups import all_gather
from hpc_train._torch.tensors import check_on_device
from hpc_train.errors import UserError
from hpc_train.models.adapters.adapted_linear import AdaptedLayer, AdaptedLinear
from hpc_train.models.adapters.names import ADAPTER_A, ADAPTER_B, ADAPTER_MAGNITUDE
from hpc_train.models.adapters.nf4 import NF4_CODES, NF4_SCALES, Nf4Weight
from hpc_train.models.adapters.nf4_sizes import NF4_BLOCK
from hpc_train.models.layers import LinearGroup
from hpc_train.models.linear import multiply_weight
from hpc_train.parallel.reduce_scatter import reduce_parts
from hpc_train.parallel.tensor.fused_layouts import (
    count_inputs,
    count_outputs,
    find_inputs_dim,
    lay_out_fused,
    lay_out_matrix,
    orient,
)
from hpc_train.parallel.tensor.local_parameters import ParameterLayout, ParameterLayouts
from hpc_train.traffic.model_axes import assign_kv_heads

ExchangeOperation = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TensorAxis:
    """The ranks that share the matrices of a layer, and how activations lie on them between the layers."""

    mesh: DeviceMesh
    sequence: bool
    """Between layers each rank has T / size positions (Korthikanti et al. 2022, arXiv:2205.05198), else all T."""
    symmetric: bool = False
    """Asynchronous products go through symmetric memory."""
    by_all_to_all: bool = False
    """How activations are summed over ranks, see reduce_parts."""

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the tp axis."""
        return self.mesh.get_group()

    @property
    def rank(self) -> int:
        """This process's index on the axis."""
        return self.mesh.get_local_rank()

    @property
    def size(self) -> int:
        """The degree of tp."""
        return self.mesh.size()

    def enter(self, x: Tensor) -> Tensor:
        """Prepare the input of column-parallel layers: all positions on each rank; backward sums over ranks.

        Megatron's f (Shoeybi et al. 2019, arXiv:1909.08053), or g of the paper above where positions are split.
        """
        return _exchange(x, self.gather, self.scatter) if self.sequence else _exchange(x, _identity, self.sum)

    def leave(self, x: Tensor) -> Tensor:
        """Sum the output of row-parallel layers over ranks, and split it as activations lie between layers."""
        return _exchange(x, self.scatter, self.gather) if self.sequence else _exchange(x, self.sum, _identity)

    def split(self, x: Tensor) -> Tensor:
        """Split a tensor that is whole on each rank as activations lie between layers."""
        return _exchange(x, self.select_own, self.gather) if self.sequence else x

    def join(self, x: Tensor) -> Tensor:
        """Gather all positions for a layer that every rank runs whole."""
        return _exchange(x, self.gather, self.select_own) if self.sequence else x

    def add(self, x: Tensor) -> Tensor:
        """Sum over ranks what every rank goes on to use with its own values; backward sums as well."""
        return _exchange(x, self.sum, self.sum)

    def gather(self, x: Tensor) -> Tensor:
        """Gather (B, T / size, ...) of each rank into (B, T, ...)."""
        parts = x.new_empty(self.size, *x.shape)
        all_gather(parts, x.contiguous(), self.group)
        return parts.transpose(0, 1).flatten(1, 2)

    def scatter(self, x: Tensor) -> Tensor:
        """Sum (B, T, ...) over ranks and return this rank's positions of it, (B, T / size, ...)."""
        parts = self._split_positions(x).transpose(0, 1).contiguous()
        local_part = torch.empty_like(parts[0])
        reduce_parts(local_part, parts, self.group, by_all_to_all=self.by_all_to_all)
        return local_part

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of x over ranks."""
        out = x.clone(memory_format=torch.contiguous_format)  # all_reduce works in place, and x belongs to others
        dist.all_reduce(out, group=self.group)
        return out

    def select_own(self, x: Tensor) -> Tensor:
        """Select this rank's positions of (B, T, ...): (B, T / size, ...)."""
        return self._split_positions(x)[:, self.rank].clone()  # a view would keep all positions in memory

    def _split_positions(self, x: Tensor) -> Tensor:
        """Split positions: (B, T, ...) to (B, size, T / size, ...)."""
        if x.shape[1] % self.size:
            raise UserError(
                f"a sequence of {x.shape[1]} positions does not divide over parallel.tp={self.size}; "
                "use another length, or parallel.tensor.sequence=false"
            )
        return x.view(len(x), self.size, -1, *x.shape[2:])


def _identity(x: Tensor) -> Tensor:
    return x.view_as(x)  # an autograd function must not return its input itself


def _exchange(x: Tensor, forward: ExchangeOperation, backward: ExchangeOperation) -> Tensor:
    out: Tensor = _Exchange.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return out


class _Exchange(torch.autograd.Function):
    """A linear exchange between ranks, whose backward is its transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: ExchangeOperation, transpose: ExchangeOperation) -> Tensor:
        ctx.transpose = transpose
        return exchange(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transpose(gradient), None, None


ColumnProducts = Callable[[Tensor, Sequence["Tensor | nn.Linear"]], Sequence[Tensor]]
"""Multiplies x, as it lies between layers, by weights (N_i, K) of its own or of layers: (B, T, N_i), every position."""
RowProduct = Callable[[Tensor, Tensor], Tensor]
"""Multiplies x (B, T, K) by a weight (N, K) of this rank's columns and sums over ranks, as it lies between layers."""


def make_column_products(axis: TensorAxis, asynchronous: bool) -> ColumnProducts:
    """Make the products of column-parallel layers that share an input, so that it is gathered once.

    Backward also sums the input's gradient only once. The gathered input is kept for backward; to keep only a rank's
    own positions, as Megatron does, would save B T h (1 - 1 / size) numbers for each group of layers and cost one more
    all-gather each.
    """
    if asynchronous and axis.symmetric:
        from hpc_train.parallel.tensor.symmetric_matmul import gather_matmul_symmetric

        name = axis.group.group_name
        return lambda x, weights: gather_matmul_symmetric(
            x, [w.weight if isinstance(w, nn.Linear) else w for w in weights], name
        )
    if asynchronous:
        from hpc_train.parallel.tensor.ring_exchange import MatmulRing
        from hpc_train.parallel.tensor.ring_matmul import gather_matmul  # its operators take 50 ms to define

        ring = MatmulRing(axis.group)
        return lambda x, weights: gather_matmul(x, [w.weight if isinstance(w, nn.Linear) else w for w in weights], ring)

    def gathered(x: Tensor, weights: Sequence[Tensor | nn.Linear]) -> list[Tensor]:
        full = axis.enter(x)
        return [multiply_weight(w, full) if isinstance(w, nn.Linear) else F.linear(full, w) for w in weights]

    return gathered


def make_row_product(axis: TensorAxis, asynchronous: bool) -> RowProduct:
    """Make the product of a row-parallel layer, without its bias."""
    if asynchronous and axis.symmetric:
        from hpc_train.parallel.tensor.symmetric_matmul import matmul_scatter_symmetric

        name = axis.group.group_name
        return lambda x, weight: matmul_scatter_symmetric(x, weight, name)
    if asynchronous:
        from hpc_train.parallel.tensor.ring_exchange import MatmulRing
        from hpc_train.parallel.tensor.ring_matmul import matmul_scatter

        ring = MatmulRing(axis.group)
        return lambda x, weight: matmul_scatter(x, weight, ring)
    return lambda x, weight: axis.leave(F.linear(x, weight))


def _add_bias(product: Tensor, bias: Tensor | None) -> Tensor:
    return product if bias is None else product + bias


def split_columns(
    parent: nn.Module,
    layers: dict[str, tuple[nn.Module, str]],
    axis: TensorAxis,
    asynchronous: bool,
    layouts: ParameterLayouts,
) -> None:
    """Make the layers of `parent` that a plan calls col, or fused_qkv or fused_gate_up, column-parallel.

    layers: by name, with these words. Layers of col are split by heads where the parent has a `head_dim`. Where there
    are fewer key and value heads than ranks, or numbers that do not divide, the layers of those heads stay whole and
    each rank computes the heads that its own query heads attend to. Raises UserError where the widest layer does not
    divide.
    """
    unit = int(getattr(parent, "head_dim", 1))
    columns = [layer for layer, style in layers.values() if style == "col"]
    heads = max(map(count_outputs, columns), default=0) // unit
    for name, (layer, style) in layers.items():
        if style == "col":
            layout = lay_out_heads(name, count_outputs(layer) // unit, heads, unit, axis)
        else:
            layout = lay_out_fused(name, layer, style, parent, axis)
        layouts.update({(layer, key): layout for key in ("bias", NF4_CODES, NF4_SCALES, ADAPTER_MAGNITUDE)})
        layouts.update({(layer, key): lay_out_matrix(name, layer, layout) for key in ("weight", ADAPTER_B)})
        layouts[layer, ADAPTER_A] = ParameterLayout(partial=True)  # whole; each rank's columns add to its gradient
    _replace_forwards(parent, [layer for layer, _ in layers.values()], make_column_products(axis, asynchronous))


def lay_out_heads(name: str, units: int, heads: int, unit: int, axis: TensorAxis) -> ParameterLayout:
    """Lay out a parameter with rows for `units` heads, or single columns, of an attention with `heads` query heads.

    unit: rows of a head. Raises UserError where neither units nor heads divide.
    """
    if units % axis.size == 0:
        return ParameterLayout(Shard(0))
    _check_columns(name, units, heads, axis, unit)
    # Each rank has all of it, but only the gradient of the heads that it has used: partial, to be summed.
    return ParameterLayout(partial=True, units=assign_kv_heads(heads, units, axis.rank, axis.size), unit_rows=unit)


def _replace_forwards(parent: nn.Module, layers: list[nn.Module], products: ColumnProducts) -> None:
    """Make `layers` compute this rank's columns: each when called, or all at once in a LinearGroup of `parent`."""

    def compute(x: Tensor, *called: Any) -> tuple[Tensor, ...]:
        adapted = [layer for layer in called if isinstance(layer, AdaptedLayer)]
        weights = [layer if isinstance(layer, nn.Linear) else layer.weight.t() for layer in called]
        outputs = products(x, [*weights, *(orient(layer, layer.lora_a) for layer in adapted)])
        lows = iter(outputs[len(called) :])
        return tuple(
            _add_bias(layer.combine(output, next(lows)) if isinstance(layer, AdaptedLayer) else output, layer.bias)
            for output, layer in zip(outputs, called, strict=False)
        )

    for layer in layers:
        layer.forward = _single_output(compute, layer)
    for group in parent.children():
        if isinstance(group, LinearGroup):
            group.forward = _make_group_forward(compute, layers)  # type: ignore[method-assign]


def _single_output(compute: Callable[..., tuple[Tensor, ...]], layer: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: compute(x, layer)[0]


def _make_group_forward(
    compute: Callable[..., tuple[Tensor, ...]], columns: list[nn.Module]
) -> Callable[..., tuple[Tensor, ...]]:
    """Make a LinearGroup's forward: one `compute` if all its layers are column-parallel, else a call for each."""

    def forward(x: Tensor, *called: nn.Linear) -> tuple[Tensor, ...]:
        # `is`, not a set: torch.compile traces this comparison, and cannot hash modules.
        if all(any(layer is column for column in columns) for layer in called):
            return compute(x, *called)
        return tuple(layer(x) for layer in called)

    return forward


def _check_columns(name: str, units: int, heads: int, axis: TensorAxis, unit: int) -> None:
    if units == heads or heads % axis.size:
        unit_name = "columns" if unit == 1 else "heads"
        raise UserError(
            f"parallel.tp={axis.size}: {name} has {units} {unit_name}, which do not divide; use a divisor of {units}"
        )


def split_rows(name: str, layer: Any, axis: TensorAxis, asynchronous: bool, layouts: ParameterLayouts) -> None:
    """Make a layer row-parallel. Raises UserError where its inputs do not divide."""
    inputs = count_inputs(layer)
    if inputs % axis.size:
        raise UserError(
            f"parallel.tp={axis.size}: {name} has {inputs} inputs, which do not divide; use a divisor of {inputs}"
        )
    if isinstance(layer, Nf4Weight) and inputs // axis.size % NF4_BLOCK:
        raise UserError(
            f"adapter.base=nf4: {name} has {inputs} inputs, of which parallel.tp={axis.size} would split "
            f"blocks of {NF4_BLOCK} numbers; use parallel=fsdp, or adapter.base=full"
        )
    by_inputs = ParameterLayout(Shard(find_inputs_dim(layer)))
    layouts.update({(layer, key): by_inputs for key in ("weight", NF4_CODES, NF4_SCALES)})
    # The bias is added once, after the sum. Where positions are split, each rank sees only its own in the gradient.
    layouts[layer, "bias"] = ParameterLayout(partial=axis.sequence)
    if isinstance(layer, AdaptedLayer):
        _split_adapted_rows(layer, axis, layouts)
        return
    if isinstance(layer, Nf4Weight) or hasattr(layer, "product"):
        layer.forward = lambda x: _add_bias(axis.leave(multiply_weight(layer, x)), layer.bias)
        return
    product = make_row_product(axis, asynchronous)
    layer.forward = lambda x: _add_bias(product(x, orient(layer, layer.weight)), layer.bias)


def _split_adapted_rows(layer: AdaptedLayer, axis: TensorAxis, layouts: ParameterLayouts) -> None:
    """Make a layer with an adapter row-parallel: A is split as the weight is, and one sum over ranks serves both."""
    layouts[layer, ADAPTER_A] = ParameterLayout(Shard(layer.inputs_dim))
    layouts[layer, ADAPTER_B] = layouts[layer, ADAPTER_MAGNITUDE] = ParameterLayout(partial=True)
    layer.sum_squares = axis.sum

    def forward(x: Tensor) -> Tensor:
        out = layer.combine(layer.multiply_weight(x), layer.multiply_a(x))
        return _add_bias(axis.leave(out), layer.bias)

    layer.forward = forward  # type: ignore[method-assign, assignment]


def split_positions(module: nn.Module, axis: TensorAxis, layouts: ParameterLayouts) -> None:
    """Make a module work on this rank's positions; an embedding of positions is given all and selects its own."""
    for submodule in module.modules():
        layouts.update(
            {(submodule, key): ParameterLayout(partial=True) for key, _ in submodule.named_parameters(recurse=False)}
        )
    if isinstance(module, nn.Embedding):
        module.register_forward_pre_hook(lambda _, args: (axis.select_own(args[0]), *args[1:]))


def split_embedding(name: str, layer: nn.Embedding, axis: TensorAxis, layouts: ParameterLayouts) -> None:
    """Split an embedding by vocabulary: each rank looks up its own rows, and adds zero for all others.

    Raises UserError for options of nn.Embedding that need the whole table, and for code of its own.
    """
    if layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse or not is_plain_embedding(layer):
        raise UserError(
            f"{name}: an embedding with max_norm, scale_grad_by_freq, sparse or a forward of its own is not split; "
            "use parallel.tensor.vocabulary=false"
        )
    layouts[layer, "weight"] = ParameterLayout(Shard(0))
    first, rows = find_first_row(layer.num_embeddings, axis), layer.num_embeddings
    padding = None if layer.padding_idx is None else layer.padding_idx - first

    def lookup(tokens: Tensor) -> Tensor:
        check_on_device(((tokens >= 0) & (tokens < rows)).all(), "a token is not in the vocabulary")
        weight = layer.weight
        is_local = (tokens >= first) & (tokens < first + len(weight))
        # A token of another rank looks up any row of ours and is masked: nothing here depends on the data, so it
        # compiles.
        local_padding = padding if padding is not None and 0 <= padding < len(weight) else None
        rows_of_tokens = F.embedding((tokens - first).clamp(0, len(weight) - 1), weight, local_padding)
        embedded = axis.leave(rows_of_tokens * is_local.unsqueeze(-1))
        scale = getattr(layer, "embed_scale", None)
        if scale is None:
            return embedded
        return embedded * (scale.to(weight.dtype) if isinstance(scale, Tensor) else scale)

    layer.forward = lookup  # type: ignore[method-assign, assignment]


def is_plain_embedding(layer: nn.Embedding) -> bool:
    """Whether a layer only looks rows up, and perhaps multiplies them by its `embed_scale` (Gemma)."""
    return type(layer).forward is nn.Embedding.forward or hasattr(layer, "embed_scale")


def find_first_row(rows: int, axis: TensorAxis) -> int:
    """Return the first row of this rank's part of the vocabulary. Raises UserError if a rank would have none."""
    chunk = -(-rows // axis.size)
    if chunk * (axis.size - 1) >= rows:
        raise UserError(
            f"parallel.tp={axis.size}: {chunk} of a vocabulary of {rows} for each leave a rank without; "
            "use a smaller tp, or parallel.tensor.vocabulary=false"
        )
    return chunk * axis.rank


def split_head(head: nn.Module, rows: int, axis: TensorAxis, layouts: ParameterLayouts, *, has_logits: bool) -> None:
    """Split an output layer by vocabulary; its logits are a DTensor of which each rank keeps its own part.

    rows: size of the vocabulary. A head without parameters is one that gets the embedding's weight at every call.
    has_logits: false for a head that will pass hidden states on, because the loss computes logits in chunks.
    """
    find_first_row(rows, axis)
    layouts.update({(head, key): ParameterLayout(Shard(0)) for key, _ in head.named_parameters(recurse=False)})
    if isinstance(head, AdaptedLinear):
        layouts[head, ADAPTER_A] = ParameterLayout(partial=True)

    def logits(_: nn.Module, args: Any, out: Tensor) -> DTensor:
        # Given, not inferred: the last rank may have fewer rows than the others.
        shape = torch.Size((*out.shape[:-1], rows))
        stride = torch.empty(shape, device="meta").stride()
        placements = (Shard(out.ndim - 1),)
        return DTensor.from_local(out, axis.mesh, placements, run_check=False, shape=shape, stride=stride)

    head.register_forward_pre_hook(lambda _, args: (axis.enter(args[0]), *args[1:]))
    if has_logits:
        head.register_forward_hook(logits)


def keep_vocabulary(module: nn.Module, axis: TensorAxis) -> None:
    """Let every rank compute a whole embedding or output layer."""
    if isinstance(module, nn.Embedding):
        module.register_forward_hook(lambda _, args, out: axis.split(out))
    else:
        module.register_forward_pre_hook(lambda _, args: (axis.join(args[0]), *args[1:]))
