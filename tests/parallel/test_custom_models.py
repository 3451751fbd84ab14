"""A user's model with everything nn.Module may hold trains as in a plain torch loop, and is never whole twice."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drawn import draw
from outcome import RATES, Outcome, assert_close, engine_steps, gradients, state, whole
from peak_bytes import PeakBytes
from plain_setup import FEATURES, LAYOUTS, Layout, global_batch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import IGNORED_TARGET, World
from hpc_train.models import operation_record
from hpc_train.models.deferred import build_deferred
from hpc_train.models.initial_values import Normal
from hpc_train.parallel.apply import build
from hpc_train.parallel.materialise import remake_buffers
from hpc_train.parallel.user_model import get_named_blocks
from hpc_train.testing import run_ranks
from hpc_train.training.optimizer import make_optimizer

TOLERANCE = 1e-10
STEPS = (0, 1)
OPTIM = ("optim.max_norm=0.05", "optim.eps=1e-6")
WIDTH = 12


class Table(nn.Module):
    """A rotary cache: complex and not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turns", torch.polar(torch.ones(WIDTH // 2), torch.arange(WIDTH // 2.0)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * self.turns.to(pairs.dtype)).flatten(-2)


class Unit(nn.Module):
    """A block that shares a layer with its neighbours if given one."""

    def __init__(self, shared: nn.Linear | None = None) -> None:
        super().__init__()
        self.linear = shared or nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))  # no module's reset covers it
        self.register_buffer("offset", torch.linspace(0.1, 0.9, WIDTH))
        self.factor = torch.tensor(0.7)  # not a buffer

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x) * self.gain + self.offset) * self.factor


class Zoo(nn.Module):
    """A model with only `blocks()`: no plan, no stage, no loss_sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.table = Table()
        shared = nn.Linear(WIDTH, WIDTH)
        self.units = nn.ModuleList([Unit(), Unit(shared), Unit(shared), Unit(), Unit()])
        self.units[3].linear.weight = self.first_out_weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.norm = nn.GroupNorm(3, WIDTH)
        self.out = nn.Linear(WIDTH, 5)

    def blocks(self) -> dict[str, nn.Module]:
        return {f"units.{index}": unit for index, unit in enumerate(self.units)}

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(self.first(x) @ self.first_out_weight)
        for unit in self.units:
            x = unit(x)
        x = x + self.recurrent(x.unsqueeze(1))[0].squeeze(1)
        return self.out(self.norm(x))


def zoo() -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return Zoo()


@cache
def truth() -> Outcome:
    """Train in a plain torch loop."""
    config, module = LAYOUTS["ddp-1"].config(*OPTIM), zoo().double()
    optimizer, outcome = make_optimizer(module, config.optim), Outcome([], [], [], [])
    for step in STEPS:
        batch = global_batch("bare", step)
        loss = F.cross_entropy(module(batch.inputs), batch.targets, ignore_index=IGNORED_TARGET)
        optimizer.zero_grad()
        loss.backward()
        outcome.losses.append(loss.item())
        outcome.gradients.append(gradients(module))
        outcome.norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.05)))
        for group in optimizer.param_groups:
            group["lr"] = RATES[step]
        optimizer.step()
    outcome.state = state(module, optimizer)
    return outcome


def _train(world: World, config: RunConfig) -> tuple[Outcome, int]:
    module = zoo()
    engine = build(module, lambda split: make_optimizer(split, config.optim), config, world)
    groups = sum(isinstance(part, FSDPModule) for part in engine.parts[0].modules())
    return engine_steps(engine, world, config, "bare", "two", STEPS), groups


RECOMPUTED = "parallel.recompute.mode=full"
GROUPS = {
    "ddp-2": 0,
    "zero1": 1,  # smaller than a bucket
    "zero3-2": 5,
    "zero3-4": 5,
    "hsdp-2x2": 5,
    "recomputed": 5,
}
"""Modules sharded separately: the model, and four of five blocks; the fifth shares a parameter with the rest."""
CASES = {
    **{name: LAYOUTS[name] for name in ("ddp-2", "zero3-2", "zero3-4", "hsdp-2x2")},
    "zero1": Layout(2, ("parallel.strategy=zero1",)),
    "recomputed": Layout(2, ("parallel=fsdp", RECOMPUTED)),
}


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_in_a_plain_loop(name: str) -> None:
    config = CASES[name].config(*OPTIM)
    ranks = run_ranks(_train, CASES[name].ranks, config, parallel=config.parallel)
    for outcome, groups in ranks:
        assert outcome.losses == pytest.approx(truth().losses, rel=TOLERANCE)
        assert outcome.norms == pytest.approx(truth().norms, rel=TOLERANCE)
        assert groups == GROUPS[name]
    got, wanted = whole([outcome.state for outcome, _ in ranks]), whole([truth().state])
    module = zoo()
    assert got.keys() >= {name for name, _ in module.named_parameters()} | {f"units.{n}.offset" for n in range(5)}
    assert_close(got, {name: wanted[name] for name in got}, TOLERANCE)  # torch saves shared tensors twice


# Models built on the meta device.


class Ruled(nn.Module):
    """Parameters are drawn by a rule; the test is about the buffers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.out = inner, nn.Linear(FEATURES, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x))

    def init_rule(self, name: str) -> Normal:
        return Normal(0.5, 0.0)


