"""A model built without memory gets exactly the values its constructor draws once its parameters are made."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpc_train.models import operation_record
from hpc_train.models.deferred import build_deferred


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defer all tensors except those of a few numbers."""
    monkeypatch.setattr(operation_record, "LARGE_TENSOR_BYTES", 128)


class Own(nn.Module):
    """A constructor that does what real ones do: initialises twice, shares, views, computes, and reads values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 16, padding_idx=3)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.randn(16, 16) * 0.02 + torch.eye(16))
        self.flat = nn.Parameter(torch.cat([torch.full((20,), 2.0), torch.zeros(20)]))
        self.halves = nn.Parameter(torch.rand(16, 16).to(torch.bfloat16))
        self.register_buffer("table", torch.outer(torch.arange(16.0), 1 / 10 ** torch.arange(0, 1, 1 / 16)).cos())
        self.register_buffer("noise", torch.randn(16, 16), persistent=False)
        self.register_buffer("complex", torch.polar(torch.ones(40), torch.arange(40.0)))
        self.plain = torch.randn(16, 16)
        self.apply(self._again)
        with torch.no_grad():
            self.layers[0].weight[2:5, ::2].fill_(7.0)
            self.layers[1].weight.copy_(self.layers[2].weight.t())
            self.layers[2].weight /= self.layers[2].weight.norm()
            self.layers[1].weight.mul_(float(self.scale.abs().max()))
            if self.scale.mean() > -1:
                self.flat[::3] += torch.randn(14)

    def _again(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02 / math.sqrt(2))


class Orthogonal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.orthogonal_(torch.empty(24, 12)))
        self.kernel = nn.Parameter(nn.init.dirac_(torch.empty(8, 4, 3, 3)))
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(20, 20), 0.3))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "own": Own,
    "orthogonal": Orthogonal,
    "transformer": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24), 2, enable_nested_tensor=False),
    "recurrent": lambda: nn.LSTM(12, 12, 2, bidirectional=True),
    "convolutions": lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ConvTranspose2d(16, 4, 2)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(12, 12)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(12, 12)),
    "doubled": lambda: nn.Linear(12, 12).double(),
}


def _seeded(make: Callable[[], Any]) -> Any:
    with torch.random.fork_rng([]):
        torch.manual_seed(5)
        return make(), torch.get_rng_state()


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_is_that_of_the_constructor(kind: str) -> None:
    wanted, state = _seeded(KINDS[kind])
    apart, after = _seeded(lambda: build_deferred(KINDS[kind]))
    assert apart is not None
    model, values = apart
    assert torch.equal(state, after), "what is drawn later is the same too"
    names = [name for name, _ in wanted.named_parameters(remove_duplicate=False)]
    assert list(values) == names
    assert any(parameter.is_meta for parameter in model.parameters())
    for name in reversed(names):
        assert _same(values[name], wanted.get_parameter(name)), name
    for name, buffer in wanted.named_buffers():
        assert _same(model.get_buffer(name), buffer), name
    assert {id(p) for p in model.parameters()} == {id(model.get_parameter(n)) for n, _ in wanted.named_parameters()}
    if kind == "own":
        assert _same(model.plain, wanted.plain)
        assert model.head.weight is model.embed.weight


class Hides(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        if way == "closure":
            table = torch.randn(12, 12)
            self.function = lambda x: x @ table
        if way == "list":
            self.tables = [torch.randn(12, 12)]
        if way == "view":
            self.row = self.linear.weight.detach()[0]
        if way == "shared":
            self.again = nn.Parameter(self.linear.weight.detach())
        if way == "numpy":
            self.largest = self.linear.weight.detach().numpy().max()
        if way == "generator":
            self.own = nn.Parameter(torch.empty(12, 12).normal_(generator=torch.Generator().manual_seed(0)))
        if way == "raises":
            raise RuntimeError


@pytest.mark.parametrize("way", ["closure", "list", "view", "shared", "numpy", "generator", "raises"])
def test_what_cannot_be_followed_is_to_be_built_as_it_is(way: str) -> None:
    assert build_deferred(lambda: Hides(way)) is None


def test_an_empty_one_can() -> None:
    assert build_deferred(lambda: Hides("no")) is not None
