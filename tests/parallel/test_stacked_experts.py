"""Experts of transformers, whose parameters are stacked, over tp: each rank has some of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts

from hpc_train.config.parallel import ParallelConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.parallel.tensor.layers import TensorAxis
from hpc_train.parallel.tensor.local_parameters import ParameterLayouts, distribute_parameters
from hpc_train.parallel.tensor.stacked_experts import share_out_experts
from hpc_train.testing import run_ranks

Array = np.ndarray


class Experts(nn.Module):
    """A product for each expert, called as transformers calls its experts: index num_experts is left out."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.num_experts = count
        values = torch.linspace(-1, 1, count * 3 * 3, dtype=torch.float64).sin()
        self.proj = nn.Parameter(values.view(count, 3, 3))

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for row, column in (indices < self.num_experts).nonzero().tolist():
            product = self.proj[indices[row, column]] @ x[row]
            out = out.index_add(0, torch.tensor([row]), (product * weights[row, column])[None])
        return out


def make_inputs() -> tuple[Tensor, Tensor]:
    x = torch.linspace(-2, 2, 15, dtype=torch.float64).cos().view(5, 3).requires_grad_()
    weights = torch.linspace(0.1, 0.9, 10, dtype=torch.float64).view(5, 2).requires_grad_()
    return x, weights


def collect(out: Tensor, x: Tensor, weights: Tensor, parameter: nn.Parameter) -> list[Array]:
    (out * torch.linspace(1, 2, 15, dtype=torch.float64).view(5, 3)).sum().backward()
    gradient = parameter.grad
    assert x.grad is not None
    assert weights.grad is not None
    assert gradient is not None
    whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return [value.detach().numpy() for value in (out, x.grad, weights.grad, whole)]


def run_experts(world: World, indices: Tensor) -> list[Array]:
    axis, experts = TensorAxis(world.mesh["tp"], sequence=False), Experts()
    layouts: ParameterLayouts = {}
    share_out_experts("experts", experts, axis, layouts)
    distribute_parameters(experts, axis.mesh, layouts)
    x, weights = make_inputs()
    return collect(experts(x, indices, weights), x, weights, dict(experts.named_parameters())["proj"])


@pytest.mark.parametrize("indices", [[[0, 3], [1, 2], [2, 0], [3, 1], [0, 1]], [[0, 1]] * 5], ids=["all", "rank-0"])
def test_results_and_gradients_are_those_of_one_process(indices: list[list[int]]) -> None:
    """Also where no token has chosen an expert of a rank, which takes part in the sums of backward."""
    chosen, experts, (x, weights) = torch.tensor(indices), Experts(), make_inputs()
    expected = collect(experts(x, chosen, weights), x, weights, experts.proj)
    for found in run_ranks(run_experts, 2, chosen, parallel=ParallelConfig(tp=2)):
        for value, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(value, wanted, rtol=0, atol=1e-14)


def make_library_experts(implementation: str) -> nn.Module:
    config = transformers.Qwen2MoeConfig(hidden_size=8, moe_intermediate_size=16, num_experts=4, num_hidden_layers=1)
    config._experts_implementation = implementation
    experts = Qwen2MoeExperts(config)
    for parameter in experts.parameters():
        parameter.data = torch.linspace(-1, 1, parameter.numel()).mul(9).sin().view(parameter.shape)
    return experts


def run_library_experts(world: World, implementation: str, indices: Tensor) -> list[Array]:
    experts = make_library_experts(implementation)
    if world.size > 1:
        axis = TensorAxis(world.mesh["tp"], sequence=False)
        layouts: ParameterLayouts = {}
        share_out_experts("experts", experts, axis, layouts)
        distribute_parameters(experts, axis.mesh, layouts)
    x = torch.linspace(-2, 2, 40).cos().view(5, 8).requires_grad_()
    weights = torch.linspace(0.1, 0.9, 10).view(5, 2).requires_grad_()
    out = experts(x, indices, weights)
    (out * torch.linspace(1, 2, 40).view(5, 8)).sum().backward()
    found = [out, x.grad, weights.grad, *(parameter.grad for parameter in experts.parameters())]
    return [value.full_tensor().numpy() if isinstance(value, DTensor) else value.detach().numpy() for value in found]


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_each_implementation_of_the_library_leaves_out_the_experts_of_other_ranks(implementation: str) -> None:
    """In float32: grouped products, which are the library's default, leave rows of other experts uninitialised."""
    for indices in ([[0, 3], [1, 2], [2, 0], [3, 1], [0, 1]], [[0, 1]] * 5):
        (expected,) = run_ranks(run_library_experts, 1, implementation, torch.tensor(indices))
        ranks = run_ranks(run_library_experts, 2, implementation, torch.tensor(indices), parallel=ParallelConfig(tp=2))
        for found in ranks:
            for value, wanted in zip(found, expected, strict=True):
                np.testing.assert_allclose(value, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


class _OneRankOfTwo:
    rank, size = 0, 2


@pytest.mark.parametrize(
    ("experts", "line"),
    [
        (Experts(3), r"^parallel\.tp=2: layers\.0\.experts has 3 experts, which do not divide$"),
        (nn.Linear(3, 3), r"^layers\.0\.experts: Linear has parameters that are not stacked over its experts$"),
    ],
)
def test_experts_that_are_not_shared_out_are_one_line(experts: nn.Module, line: str) -> None:
    with pytest.raises(UserError, match=line):
        share_out_experts("layers.0.experts", experts, _OneRankOfTwo(), {})  # type: ignore[arg-type]