class Resets(nn.Module):
    """Buffers that the module's reset writes; one is not saved and one shares another's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.empty(FEATURES))
        self.register_buffer("same", self.scale)
        self.register_buffer("table", torch.empty(FEATURES), persistent=False)
        self.register_buffer("on", torch.empty((), dtype=torch.bool))
        self.weight = nn.Parameter(torch.empty(FEATURES))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        self.scale.fill_(1.0)
        self.table = torch.linspace(0.0, 1.0, FEATURES, device=self.scale.device)
        self.on.fill_(True)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * self.weight + self.table * self.on


class Silent(nn.Module):
    """A buffer that only the constructor sets, beside a reset that does not write it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ones", torch.ones(FEATURES))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.ones.mul_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.ones


class Around(nn.Module):
    """A parent whose reset writes the buffers of its children."""

    def __init__(self) -> None:
        super().__init__()
        self.silent = Silent()

    def init_weights(self) -> None:
        self.silent.ones.fill_(2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.silent(x)


class Attribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = [torch.ones(FEATURES)]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.tables[0]


def _on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return Ruled(make())


def _buffers_of(world: World, make: Callable[[], nn.Module], config: RunConfig) -> dict[str, list[float]]:
    engine = build(_on_meta(make), lambda split: make_optimizer(split, config.optim), config, world)
    return _listed(engine.parts[0])


def _listed(module: nn.Module) -> dict[str, list[float]]:
    return {name: buffer.flatten().tolist() for name, buffer in module.named_buffers(remove_duplicate=False)}


@pytest.mark.parametrize("layout", ["ddp-1", "ddp-2", "zero3-2"])
@pytest.mark.parametrize("make", [Resets, Around, lambda: nn.BatchNorm1d(FEATURES)])
def test_buffers_on_meta_are_what_their_modules_reset_them_to(layout: str, make: Callable[[], nn.Module]) -> None:
    config = LAYOUTS[layout].config()
    wanted = Ruled(make()).double()
    for name, buffer in wanted.named_buffers(remove_duplicate=False):
        if name.endswith("silent.ones"):
            buffer.fill_(2.0)
    for found in run_ranks(_buffers_of, LAYOUTS[layout].ranks, make, config, parallel=config.parallel):
        assert found == {name: pytest.approx(values, rel=1e-6) for name, values in _listed(wanted).items()}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (Silent, "model: inner.ones is a buffer on the meta device, and nothing writes its value again; give Silent"),
        (Attribute, "model: inner.tables is a tensor on the meta device that is neither a parameter nor a buffer"),
        (lambda: nn.Sequential(Resets(), Silent()), "model: inner.1.ones is a buffer"),
    ],
)
def test_what_cannot_be_made_again_is_refused_by_name(make: Callable[[], nn.Module], says: str) -> None:
    with pytest.raises(UserError) as caught:
        remake_buffers(_on_meta(make), 0)
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


# Memory.

LARGE, COUNT = 192, 8


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(LARGE, LARGE) for _ in range(COUNT)])
        self.out = nn.Linear(LARGE, 5)

    def blocks(self) -> dict[str, nn.Module]:
        return {f"parts.{index}": part for index, part in enumerate(self.parts)}

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x).tanh()
        return self.out(x)


class _Reached(Exception):
    pass


