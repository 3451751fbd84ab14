"""Layers that make q, k and v, or gate and up, at once: each rank computes its share of each, and stores it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from outcome import Held, gradients, whole
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers.pytorch_utils import Conv1D

from hpc_train.config.parallel import ParallelConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.models.adapters.adapted_linear import add_adapter
from hpc_train.parallel.optimizers.rounded_adamw import make_random_bits
from hpc_train.parallel.tensor.layers import TensorAxis, split_columns, split_rows
from hpc_train.parallel.tensor.local_parameters import ParameterLayouts, distribute_parameters
from hpc_train.shard_rectangles import find_fused_parts, list_rectangles
from hpc_train.testing import run_ranks

HEAD, WIDTH = 3, 5


@dataclass(frozen=True)
class Shape:
    """Heads of an attention with one fused layer, or a gated feed-forward layer."""

    heads: int = 4
    key_heads: int = 4
    transposed: bool = False
    gated: bool = False
    inner: int = 6
    """Width of the gated layer."""
    adapter: bool = False


class Layer(nn.Module):
    """Softmax over heads is left out: each query head times the key head of its group, plus its value."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        if not shape.gated:
            self.head_dim, self.num_key_value_heads = HEAD, shape.key_heads
        inner = shape.inner if shape.gated else shape.heads * HEAD
        outputs = 2 * inner if shape.gated else (shape.heads + 2 * shape.key_heads) * HEAD
        self.shape = shape
        make = (lambda a, b: Conv1D(b, a)) if shape.transposed else nn.Linear
        self.fused, self.out = make(WIDTH, outputs), make(inner, WIDTH)

    def forward(self, x: Tensor, heads: int, key_heads: int) -> Tensor:
        fused: Tensor = self.fused(x)
        if self.shape.gated:
            gate, up = fused.chunk(2, dim=-1)
            out: Tensor = self.out(gate.sin() * up)
            return out
        split = fused.unflatten(-1, (-1, HEAD))
        q, k, v = split.split([heads, key_heads, key_heads], dim=-2)
        k, v = (part.repeat_interleave(heads // key_heads, -2) for part in (k, v))
        out = self.out((q * k.sin() + v).flatten(-2))
        return out


SHAPES = {
    "equal": Shape(),
    "groups": Shape(key_heads=2),
    "one key for all": Shape(key_heads=1),
    "Conv1D": Shape(transposed=True),
    "gate and up": Shape(gated=True),
    "adapter": Shape(key_heads=2, adapter=True),
    "adapter on Conv1D": Shape(transposed=True, adapter=True),
}


def make_layer(shape: Shape) -> Layer:
    layer = Layer(shape).double()
    if shape.adapter:
        for name in ("fused", "out"):
            add_adapter(layer.get_submodule(name), 2, 3.0, 0.0, magnitude=True)
    for parameter in layer.parameters():
        values = torch.linspace(-7, 7, parameter.numel(), dtype=torch.float64).sin()
        parameter.data = values.view(parameter.shape)
        parameter.requires_grad_(True)
    return layer


def train_once(layer: Layer, heads: int, key_heads: int) -> list[Held]:
    x = torch.linspace(-2, 2, 6 * WIDTH, dtype=torch.float64).cos().view(2, 3, WIDTH).requires_grad_()
    out = layer(x, heads, key_heads)
    (out * torch.linspace(1, 2, out.numel(), dtype=torch.float64).view(out.shape)).sum().backward()
    assert x.grad is not None
    for parameter in layer.parameters():  # the engine sums gradients of what every rank has
        if isinstance(gradient := parameter.grad, DTensor) and gradient.placements[0].is_partial():
            parameter.grad = gradient.redistribute(placements=[Replicate()])
    outputs = [
        Held(name, tuple(value.shape), (0,) * 3, value.detach().numpy().copy(), 0)
        for name, value in (("out", out), ("x", x.grad))
    ]
    return [*gradients(layer), *outputs]


def run_layer(world: World, shape: Shape) -> list[Held]:
    layer = make_layer(shape)
    axis = TensorAxis(world.mesh["tp"], sequence=False)
    layouts: ParameterLayouts = {}
    style = "fused_gate_up" if shape.gated else "fused_qkv"
    split_columns(layer, {"fused": (layer.fused, style)}, axis, False, layouts)
    split_rows("out", layer.out, axis, False, layouts)
    distribute_parameters(layer, axis.mesh, layouts)
    return train_once(layer, shape.heads // axis.size, max(shape.key_heads // axis.size, 1))


@pytest.mark.parametrize("name", SHAPES)
def test_each_rank_computes_its_heads_and_the_gradients_are_those_of_one_process(name: str) -> None:
    shape = SHAPES[name]
    expected = whole([train_once(make_layer(shape), shape.heads, shape.key_heads)])
    found = whole(run_ranks(run_layer, 2, shape, parallel=ParallelConfig(tp=2)))
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_allclose(found[key], array, rtol=0, atol=1e-12 * np.abs(array).max(), err_msg=key)


def draw_bits(world: World) -> list[Held]:
    layer = make_layer(SHAPES["Conv1D"])
    if world.size > 1:
        axis = TensorAxis(world.mesh["tp"], sequence=False)
        layouts: ParameterLayouts = {}
        split_columns(layer, {"fused": (layer.fused, "fused_qkv")}, axis, False, layouts)
        distribute_parameters(layer, axis.mesh, layouts)
    weight = dict(layer.named_parameters())["fused.weight"]
    fused = find_fused_parts(layer).get(weight)
    bits, begin, held = make_random_bits(weight, 3, fused) % 1000, 0, []
    for offset, local in list_rectangles(weight, fused):
        own = bits.narrow(1, begin, local.shape[1])
        held.append(Held("bits", tuple(weight.shape), offset, own.double().numpy(), 0))
        begin += local.shape[1]
    return held


def test_random_bits_of_stochastic_rounding_are_those_of_one_process() -> None:
    (expected,) = run_ranks(draw_bits, 1)
    found = whole(run_ranks(draw_bits, 2, parallel=ParallelConfig(tp=2)))
    np.testing.assert_array_equal(found["bits"], whole([expected])["bits"])


class _OneRankOfTwo:
    rank, size = 0, 2


@pytest.mark.parametrize(
    ("shape", "line"),
    [
        (Shape(heads=3, key_heads=1), r"^parallel\.tp=2: fused has 3 heads, which do not divide; use a divisor of 3$"),
        (Shape(key_heads=1, transposed=True), r"^fused: is Conv1D, of which only equal parts are split; use a smaller"),
        (Shape(gated=True, inner=7), r"^parallel\.tp=2: fused has 14 outputs, whose halves \(fused_gate_up\) do not"),
    ],
    ids=["heads", "Conv1D", "gate"],
)
def test_what_does_not_divide_is_one_line(shape: Shape, line: str) -> None:
    layer = Layer(shape)
    style = "fused_gate_up" if shape.gated else "fused_qkv"
    with pytest.raises(UserError, match=line):
        split_columns(layer, {"fused": (layer.fused, style)}, _OneRankOfTwo(), False, {})  # type: ignore[arg-type]
