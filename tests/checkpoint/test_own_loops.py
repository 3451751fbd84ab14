"""Checkpointer in loops of other shapes: several models or optimizers, accumulation, averages, wrapped optimizers.

Each loop makes six steps at once, and three, a save, a load into fresh objects and three more: bit-equal.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hpc_train.checkpoint import Checkpointer
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.testing import run_ranks

STEPS = 6
SAMPLES = torch.linspace(-1, 1, STEPS * 12 * 8, dtype=torch.float64).sin().reshape(STEPS, 12, 8)


class Loop:
    """A training loop with what a checkpoint of it has to hold."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.models: dict[str, nn.Module] = {}
        self.optimizers: Any = []

    def make_step(self, step: int) -> None:
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Return the values that the loop saves through extra=."""
        return {}

    def restore(self, extra: dict[str, Any]) -> None:
        """Take it back."""


class SeveralOptimizers(Loop):
    """A recommender: rows of the table by SparseAdam, two more optimizers, and a schedule of its own for each."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8, sparse=True).double()
        self.body, self.head = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
        self.models = {"table": self.table, "body": self.body, "head": self.head}
        sparse = torch.optim.SparseAdam(list(self.table.parameters()), lr=0.01)
        adam = torch.optim.AdamW(self.body.parameters(), lr=torch.tensor(0.01), amsgrad=True)
        sgd = torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        self.optimizers = [sparse, adam, sgd]
        warm = [lr_scheduler.LinearLR(sgd, total_iters=2), lr_scheduler.CosineAnnealingLR(sgd, 4)]
        self.schedulers = [
            lr_scheduler.StepLR(sparse, 2),
            lr_scheduler.ReduceLROnPlateau(adam, patience=0, threshold=10.0),
            lr_scheduler.SequentialLR(sgd, warm, [2]),
        ]

    def make_step(self, step: int) -> None:
        x = self.head(torch.relu(self.body(self.table(torch.arange(step, step + 12) % 50))))
        loss = (x - SAMPLES[step]).square().mean()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in self.schedulers:
            more = (loss.item(),) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else ()
            scheduler.step(*more)

    def state(self) -> dict[str, Any]:
        return {"schedulers": [scheduler.state_dict() for scheduler in self.schedulers]}

    def restore(self, extra: dict[str, Any]) -> None:
        for scheduler, state in zip(self.schedulers, extra["schedulers"], strict=True):
            scheduler.load_state_dict(state)