class _RealBytes(PeakBytes):
    """Count real bytes: meta tensors take none, and a DTensor takes its local part."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # torch asks again with the tensors it holds
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _count(self, tensor: Tensor) -> None:
        if not tensor.is_meta:
            super()._count(tensor)


def _bytes_at_the_start(world: World, config: RunConfig) -> tuple[int, int, int, int]:
    """Return (whole model, one block, peak bytes of building besides the given model, what is left of both)."""
    module = Large().double()
    size, block = (sum(p.nbytes for p in part.parameters()) for part in (module, module.parts[0]))
    peak = _RealBytes()

    def stop(split: nn.Module) -> torch.optim.Optimizer:
        raise _Reached

    with peak, pytest.raises(_Reached):
        build(module, stop, config, world)
    gc.collect()
    left = {p.to_local().untyped_storage() for p in module.parameters()}
    return size, block, peak.peak, sum(storage.nbytes() for storage in left)


@pytest.mark.parametrize("layout", draw(["zero3-4", "hsdp-2x2"], ["zero3-4"]))
def test_at_the_start_a_rank_takes_its_share_and_no_more_than_a_block(layout: str) -> None:
    config = LAYOUTS[layout].config()
    ways = 2 if layout.startswith("hsdp") else 4
    for size, block, peak, left in run_ranks(_bytes_at_the_start, 4, config, parallel=config.parallel):
        assert peak >= size / ways
        assert peak <= size / ways + block
        assert left <= size / ways + 2**12


def _bytes_with_its_construction(world: World, config: RunConfig) -> tuple[int, int, int, list[float]]:
    """Return (whole model, one block, peak bytes since before the constructor, this rank's values of a parameter)."""
    operation_record.LARGE_TENSOR_BYTES = 2**12
    peak, found = _RealBytes(), list[float]()

    def stop(split: nn.Module) -> torch.optim.Optimizer:
        found.extend(split.parts[1].weight.to_local().flatten()[:50].tolist())
        raise _Reached

    with peak:
        apart = build_deferred(_seeded_large)
        assert apart is not None
        with pytest.raises(_Reached):
            build(apart[0], stop, config, world, values=apart[1])
    whole = Large().double()
    size, block = (sum(p.nbytes for p in part.parameters()) for part in (whole, whole.parts[0]))
    return size, block, peak.peak, found


def _seeded_large() -> Large:
    with torch.random.fork_rng([]):
        torch.manual_seed(3)
        return Large()


@pytest.mark.parametrize("layout", draw(["zero3-4", "hsdp-2x2"], ["zero3-4"]))
def test_no_rank_ever_has_the_whole_of_it(layout: str) -> None:
    config, wanted = LAYOUTS[layout].config(), _seeded_large().parts[1].weight.double()
    ways = 2 if layout.startswith("hsdp") else 4
    ranks = run_ranks(_bytes_with_its_construction, 4, config, parallel=config.parallel)
    for rank, (size, block, peak, found) in enumerate(ranks):
        assert peak <= size / ways + block
        assert found == wanted.chunk(ways)[rank % ways].flatten()[:50].tolist()


# Models that are refused.


class Views(nn.Module):
    """Tensors that follow a parameter only as long as nothing is split."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 5)
        if way == "buffer":
            self.register_buffer("row", self.linear.weight.detach()[0])
        if way == "list":
            self.held = [self.linear.weight]
        if way == "parameter":
            self.again = nn.Parameter(self.linear.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.linear(x))


class Blocks(nn.Module):
    def __init__(self, found: Callable[[nn.Module], object]) -> None:
        super().__init__()
        self.one, self.two, self.found = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2), found

    def blocks(self) -> object:
        return self.found(self)


def _refused_views(world: World, way: str, config: RunConfig) -> str:
    return _refused(world, Views(way), config)  # made here: a module that is sent elsewhere shares no memory any more


def _refused(world: World, module: nn.Module, config: RunConfig) -> str:
    with pytest.raises(UserError) as caught:
        build(module, lambda split: make_optimizer(split, config.optim), config, world)
    return str(caught.value)


@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("buffer", "model: row, a buffer, shares the memory of the parameter linear.weight"),
        ("list", "model: held, a tensor held beside the parameters, shares the memory of the parameter linear.weight"),
        ("parameter", "model: linear.weight and again are two parameters in the same memory"),
    ],
)
def test_what_would_not_follow_its_parameter_any_more_is_refused(way: str, says: str) -> None:
    config = LAYOUTS["zero3-2"].config()
    for said in run_ranks(_refused_views, 2, way, config, parallel=config.parallel):
        assert said.startswith(says)
        assert "\n" not in said


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (lambda model: [model.one], "Blocks.blocks(): returned a list; return a dict of module names to modules"),
        (lambda model: {"one": 3}, "Blocks.blocks(): holds 'one', a int; return a dict"),
        (lambda model: {0: model.one}, "Blocks.blocks(): holds 0, a Sequential; return a dict"),
        (lambda model: {"new": nn.Linear(2, 2)}, "Blocks.blocks(): new is not a module of the model"),
        (lambda model: {"one": model.one, "in": model.one[0]}, "Blocks.blocks(): in is inside of one"),
    ],
)
def test_blocks_of_another_kind_are_one_line(found: Callable[[nn.Module], object], says: str) -> None:
    with pytest.raises(UserError) as caught:
        get_named_blocks(Blocks(found))
    assert str(caught.value).startswith(says)


def test_an_attribute_of_that_name_is_no_method() -> None:
    module = nn.Module()
    module.blocks = nn.ModuleList([nn.Linear(2, 2)])
    assert get_named_blocks(module) == {}
