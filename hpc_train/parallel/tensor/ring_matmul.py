"""Overlap matrix products with the all-gather of their input or the reduce-scatter of their output, chunk by chunk.

Chunks are passed around the ranks of a group in a ring (Wang et al. 2023, doi:10.1145/3567955.3567959; see
ring_exchange.py): while one is on its way, the one before is multiplied. torch's own version, in symmetric_matmul.py,
needs symmetric memory, hence CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpc_train._torch.process_groups import find_group
from hpc_train.parallel.tensor.ring_exchange import MatmulRing, ShardPlace, circulate_shards, reduce_products


def gather_matmul(x: Tensor, weights: Sequence[Tensor], ring: MatmulRing) -> tuple[Tensor, ...]:
    """All-gather x over its positions and multiply it by every weight: column-parallel layers that share an input.

    x: this rank's positions (B, T / size, K), of the same shape on every rank; weights: (N_i, K), each rank's own rows.
    Returns the products (B, T, N_i). Backward reduce-scatters x's gradient while it computes the weights' gradients
    from the gathered input, which is saved as the result of a plain all-gather would be.
    """
    if torch.compiler.is_compiling():
        _, *compiled = _compiled_gather_matmul(x, list(weights), ring.group.group_name, ring.chunk_bytes)
        return tuple(compiled)
    outputs: tuple[Tensor, ...] = _GatherMatmul.apply(x, ring, *weights)  # type: ignore[no-untyped-call]
    return outputs


def matmul_scatter(x: Tensor, weight: Tensor, ring: MatmulRing) -> Tensor:
    """Multiply x by the weight and reduce-scatter over positions: a row-parallel layer without its bias.

    x: (B, T, K), T a multiple of the ring's size; weight: (N, K); K are each rank's own columns.
    Returns this rank's positions (B, T / size, N). Backward all-gathers the gradient and multiplies chunks as they
    arrive.
    """
    if torch.compiler.is_compiling():
        output: Tensor = _compiled_matmul_scatter(x, weight, ring.group.group_name, ring.chunk_bytes)
        return output
    output = _MatmulScatter.apply(x, weight, ring)  # type: ignore[no-untyped-call]
    return output


class _GatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ring: MatmulRing, *weights: Tensor) -> tuple[Tensor, ...]:
        shards, *outputs = _multiply_gathered(x, weights, ring)
        ctx.ring, ctx.shape = ring, x.shape
        ctx.save_for_backward(shards, *weights)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        shards, *weights = ctx.saved_tensors
        x_needs_grad, _, *needs_grad = ctx.needs_input_grad
        total, *weight_gradients = _differentiate_gathered(
            gradients, shards, weights, ctx.ring, [x_needs_grad, *needs_grad]
        )
        return None if total is None else total.view(ctx.shape), None, *weight_gradients


def _multiply_gathered(x: Tensor, weights: Sequence[Tensor], ring: MatmulRing) -> list[Tensor]:
    """Return the gathered input (size, B T / size, K), for backward, and the products (B, T, N_i)."""
    shards = _make_shard_buffer(x, ring)
    outputs = [x.new_empty(*shards.shape[:2], len(weight)) for weight in weights]
    for place in circulate_shards(shards, ring):
        for output, weight in zip(outputs, weights, strict=True):
            torch.mm(shards[place], weight.t(), out=output[place])
    return [shards, *(_join_positions(output, len(x)) for output in outputs)]


def _differentiate_gathered(
    gradients: Sequence[Tensor], shards: Tensor, weights: Sequence[Tensor], ring: MatmulRing, needs_grad: Sequence[bool]
) -> list[Tensor | None]:
    """Return gradients of x (B T / size, K) and of every weight, None where none is needed.

    needs_grad: x first, then weights.
    """
    blocks = [_split_positions(gradient, ring) for gradient in gradients]
    weight_gradients = [
        torch.empty_like(weight) if is_needed else None
        for weight, is_needed in zip(weights, needs_grad[1:], strict=True)
    ]

    def compute_weight_rows(part: int, parts: int) -> None:
        """Compute some rows of every weight gradient, as whole products: adding up partial ones would round more."""
        for block, gradient in zip(blocks, weight_gradients, strict=True):
            if gradient is not None:
                rows = slice(len(gradient) * part // parts, len(gradient) * (part + 1) // parts)
                torch.mm(block.flatten(0, 1)[:, rows].t(), shards.flatten(0, 1), out=gradient[rows])

    total = None
    if needs_grad[0]:
        total = shards.new_empty(shards.shape[1:])
        reduce_products(lambda place: _sum_contributions(blocks, weights, place), total, ring, compute_weight_rows)
    else:
        compute_weight_rows(0, 1)
    return [total, *weight_gradients]


class _MatmulScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ring: MatmulRing) -> Tensor:
        ctx.ring = ring
        ctx.save_for_backward(x, weight)  # x and not its split copy: attention saves the same tensor, its output
        return _scatter_product(x, weight, ring)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return (*_differentiate_scattered(gradient, x, weight, ctx.ring, ctx.needs_input_grad[:2]), None)


def _scatter_product(x: Tensor, weight: Tensor, ring: MatmulRing) -> Tensor:
    """Return this rank's positions of the summed product, (B, T / size, N)."""
    shards = _split_positions(x, ring)
    total = x.new_empty(shards.shape[1], len(weight))
    reduce_products(lambda place: shards[place] @ weight.t(), total, ring)
    return total.view(len(x), -1, len(weight))


