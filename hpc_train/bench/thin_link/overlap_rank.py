"""Run one rank of `bench overlap` in its own network namespace: connect to the other rank over the link and measure.

The sides compute one pair of layers, column-parallel then row-parallel, in several ways.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hpc_train.bench.rounds import Side, time_rounds, warm_up_side
from hpc_train.bench.thin_link.link import MEASURED_FILE, RANKS, configure_link, count_sent_bytes, limit_rate
from hpc_train.bench.thin_link.overlap import OverlapMeasurement, OverlapOptions
from hpc_train.errors import EXIT_DONE, EXIT_USER_ERROR, UserError
from hpc_train.parallel.tensor.layers import TensorAxis, make_column_products, make_row_product
from hpc_train.parallel.tensor.ring_exchange import MatmulRing, circulate_shards, reduce_products

Steps = Iterator[float]


@dataclass(frozen=True)
class LayerPair:
    """This rank's part of two layers and their input: out = (x up^T) down^T, with x and out split by positions."""

    axis: TensorAxis
    x: Tensor
    """(1, T / ranks, hidden)"""
    up: Tensor
    """(feed_forward / ranks, hidden)"""
    down: Tensor
    """(hidden, feed_forward / ranks)"""

    @property
    def ring(self) -> MatmulRing:
        """The ring of the asynchronous side."""
        return MatmulRing(self.axis.group)

    @property
    def link_bytes(self) -> int:
        """Payload bytes that a rank sends in a step: a gather and a scatter forward, and the same backward."""
        return 4 * (self.axis.size - 1) * self.x.nbytes


def make_layer_pair(mesh: DeviceMesh, tokens: int, hidden: int, feed_forward: int) -> LayerPair:
    """Make float32 parameters and input, different on each rank."""
    torch.manual_seed(mesh.get_local_rank())
    ranks = mesh.size()
    sizes = (1, tokens // ranks, hidden), (feed_forward // ranks, hidden), (hidden, feed_forward // ranks)
    x, up, down = (torch.randn(size).div_(size[-1] ** 0.5).requires_grad_() for size in sizes)
    return LayerPair(TensorAxis(mesh, sequence=True), x, up, down)


def train_synchronously(pair: LayerPair) -> Steps:
    """Train with all-gather, products and reduce-scatter one after the other."""
    return _run_training(lambda: _make_layers(pair, asynchronous=False), pair)


def train_asynchronously(pair: LayerPair) -> Steps:
    """Train with products that overlap the transfer of other chunks."""
    return _run_training(lambda: _make_layers(pair, asynchronous=True), pair)


def compute_alone(pair: LayerPair) -> Steps:
    """Train with the same products and copies but no communication; the numbers differ from the other sides'."""
    return _run_training(lambda: _without_peers(pair), pair)


def collectives_alone(pair: LayerPair) -> Steps:
    """Run the collectives of the synchronous side without compute."""
    part = pair.x.detach().repeat(1, pair.axis.size, 1)
    while True:
        for _ in range(2):
            pair.axis.gather(pair.x.detach())
            pair.axis.scatter(part)
        yield 0.0


def ring_alone(pair: LayerPair) -> Steps:
    """Run the ring transfers of the asynchronous side without compute."""
    shards = pair.x.detach().repeat(pair.axis.size, 1, 1)
    total = torch.empty_like(shards[0])
    while True:
        for _ in range(2):
            for _ in circulate_shards(shards, pair.ring):
                pass
            reduce_products(lambda place: shards[place].clone(), total, pair.ring)
        yield 0.0


def _run_training(forward: Callable[[], Tensor], pair: LayerPair) -> Steps:
    """Run forward and backward; yields a number that depends on the output and on every gradient."""
    leaves = (pair.x, pair.up, pair.down)
    while True:
        out = forward()
        out.backward(out.detach())  # type: ignore[no-untyped-call]
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        assert len(gradients) == len(leaves)
        number = float(sum(tensor[..., :8].detach().abs().sum() for tensor in (out, *gradients)))
        for leaf in leaves:
            leaf.grad = None
        yield number


def _make_layers(pair: LayerPair, asynchronous: bool) -> Tensor:
    """Compute both layers as tensor parallelism does."""
    (inner,) = make_column_products(pair.axis, asynchronous)(pair.x, [pair.up])
    return make_row_product(pair.axis, asynchronous)(inner, pair.down)


def _without_peers(pair: LayerPair) -> Tensor:
    full = pair.x.repeat(1, pair.axis.size, 1)
    return F.linear(F.linear(full, pair.up), pair.down).chunk(pair.axis.size, 1)[0]


_CALIBRATION_STEPS = 9
"""Steps of compute alone whose median sets the rate of the link."""
_LOSS_TOLERANCE = 1e-4
"""Maximum relative difference of two float32 sums in different order."""
_COUNTED_STEPS = 2
"""Steps over which bytes are counted."""


def main(rank: int, options: OverlapOptions, folder: Path) -> int:
    """Wait for a line on stdin, which tells that the link is up; then measure, and write the result to `folder`."""
    sys.stdin.readline()
    try:
        configure_link(rank)
        torch.set_num_threads(options.threads)
        store = dist.FileStore(str(folder / "store"), RANKS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        measured = measure_overlap(options)
    except UserError as error:
        if rank == 0:  # the other rank has the same error
            print(f"hpc-train: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    if rank == 0:
        (folder / MEASURED_FILE).write_text(json.dumps(asdict(measured)))
    dist.destroy_process_group()
    return EXIT_DONE


def measure_overlap(options: OverlapOptions) -> OverlapMeasurement:
    """Measure seconds and bytes of every side, after setting the link rate."""
    pair = make_layer_pair(init_device_mesh("cpu", (RANKS,)), options.tokens, options.hidden, options.feed_forward)
    compute = warm_up_side("compute_alone", lambda: compute_alone(pair))
    rate = options.rate or _link_rate(pair, compute, options.ratio)
    dist.barrier()
    limit_rate(rate)
    plain = warm_up_side("synchronous", lambda: train_synchronously(pair))
    overlapping = warm_up_side("asynchronous", lambda: train_asynchronously(pair))
    assert abs(plain.first_loss - overlapping.first_loss) <= _LOSS_TOLERANCE * plain.first_loss, "the two ways differ"
    sent = {side.name: _measure_bytes_per_step(side) for side in (plain, overlapping)}
    collectives = warm_up_side("collectives_alone", lambda: collectives_alone(pair))
    ring = warm_up_side("ring_alone", lambda: ring_alone(pair))
    sides = [compute, plain, overlapping, collectives, ring]
    wall = time_rounds(sides, options.rounds, options.steps).wall
    seconds = {side.name: wall[:, index].tolist() for index, side in enumerate(sides)}
    return OverlapMeasurement(rate, pair.link_bytes, sent, seconds)


def _link_rate(pair: LayerPair, compute: Side, ratio: float) -> float:
    """Return the rate in Mbit/s at which a step communicates `ratio` times as long as it computes."""
    seconds = time_rounds([compute], _CALIBRATION_STEPS, 1).wall
    return pair.link_bytes * 8e-6 / (ratio * float(np.median(seconds)))


def _measure_bytes_per_step(side: Side) -> int:
    """Measure the bytes that a step of this rank sends over the link."""
    dist.barrier()
    before = count_sent_bytes()
    for _ in range(_COUNTED_STEPS):
        next(side.steps)
    return (count_sent_bytes() - before) // _COUNTED_STEPS


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), OverlapOptions(**json.loads(sys.argv[2])), Path(sys.argv[3])))
