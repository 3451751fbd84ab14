"""One rank of `bench overlap`, in its own network namespace: joins the other over the link and measures."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hpc_train.bench import overlap_sides
from hpc_train.bench.link import bring_up, limit, sent_bytes
from hpc_train.bench.overlap import MEASURED, RANKS, Measured, Options
from hpc_train.bench.overlap_sides import Pair, Steps, make_pair
from hpc_train.bench.rounds import Side, begin, take_rounds
from hpc_train.errors import EXIT_DONE, EXIT_USER_ERROR, UserError

_CALIBRATING = 9
"""Steps of the compute alone whose median sets the rate of the link."""
_AGREE = 1e-4
"""Relative difference of float32 sums in another order."""
_COUNTING = 2
"""Steps over which bytes are counted."""


def main(rank: int, options: Options, folder: Path) -> int:
    """Measure and leave the result in `folder`. Waits first for a line on stdin that says that the link is there."""
    sys.stdin.readline()
    try:
        bring_up(rank)
        torch.set_num_threads(options.threads)
        store = dist.FileStore(str(folder / "store"), RANKS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        measured = measure(options)
    except UserError as error:
        if rank == 0:  # the other has the same to say
            print(f"hpc-train: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    if rank == 0:
        (folder / MEASURED).write_text(json.dumps(asdict(measured)))
    dist.destroy_process_group()
    return EXIT_DONE


def measure(options: Options) -> Measured:
    """Seconds and bytes of every side, with the link at the rate that makes communication comparable to compute."""
    pair = make_pair(init_device_mesh("cpu", (RANKS,)), options.tokens, options.hidden, options.feed_forward)
    compute = _side(pair, overlap_sides.compute_alone)
    rate = options.rate or _rate(pair, compute, options.ratio)
    dist.barrier()
    limit(rate)
    plain, overlapping = (_side(pair, way) for way in (overlap_sides.synchronous, overlap_sides.asynchronous))
    assert abs(plain.first_loss - overlapping.first_loss) <= _AGREE * plain.first_loss, "the two ways differ"
    sent = {side.name: _sent(side) for side in (plain, overlapping)}
    alone = [_side(pair, way) for way in (overlap_sides.collectives_alone, overlap_sides.ring_alone)]
    sides = [compute, plain, overlapping, *alone]
    wall = take_rounds(sides, options.rounds, options.steps).wall
    seconds = {side.name: wall[:, index].tolist() for index, side in enumerate(sides)}
    return Measured(rate, pair.link_bytes, sent, seconds)


def _side(pair: Pair, way: Callable[[Pair], Steps]) -> Side:
    return begin(way.__name__, lambda: way(pair))


def _rate(pair: Pair, compute: Side, ratio: float) -> float:
    """Mbit/s at which a step's bytes take `ratio` times its compute; the same on every rank."""
    seconds = take_rounds([compute], _CALIBRATING, 1).wall
    return pair.link_bytes * 8e-6 / (ratio * float(np.median(seconds)))


def _sent(side: Side) -> int:
    """Bytes that a step of this rank puts on the link."""
    dist.barrier()
    before = sent_bytes()
    for _ in range(_COUNTING):
        next(side.steps)
    return (sent_bytes() - before) // _COUNTING


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Options(**json.loads(sys.argv[2])), Path(sys.argv[3])))
