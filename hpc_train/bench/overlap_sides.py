"""What `bench overlap` compares: one pair of layers, column-parallel then row-parallel, in several ways.

Each way is an iterator over steps, forward and backward of the pair, that gives a number all correct ways agree on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hpc_train.parallel.tensor.axis import Axis
from hpc_train.parallel.tensor.layers import column_products, row_product
from hpc_train.parallel.tensor.ring_matmul import Ring, circulate, reduce

Steps = Iterator[float]


@dataclass(frozen=True)
class Pair:
    """This rank's part of the layers and of their input; out = (x up^T) down^T, positions split before and after."""

    axis: Axis
    x: Tensor
    """(1, T / ranks, hidden)"""
    up: Tensor
    """(feed_forward / ranks, hidden)"""
    down: Tensor
    """(hidden, feed_forward / ranks)"""

    @property
    def ring(self) -> Ring:
        """The way round of the asynchronous side."""
        return Ring(self.axis.group)

    @property
    def link_bytes(self) -> int:
        """What a rank has to send in a step: a gather and a scatter forward, and the same backward."""
        return 4 * (self.axis.size - 1) * self.x.nbytes


def make_pair(mesh: DeviceMesh, tokens: int, hidden: int, feed_forward: int) -> Pair:
    """In float32; the ranks hold different values."""
    torch.manual_seed(mesh.get_local_rank())
    ranks = mesh.size()
    sizes = (1, tokens // ranks, hidden), (feed_forward // ranks, hidden), (hidden, feed_forward // ranks)
    x, up, down = (torch.randn(size).div_(size[-1] ** 0.5).requires_grad_() for size in sizes)
    return Pair(Axis(mesh, sequence=True), x, up, down)


def synchronous(pair: Pair) -> Steps:
    """All-gather, products, reduce-scatter, each when the one before it is done: the plain plan."""
    return _training(lambda: _pair_of_layers(pair, asynchronous=False), pair)


def asynchronous(pair: Pair) -> Steps:
    """Chunks multiplied while others travel."""
    return _training(lambda: _pair_of_layers(pair, asynchronous=True), pair)


def compute_alone(pair: Pair) -> Steps:
    """The same products and copies with what this rank has; nothing travels, so its numbers are not the others'."""
    return _training(lambda: _without_peers(pair), pair)


def collectives_alone(pair: Pair) -> Steps:
    """What the synchronous side sends, with nothing to compute."""
    part = pair.x.detach().repeat(1, pair.axis.size, 1)
    while True:
        for _ in range(2):
            pair.axis.gather(pair.x.detach())
            pair.axis.scatter(part)
        yield 0.0


def ring_alone(pair: Pair) -> Steps:
    """What the asynchronous side sends, with nothing to compute."""
    shards = pair.x.detach().repeat(pair.axis.size, 1, 1)
    total = torch.empty_like(shards[0])
    while True:
        for _ in range(2):
            for _ in circulate(shards, pair.ring):
                pass
            reduce(lambda place: shards[place].clone(), total, pair.ring)
        yield 0.0


def _training(forward: Callable[[], Tensor], pair: Pair) -> Steps:
    """Forward and backward; the number is made of the output and of every gradient."""
    leaves = (pair.x, pair.up, pair.down)
    while True:
        out = forward()
        out.backward(out.detach())  # type: ignore[no-untyped-call]
        found = [leaf.grad for leaf in leaves if leaf.grad is not None]
        assert len(found) == len(leaves)
        number = float(sum(tensor[..., :8].detach().abs().sum() for tensor in (out, *found)))
        for leaf in leaves:
            leaf.grad = None
        yield number


def _pair_of_layers(pair: Pair, asynchronous: bool) -> Tensor:
    """As the tensor pass makes them."""
    (inner,) = column_products(pair.axis, asynchronous)(pair.x, [pair.up])
    return row_product(pair.axis, asynchronous)(inner, pair.down)


def _without_peers(pair: Pair) -> Tensor:
    whole = pair.x.repeat(1, pair.axis.size, 1)
    return F.linear(F.linear(whole, pair.up), pair.down).chunk(pair.axis.size, 1)[0]