def _differentiate_scattered(
    gradient: Tensor, x: Tensor, weight: Tensor, ring: MatmulRing, needs_grad: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return gradients of x (B, T, K) and of the weight, None where none is needed. needs_grad: of x, of the weight."""
    blocks, shards = _make_shard_buffer(gradient, ring), _split_positions(x, ring)
    gradient_blocks = torch.empty_like(shards) if needs_grad[0] else None
    dtype = torch.promote_types(weight.dtype, torch.float32)  # adding up a product of every chunk rounds each time
    weight_gradient = torch.zeros_like(weight, dtype=dtype) if needs_grad[1] else None
    for place in circulate_shards(blocks, ring):
        if gradient_blocks is not None:
            torch.mm(blocks[place], weight, out=gradient_blocks[place])
        if weight_gradient is not None:
            _add_product(weight_gradient, blocks[place].t(), shards[place])
    x_gradient = None if gradient_blocks is None else _join_positions(gradient_blocks, len(gradient))
    return x_gradient, None if weight_gradient is None else weight_gradient.to(weight.dtype)


# The same functions as single operators, because a compiled graph cannot contain messages between ranks. Eager code
# uses the autograd functions above, so that tools that record operators see each product and message.


@torch.library.custom_op("hpc_train::gather_matmul", mutates_args=())
def _compiled_gather_matmul(x: Tensor, weights: list[Tensor], group: str, chunk_bytes: int) -> list[Tensor]:
    return _multiply_gathered(x, weights, MatmulRing(find_group(group), chunk_bytes))


@_compiled_gather_matmul.register_fake
def _(x: Tensor, weights: list[Tensor], group: str, chunk_bytes: int) -> list[Tensor]:
    ranks, (batch, positions, features) = find_group(group).size(), x.shape
    shards = x.new_empty(ranks, batch * positions, features)
    return [shards, *(x.new_empty(batch, positions * ranks, len(weight)) for weight in weights)]


@torch.library.custom_op("hpc_train::gather_matmul_backward", mutates_args=())
def _compiled_differentiate_gathered(
    gradients: list[Tensor], shards: Tensor, weights: list[Tensor], needs_grad: list[bool], group: str, chunk_bytes: int
) -> list[Tensor]:
    """Return the gradients; an empty tensor in place of one that is not needed."""
    all_gradients = _differentiate_gathered(
        gradients, shards, weights, MatmulRing(find_group(group), chunk_bytes), needs_grad
    )
    return [shards.new_empty(0) if gradient is None else gradient for gradient in all_gradients]


@_compiled_differentiate_gathered.register_fake
def _(
    gradients: list[Tensor], shards: Tensor, weights: list[Tensor], needs_grad: list[bool], group: str, chunk_bytes: int
) -> list[Tensor]:
    shapes = [shards.shape[1:], *(weight.shape for weight in weights)]
    return [shards.new_empty(shape if is_needed else 0) for shape, is_needed in zip(shapes, needs_grad, strict=True)]


def _save_gathered(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, ctx.group, ctx.chunk_bytes = inputs
    ctx.shape = x.shape
    ctx.save_for_backward(output[0], *weights)


def _backward_gathered(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
    shards, *weights = ctx.saved_tensors
    x_needs_grad, weights_need_grad, *_ = ctx.needs_input_grad
    needs_grad = [x_needs_grad, *weights_need_grad]
    all_gradients = _compiled_differentiate_gathered(
        gradients[1:], shards, weights, needs_grad, ctx.group, ctx.chunk_bytes
    )
    total, *weight_gradients = [
        gradient if is_needed else None for gradient, is_needed in zip(all_gradients, needs_grad, strict=True)
    ]
    return None if total is None else total.view(ctx.shape), weight_gradients, None, None


_compiled_gather_matmul.register_autograd(_backward_gathered, setup_context=_save_gathered)


@torch.library.custom_op("hpc_train::matmul_scatter", mutates_args=())
def _compiled_matmul_scatter(x: Tensor, weight: Tensor, group: str, chunk_bytes: int) -> Tensor:
    return _scatter_product(x, weight, MatmulRing(find_group(group), chunk_bytes))


@_compiled_matmul_scatter.register_fake
def _(x: Tensor, weight: Tensor, group: str, chunk_bytes: int) -> Tensor:
    return x.new_empty(len(x), x.shape[1] // find_group(group).size(), len(weight))


@torch.library.custom_op("hpc_train::matmul_scatter_backward", mutates_args=())
def _compiled_differentiate_scattered(
    gradient: Tensor, x: Tensor, weight: Tensor, needs_grad: list[bool], group: str, chunk_bytes: int
) -> list[Tensor]:
    """Return the gradients; an empty tensor in place of one that is not needed."""
    ring = MatmulRing(find_group(group), chunk_bytes)
    gradients = _differentiate_scattered(gradient, x, weight, ring, needs_grad)
    return [x.new_empty(0) if grad is None else grad for grad in gradients]


@_compiled_differentiate_scattered.register_fake
def _(
    gradient: Tensor, x: Tensor, weight: Tensor, needs_grad: list[bool], group: str, chunk_bytes: int
) -> list[Tensor]:
    return [
        x.new_empty(like.shape if is_needed else 0) for like, is_needed in zip((x, weight), needs_grad, strict=True)
    ]


def _save_scattered(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.group, ctx.chunk_bytes = inputs
    ctx.save_for_backward(x, weight)


def _backward_scattered(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    needs_grad = list(ctx.needs_input_grad[:2])
    gradients = _compiled_differentiate_scattered(gradient, *ctx.saved_tensors, needs_grad, ctx.group, ctx.chunk_bytes)
    return (*(grad if is_needed else None for grad, is_needed in zip(gradients, needs_grad, strict=True)), None, None)


_compiled_matmul_scatter.register_autograd(_backward_scattered, setup_context=_save_scattered)


def _make_shard_buffer(local_shard: Tensor, ring: MatmulRing) -> Tensor:
    """Make an empty (size, B * T / size, K) with `local_shard` (B, T / size, K) as this rank's shard."""
    shards = local_shard.new_empty(ring.size, local_shard.shape[0] * local_shard.shape[1], local_shard.shape[2])
    shards[ring.rank] = local_shard.flatten(0, 1)
    return shards


def _split_positions(full: Tensor, ring: MatmulRing) -> Tensor:
    """Split (B, T, N) by positions into contiguous shards (size, B * T / size, N)."""
    batch, positions, features = full.shape
    shards = full.reshape(batch, ring.size, positions // ring.size, features)
    return shards.transpose(0, 1).flatten(1, 2).contiguous()


def _join_positions(shards: Tensor, batch: int) -> Tensor:
    """Join shards into (B, T, N); the inverse of _split_positions."""
    size, rows, features = shards.shape
    return shards.view(size, batch, rows // batch, features).transpose(0, 1).flatten(1, 2)


def _sum_contributions(blocks: Sequence[Tensor], weights: Sequence[Tensor], place: ShardPlace) -> Tensor:
    """Sum what the outputs' gradients contribute to the input's at one place, over all weights."""
    first, *further = zip(blocks, weights, strict=True)
    total = first[0][place] @ first[1]
    for block, weight in further:
        total.addmm_(block[place], weight)
    return total


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
