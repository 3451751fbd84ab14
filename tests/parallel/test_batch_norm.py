"""parallel.sync_batchnorm: BatchNorm over all ranks is that of one process on the whole batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from drawn import draw
from outcome import Arrays, Held, assert_close, gradients, held, whole
from plain_setup import HSDP, LAYOUTS, Layout
from torch import Tensor, nn

from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import Engine, MicroBatch, StepBatch, World
from hpc_train.parallel.apply import build
from hpc_train.parallel.rules.check import check_support
from hpc_train.testing import RankFailure, run_ranks
from hpc_train.training.optimizer import make_optimizer

SYNC = "parallel.sync_batchnorm=true"
OPTIM = ("optim.max_norm=0.5", "optim.eps=1e-6")
ROWS = 12
STEPS = 3
TOLERANCE = 1e-10
RANKS = {
    "ddp": Layout(2, ("parallel=ddp",)),
    "ddp-uneven": Layout(3, ("parallel=ddp",)),
    "zero3": Layout(2, ("parallel=fsdp",)),
    "hsdp": Layout(4, HSDP),
}
SHARES = {"ddp-uneven": (7, 5, 0)}
"""Rows of each rank, where they are not the same; a rank may have none."""


class Vision(nn.Module):
    """A small convolutional network: BatchNorm2d, one without parameters, and BatchNorm1d with a cumulative average."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 3, bias=False)
        self.first = nn.BatchNorm2d(4)
        self.second = nn.BatchNorm2d(4, affine=False, momentum=0.3)
        self.hidden = nn.Linear(4 * 9, 6)
        self.third = nn.BatchNorm1d(6, momentum=None, track_running_stats=True)
        self.out = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, 2, 5, 5) -> logits (B, 5)."""
        x = self.second(torch.tanh(self.first(self.convolution(x))))
        out: Tensor = self.out(torch.tanh(self.third(self.hidden(x.flatten(1)))))
        return out


def _network() -> Vision:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        network = Vision()
        nn.init.uniform_(network.first.weight)
        nn.init.uniform_(network.first.bias)
        return network


def _batch(step: int) -> MicroBatch:
    """The rows differ much from one another: statistics of a part of them are others."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 2, 5, 5, generator=generator, dtype=torch.float64)
    offset = torch.linspace(-2, 3, ROWS, dtype=torch.float64).view(-1, 1, 1, 1)
    return MicroBatch(x * (1 + offset.abs()) + offset, torch.randint(5, (ROWS,), generator=generator))