class Accumulation(Loop):
    """Three micro-batches a step in float16, whose first steps overflow, and random numbers of three libraries."""

    def __init__(self) -> None:
        super().__init__()
        self.python, self.numpy = random.Random(1), np.random.RandomState(1)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 8))
        self.models = {"model": self.model}
        self.optimizers = [torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)]
        self.scheduler = lr_scheduler.LambdaLR(self.optimizers[0], lambda step: min(1.0, (step + 1) / 3))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
        self.skipped = 0

    def make_step(self, step: int) -> None:
        (optimizer,) = self.optimizers
        for part in SAMPLES[step].float().chunk(3):
            noise = self.python.random() + float(self.numpy.rand())
            with torch.autocast("cpu", torch.float16):
                loss = (self.model(part) - noise).square().mean() / 3
            self.scaler.scale(loss).backward()
        self.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(optimizer)
        before = self.scaler.get_scale()
        self.scaler.update()
        self.skipped += self.scaler.get_scale() < before
        optimizer.zero_grad()
        self.scheduler.step()

    def state(self) -> dict[str, Any]:
        generators: dict[str, Any] = {"torch": torch.get_rng_state(), "python": self.python.getstate()}
        generators["numpy"] = self.numpy.get_state()
        return {"scheduler": self.scheduler.state_dict(), "scaler": self.scaler.state_dict(), **generators}

    def restore(self, extra: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(extra["scheduler"])
        self.scaler.load_state_dict(extra["scaler"])
        torch.set_rng_state(extra["torch"])
        self.python.setstate(extra["python"])
        self.numpy.set_state(extra["numpy"])


class Average(Loop):
    """A moving average of weights and buffers beside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)).double()
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        self.models = {"model": self.model, "average": self.average}
        self.optimizers = torch.optim.RAdam(self.model.parameters(), lr=0.01)

    def make_step(self, step: int) -> None:
        (self.model(SAMPLES[step]) - SAMPLES[step]).square().mean().backward()
        self.optimizers.step()
        self.optimizers.zero_grad()
        self.average.update_parameters(self.model)


class Noam:
    """A schedule around an optimizer, which is no optimizer itself."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0

    def step(self) -> None:
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 * min(self.steps / 3, (3 / self.steps) ** 0.5)
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


class Container(Optimizer):
    """Several optimizers as one, as torchtitan has them."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self.optimizers = optimizers
        super().__init__([p for one in optimizers for group in one.param_groups for p in group["params"]], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()


class SharpnessAware(Optimizer):
    """Keeps weights of its own between two passes, beside the momentum of the optimizer in it."""

    def __init__(self, parameters: Any, base: Callable[..., Optimizer], **options: Any) -> None:
        super().__init__(parameters, options)
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["before"] = p.clone()
        self.base_optimizer.step()


class Wrapped(Loop):
    """One of the optimizers above."""

    def __init__(self, wrap: Callable[[list[nn.Parameter]], Any]) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).double()
        self.models = {"model": self.model}
        self.optimizers = wrap(list(self.model.parameters()))

    def make_step(self, step: int) -> None:
        (self.model(SAMPLES[step]) - SAMPLES[step]).square().mean().backward()
        self.optimizers.step()
        self.optimizers.zero_grad()

    def state(self) -> dict[str, Any]:
        return {"steps": getattr(self.optimizers, "steps", 0)}

    def restore(self, extra: dict[str, Any]) -> None:
        self.optimizers.steps = extra["steps"]


def make_noam(parameters: list[nn.Parameter]) -> Noam:
    return Noam(torch.optim.Adam(parameters, lr=0.0))


def make_container(parameters: list[nn.Parameter]) -> Container:
    return Container(
        [torch.optim.AdamW(parameters[:2], lr=0.01), torch.optim.SGD(parameters[2:], lr=0.01, momentum=0.9)]
    )


def make_sharpness_aware(parameters: list[nn.Parameter]) -> SharpnessAware:
    return SharpnessAware(parameters, torch.optim.SGD, lr=0.05, momentum=0.9)


def run_loop(make: Callable[[], Loop], directory: Path, resumed: bool) -> dict[str, Tensor]:
    """Make all steps and save the last, with a restart from step 3 if `resumed`; returns what that step holds."""
    loop, first = make(), 0
    with Checkpointer(directory) as checkpointer:
        for stop in (3, STEPS) if resumed else (STEPS,):
            for step in range(first, stop):
                loop.make_step(step)
            checkpointer.save(stop, model=loop.models, optimizer=loop.optimizers, extra=loop.state())
            if stop < STEPS:
                loop, first = make(), stop
                loop.restore(checkpointer.load(stop, model=loop.models, optimizer=loop.optimizers))
    return collect(loop) if not isinstance(loop, Zero) else {}


def collect(loop: Loop) -> dict[str, Tensor]:
    """Return the tensors of the models, and the state of torch's own optimizers by their order."""
    found = {f"{name}.{key}": t for name, model in loop.models.items() for key, t in model.state_dict().items()}
    outer = loop.optimizers if isinstance(loop.optimizers, list) else [loop.optimizers]
    inner = [getattr(one, "optimizers", [getattr(one, "optimizer", one)]) for one in outer]
    for number, optimizer in enumerate(one for several in inner for one in several):
        for index, state in optimizer.state_dict()["state"].items():
            found |= {f"{number}.{index}.{key}": torch.as_tensor(value) for key, value in state.items()}
    return found


LOOPS: dict[str, Callable[[], Loop]] = {
    "several optimizers": SeveralOptimizers,
    "accumulation": Accumulation,
    "average": Average,
    "noam": lambda: Wrapped(make_noam),
    "container": lambda: Wrapped(make_container),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_restart_is_bit_equal(name: str, tmp_path: Path) -> None:
    whole = run_loop(LOOPS[name], tmp_path / "whole", resumed=False)
    broken = run_loop(LOOPS[name], tmp_path / "broken", resumed=True)
    assert whole.keys() == broken.keys()
    assert [key for key, tensor in whole.items() if not torch.equal(tensor, broken[key])] == []


def test_overflows_are_part_of_the_loop_with_accumulation() -> None:
    loop = Accumulation()
    for step in range(3):
        loop.make_step(step)
    assert loop.skipped
    assert loop.scaler.get_scale() < 2.0**20


class Zero(Loop):
    """The optimizer state of each parameter on one of the ranks only."""

    def __init__(self) -> None:
        super().__init__()
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).double()
        self.models = {"model": DistributedDataParallel(model)}
        self.optimizers = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
        self.scheduler = lr_scheduler.ExponentialLR(self.optimizers, 0.5)

    def make_step(self, step: int) -> None:
        (self.models["model"](SAMPLES[step]) - SAMPLES[step]).square().mean().backward()
        self.optimizers.step()
        self.optimizers.zero_grad()
        self.scheduler.step()

    def state(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler.state_dict()}

    def restore(self, extra: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(extra["scheduler"])


def _restart_with_zero(_: World, directory: Path) -> list[list[float]]:
    ends = []
    for resumed in (False, True):
        loop = Zero()
        run_loop(Zero, directory / str(resumed), resumed)
        Checkpointer(directory / str(resumed)).load(STEPS, model=loop.models, optimizer=loop.optimizers)
        own = loop.optimizers.optim.state.values()
        tensors = [*loop.models["model"].parameters(), *(t for state in own for t in state.values())]
        ends.append([value for tensor in tensors for value in tensor.detach().ravel().tolist()])
        assert len(own) == 2
    return ends


def test_zero_redundancy_optimizer(tmp_path: Path) -> None:
    for whole, broken in run_ranks(_restart_with_zero, 2, tmp_path):
        assert whole == broken


def test_what_would_be_lost_is_refused(tmp_path: Path) -> None:
    loop = Wrapped(make_sharpness_aware)
    loop.make_step(0)
    scheduler = lr_scheduler.StepLR(loop.optimizers, 2)
    alone = torch.optim.SGD([nn.Parameter(torch.zeros(()))])
    with Checkpointer(tmp_path) as checkpointer:
        for given, why in (
            (loop.optimizers, r"keeps state of its own \(before\) beside the SGD in it"),
            (loop.model, "has a Linear in it, which neither is nor holds an optimizer"),
            (scheduler, r"has a scheduler in it; save its state_dict\(\) through extra="),
            (alone, r"a parameter of shape \(\) that is not in model=.*in an nn\.ParameterList"),
        ):
            with pytest.raises(UserError, match=why):
                checkpointer.save(1, model=loop.models, optimizer=given)  # type: ignore[arg-type]
        checkpointer.save(1, model=loop.models, optimizer=loop.optimizers.base_optimizer)


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "a closure, please"
        super().step(closure)


def test_an_optimizer_that_cannot_make_its_state(tmp_path: Path) -> None:
    loop = Wrapped(lambda parameters: NeedsClosure(parameters, lr=0.1, momentum=0.9))
    loop.optimizers.step(lambda: loop.model(SAMPLES[0]).sum().backward())
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, model=loop.models, optimizer=loop.optimizers)
        fresh = Wrapped(lambda parameters: NeedsClosure(parameters, lr=0.1, momentum=0.9))
        with pytest.raises(UserError, match=r"NeedsClosure cannot make its state .*a closure, please.*make one step"):
            checkpointer.load_latest(model=fresh.models, optimizer=fresh.optimizers)
        fresh.optimizers.step(lambda: fresh.model(SAMPLES[1]).sum().backward())
        checkpointer.load_latest(model=fresh.models, optimizer=fresh.optimizers)
    assert all(torch.equal(tensor, collect(fresh)[name]) for name, tensor in collect(loop).items())
