"""The gradient of part of a batch that the noise scale is measured from, against norms computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from drawn import draw
from outcome import Held, gradients, whole
from plain_setup import LAYOUTS, SEQUENCES, engine_of
from torch import Tensor, nn

from hpc_train.config.run import RunConfig
from hpc_train.interfaces import MicroBatch, StepBatch, World
from hpc_train.parallel.apply import build
from hpc_train.testing import run_ranks
from hpc_train.training.optimizer import make_optimizer

INPUTS = 5


class Regression(nn.Module):
    """Linear regression with a summed squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, INPUTS))

    def forward(self, x: Tensor) -> Tensor:
        """x (B, INPUTS) -> (B,)."""
        return x @ self.weight

    def loss_sum(self, out: Tensor, target: Tensor) -> Tensor:
        """Half the squared error, summed."""
        return 0.5 * (out - target).square().sum()


def _data() -> MicroBatch:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SEQUENCES, INPUTS, generator=generator, dtype=torch.float64)
    return MicroBatch(x, torch.randn(SEQUENCES, generator=generator, dtype=torch.float64))


def _square_of_mean_gradient(rows: slice) -> float:
    """By hand: the gradient of one sample is (w . x - y) x."""
    x, y = (tensor[rows].numpy() for tensor in _data())
    gradient = ((x @ np.linspace(-1, 1, INPUTS, dtype=np.float32).astype(np.float64) - y)[:, None] * x).mean(axis=0)
    return float(gradient @ gradient)


def _sample(world: World, config: RunConfig, micro: int) -> tuple[float, int] | None:
    engine = build(Regression(), lambda split: make_optimizer(split, config.optim), config, world)
    rows = SEQUENCES // world.dp_size
    mine = [tensor[world.dp_index * rows :][:rows].split(rows // micro) for tensor in _data()]
    sums = engine.forward_backward(StepBatch([MicroBatch(*pair) for pair in zip(*mine, strict=True)], measure=True))
    return (float(sums.sample.norm_square), sums.sample.sequences) if sums.sample else None


def _measured(name: str, micro: int) -> tuple[float, int] | None:
    config = LAYOUTS[name].config()
    samples = run_ranks(_sample, LAYOUTS[name].ranks, config, micro, parallel=config.parallel)
    assert all(sample == samples[0] for sample in samples), "the same on every rank"
    return samples[0]


def _firsts(ranks: int, micro: int) -> list[slice]:
    """Rows of every rank's first micro-batch."""
    rows = SEQUENCES // ranks
    return [slice(rank * rows, rank * rows + rows // micro) for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "micro"), [(2, 1), (4, 1), (1, 2), (2, 3), (4, 2)])
def test_ddp_sees_each_ranks_own_gradient_or_that_of_its_first_micro_batch(ranks: int, micro: int) -> None:
    measured = _measured(f"ddp-{ranks}", micro)
    by_hand = np.mean([_square_of_mean_gradient(rows) for rows in _firsts(ranks, micro)])
    assert measured is not None
    assert measured[0] == pytest.approx(by_hand, rel=1e-12)
    assert measured[1] == SEQUENCES // ranks // micro


@pytest.mark.parametrize("name", draw(["zero3-2", "zero3-4", "hsdp-2x2"], ["zero3-4"]))
def test_zero3_sees_the_first_micro_batch_of_all_ranks_together(name: str) -> None:
    ranks = LAYOUTS[name].ranks
    x, y = (torch.cat([tensor[rows] for rows in _firsts(ranks, 2)]).numpy() for tensor in _data())
    gradient = ((x @ np.linspace(-1, 1, INPUTS, dtype=np.float32).astype(np.float64) - y)[:, None] * x).mean(axis=0)
    measured = _measured(name, 2)
    assert measured is not None
    assert measured[0] == pytest.approx(float(gradient @ gradient), rel=1e-12)
    assert measured[1] == SEQUENCES // 2


@pytest.mark.parametrize("name", draw(["zero3-2", "hsdp-2x2", "zero3-1", "ddp-1"], ["zero3-2", "zero3-1", "ddp-1"]))
def test_without_a_part_to_see_there_is_no_sample(name: str) -> None:
    assert _measured(name, 1) is None


def _with_and_without(world: World, config: RunConfig, micro: int) -> tuple[list[Held], list[Held]]:
    found = []
    for measure in (False, True):
        engine = engine_of("tied", config, world)
        tokens = torch.randint(29, (SEQUENCES, 7), generator=torch.Generator().manual_seed(world.dp_index))
        parts = tokens.split(SEQUENCES // micro)
        engine.forward_backward(StepBatch([MicroBatch(part, part.roll(1)) for part in parts], measure=measure))
        found.append(gradients(engine.parts[0]))
    return found[0], found[1]


@pytest.mark.parametrize(
    ("name", "tolerance"), [("ddp-1", 0.0), ("ddp-2", 0.0), ("zero3-2", 1e-13), ("hsdp-2x2", 1e-13)]
)
@pytest.mark.parametrize("micro", draw([1, 2], [2]))
def test_measuring_changes_no_gradient(name: str, tolerance: float, micro: int) -> None:
    """Bit for bit with ddp; zero3 reduces in two parts what it else reduces in one, so the order of sums differs."""
    config = LAYOUTS[name].config()
    ranks = run_ranks(_with_and_without, LAYOUTS[name].ranks, config, micro, parallel=config.parallel)
    plain, measured = (whole([rank[index] for rank in ranks]) for index in (0, 1))
    for key, gradient in plain.items():
        assert np.abs(measured[key] - gradient).max() <= tolerance * np.abs(gradient).max(), key