def _mine(step: int, world: World, shares: tuple[int, ...] | None) -> StepBatch:
    sizes = list(shares or (ROWS // world.dp_size,) * world.dp_size)
    return StepBatch([MicroBatch(*(tensor.split(sizes)[world.dp_index] for tensor in _batch(step)))])


@dataclass
class Seen:
    """What one rank, or one process alone, saw."""

    losses: list[float]
    gradients: list[list[Held]]
    state: list[Held]
    evaluated: float


def _engine(world: World, config: RunConfig) -> Engine:
    return build(_network(), lambda split: make_optimizer(split, config.optim), config, world)


def _train(world: World, config: RunConfig, shares: tuple[int, ...] | None) -> Seen:
    engine, seen = _engine(world, config), Seen([], [], [], 0.0)
    for step in range(STEPS):
        sums = engine.forward_backward(_mine(step, world, shares))
        seen.losses.append(float(sums.loss) / sums.tokens)
        seen.gradients.append(gradients(engine.parts[0]))
        engine.clip(config.optim.max_norm)
        engine.update(1e-2)
    seen.evaluated = float(engine.evaluate(_mine(STEPS, world, shares)).loss) / ROWS
    seen.state = held(engine.shards())
    return seen


def _truth(config: RunConfig) -> Seen:
    """torch's own BatchNorm in one process."""
    network, seen = _network().double(), Seen([], [], [], 0.0)
    optimizer = make_optimizer(network, config.optim)
    assert config.optim.max_norm is not None
    for step in range(STEPS):
        loss = F.cross_entropy(network(_batch(step).inputs), _batch(step).targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        seen.losses.append(loss.item())
        seen.gradients.append(gradients(network))
        nn.utils.clip_grad_norm_(network.parameters(), config.optim.max_norm)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2
        optimizer.step()
    network.eval()
    last = _batch(STEPS)
    seen.evaluated = F.cross_entropy(network(last.inputs), last.targets).item()
    tensors = network.state_dict()
    seen.state = [Held(n, tuple(t.shape), (0,) * t.ndim, t.double().cpu().numpy(), 0) for n, t in tensors.items()]
    return seen


def _parameters_and_buffers(ranks: list[list[Held]]) -> Arrays:
    return {name: array for name, array in whole(ranks).items() if not name.startswith("optim.")}


@pytest.mark.parametrize("name", RANKS)
def test_it_is_one_process_on_the_whole_batch(name: str) -> None:
    layout = RANKS[name]
    config = layout.config(*OPTIM, SYNC)
    ranks = run_ranks(_train, layout.ranks, config, SHARES.get(name), parallel=config.parallel)
    truth = _truth(config)
    for rank in ranks:
        np.testing.assert_allclose(rank.losses, truth.losses, rtol=TOLERANCE)
        np.testing.assert_allclose(rank.evaluated, truth.evaluated, rtol=TOLERANCE)
    for step in range(STEPS):
        assert_close(whole([rank.gradients[step] for rank in ranks]), whole([truth.gradients[step]]), TOLERANCE)
    state = _parameters_and_buffers([rank.state for rank in ranks])
    assert {"first.running_mean", "first.num_batches_tracked", "third.running_var"} <= state.keys()
    assert_close(state, whole([truth.state]), TOLERANCE)


def test_without_it_each_rank_has_statistics_of_its_own() -> None:
    config = RANKS["ddp"].config(*OPTIM)
    losses = [rank.losses[0] for rank in run_ranks(_train, 2, config, None, parallel=config.parallel)]
    assert abs(losses[0] / _truth(config).losses[0] - 1) > 1e-3


def _one_loss(world: World, config: RunConfig) -> tuple[float, str]:
    engine = _engine(world, config)
    sums = engine.forward_backward(_mine(0, world, None))
    return float(sums.loss) / sums.tokens, str(next(p.dtype for p in engine.parts[0].parameters()))


@pytest.mark.parametrize("name", ["ddp", "zero3"])
def test_bf16_stays_within_its_rounding(name: str) -> None:
    config = RANKS[name].config(SYNC, "precision=bf16")
    for loss, dtype in run_ranks(_one_loss, 2, config, parallel=config.parallel):
        assert loss == pytest.approx(_truth(RANKS[name].config(*OPTIM)).losses[0], rel=2**-6)
        assert dtype == "torch.float32"


def test_a_model_without_such_a_layer_is_refused_in_a_line() -> None:
    config = RANKS["ddp"].config(SYNC)

    def bare(world: World) -> None:
        build(nn.Linear(2, 2), lambda split: make_optimizer(split, config.optim), config, world)

    with pytest.raises(RankFailure, match="sync_batchnorm=true: the model has no BatchNorm layer; leave it out"):
        run_ranks(bare, 2, parallel=config.parallel)


@pytest.mark.parametrize(
    ("world", "overrides", "said"),
    [(1, (), "has no effect on one rank"), (4, ("parallel.tp=2",), r"not with parallel\.[a-z]+=2")],
)
def test_where_it_has_no_place_is_said_in_a_line(world: int, overrides: tuple[str, ...], said: str) -> None:
    config = LAYOUTS["ddp-2"].config(SYNC, *overrides)
    with pytest.raises(UserError, match=said):
        check_support(config, world)


# Without BatchNorm synchronisation.


def _said(world: World, config: RunConfig) -> dict[str, list[str]]:
    frozen = _network()
    frozen.second.eval()
    frozen.third.eval()
    kinds = {"all": _network(), "one": frozen, "none": _network().eval(), "other": nn.Linear(2, 5)}
    found = {}
    for kind, network in kinds.items():
        lines: list[str] = []
        build(network, lambda split: make_optimizer(split, config.optim), config, world, lines.append)
        found[kind] = [line for line in lines if "warning" in line]
    return found


@pytest.mark.parametrize("kind", draw(["ddp", "zero3", "hsdp"], ["ddp", "zero3"]))
def test_statistics_of_ranks_own_batches_are_said(kind: str) -> None:
    config = RANKS[kind].config(*OPTIM)
    for said in run_ranks(_said, RANKS[kind].ranks, config, parallel=config.parallel):
        assert said["none"] == said["other"] == []
        assert len(said["all"]) == len(said["one"]) == 1
        assert said["all"][0].startswith("warning: first and 2 more: statistics are of each rank's own micro-batch")
        assert "parallel.sync_batchnorm=true" in said["all"][0]
        assert said["one"][0].startswith("warning: first: statistics")


def test_on_one_rank_or_with_it_nothing_is_said() -> None:
    alone, together = Layout(1, ("parallel=ddp",)).config(*OPTIM), RANKS["ddp"].config(SYNC, *OPTIM)
    assert run_ranks(_said, 1, alone, parallel=alone.parallel)[0]["all"] == []
    assert all(not said for said in run_ranks(_quiet, 2, together, parallel=together.parallel))


def _quiet(world: World, config: RunConfig) -> list[str]:
    lines: list[str] = []
    build(_network(), lambda split: make_optimizer(split, config.optim), config, world, lines.append)
    return [line for line in lines if "warning" in line]
