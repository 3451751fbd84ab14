"""engine.shards(): rectangles that tile every logical tensor, with the work of writing them shared out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from outcome import Held, held
from plain_setup import LAYOUTS, Layout, engine_of
from torch import Tensor, nn

from hpc_train.config.run import RunConfig
from hpc_train.interfaces import World
from hpc_train.parallel.apply import build
from hpc_train.testing import run_ranks
from hpc_train.training.optimizer import make_optimizer

Shape = tuple[int, ...]

SHAPES = st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple), min_size=1, max_size=8)
SEVERAL = ("ddp-2", "ddp-4", "zero3-2", "zero3-3", "zero3-4", "hsdp-2x2")


class Shapes(nn.Module):
    """Parameters of any shapes, each used once."""

    def __init__(self, shapes: list[Shape]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.rand(shape) for shape in shapes])

    def forward(self, x: Tensor) -> Tensor:
        """A sum over all."""
        return x + sum(weight.sum() for weight in self.weights)


def _pieces(world: World, config: RunConfig, shapes: list[Shape]) -> list[Held]:
    torch.manual_seed(0)
    engine = build(Shapes(shapes), lambda split: make_optimizer(split, config.optim), config, world)
    return held(engine.shards())


def _holders(ranks: list[list[Held]], name: str) -> dict[tuple[Shape, Shape], list[int]]:
    """Replica numbers of each distinct rectangle of a tensor."""
    found: dict[tuple[Shape, Shape], list[int]] = {}
    for piece in (piece for rank in ranks for piece in rank if piece.name == name):
        found.setdefault((piece.offset, piece.local.shape), []).append(piece.replica)
    return found


@settings(max_examples=4)
@given(name=st.sampled_from(SEVERAL), shapes=SHAPES)
def test_the_rectangles_that_are_written_tile_every_tensor_once(name: str, shapes: list[Shape]) -> None:
    config = LAYOUTS[name].config()
    ranks = run_ranks(_pieces, LAYOUTS[name].ranks, config, shapes, parallel=config.parallel)
    assert len({tuple(piece.name for piece in rank) for rank in ranks}) == 1, "the same order on every rank"
    whole_shapes = {piece.name: piece.shape for piece in ranks[0]}
    assert {whole_shapes[f"weights.{index}"] for index in range(len(shapes))} == set(shapes)
    for tensor, shape in whole_shapes.items():
        covered = torch.zeros(shape, dtype=torch.int64)
        for (offset, size), replicas in _holders(ranks, tensor).items():
            if 0 not in size:
                assert sorted(replicas) == list(range(len(replicas))), f"{tensor}: replicas of one rectangle"
            covered[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))] += 1
        assert (covered == 1).all(), f"{tensor}: {covered}"


def _written(world: World, config: RunConfig) -> int:
    pieces = engine_of("untied", config, world).shards()
    return sum(piece.local.nbytes for piece in pieces if piece.replica == 0)


@pytest.mark.parametrize("layout", [Layout(3, ("parallel=ddp",)), LAYOUTS["zero3-4"], LAYOUTS["hsdp-2x2"]], ids=str)
def test_copies_are_written_by_all_of_their_holders(layout: Layout) -> None:
    config = layout.config()
    written = run_ranks(_written, layout.ranks, config, parallel=config.parallel)
    assert max(written) < 1.2 * sum(written) / len(written), written
