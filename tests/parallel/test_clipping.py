"""Clipping scales a gradient down to the largest norm, and never up."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpc_train.parallel.optimizer_step import clip_gradients


@pytest.mark.parametrize("norm", [0.0, 1e-3, 0.5, 1.0, 4.0, 1e6])
def test_a_gradient_has_at_most_the_largest_norm(norm: float) -> None:
    parameters = [
        nn.Parameter(torch.zeros(3, 5, dtype=torch.float64)),
        nn.Parameter(torch.zeros(7, dtype=torch.float32)),
    ]
    direction = [torch.randn(p.shape, generator=torch.Generator().manual_seed(1), dtype=p.dtype) for p in parameters]
    length = torch.sqrt(sum((part.double() ** 2).sum() for part in direction))
    for parameter, part in zip(parameters, direction, strict=True):
        parameter.grad = part * (norm / length).to(part.dtype)
    before = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    clip_gradients([*parameters, nn.Parameter(torch.zeros(1))], 1.0, torch.tensor(norm))
    after = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if norm < 1:
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True)), "left as it was, bit for bit"
    else:
        total = torch.sqrt(sum((part.double() ** 2).sum() for part in after))
        assert float(total) == pytest.approx(1.0, rel=2e-6)
