"""Read the numbers that a step leaves on the device: all of them in one copy, so that the host waits for it once.

Each `float(tensor)` of a GPU tensor would wait until the device has done all its work, and then cost a separate copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpc_train.interfaces import Sums


@dataclass(frozen=True)
class ExpertNumbers:
    """interfaces.ExpertLoads of a step, as numbers of the host."""

    imbalance: float
    dropped: float
    loss: float


@dataclass(frozen=True)
class StepNumbers:
    """Loss and gradient norm of a step, and what else it measured."""

    loss: float
    """Mean over the targets that count, nats."""
    norm: float
    """Norm of the gradient before clipping."""
    sample_square: float | None = None
    """Squared norm of the gradient of a part of the batch, in a step that measured it."""
    experts: ExpertNumbers | None = None
    """In a model with mixtures of experts."""


def read_step_numbers(sums: Sums, norm: Tensor) -> StepNumbers:
    """Wait for the device and return the step's numbers. sums, norm: as an engine returns them."""
    scalars = [sums.loss, norm]
    if sums.sample is not None:
        scalars.append(sums.sample.norm_square)
    if sums.experts is not None:
        scalars += [sums.experts.imbalance, sums.experts.dropped, sums.experts.loss]
    loss, gradient_norm, *rest = read_scalars(scalars)
    square = rest.pop(0) if sums.sample is not None else None
    experts = ExpertNumbers(*rest) if sums.experts is not None else None
    return StepNumbers(loss / max(sums.tokens, 1), gradient_norm, square, experts)


def read_scalars(scalars: Sequence[Tensor]) -> list[float]:
    """Return the values of scalar tensors, with one copy from each device that some of them are on."""
    by_device: dict[torch.device, list[int]] = {}
    for index, scalar in enumerate(scalars):
        by_device.setdefault(scalar.device, []).append(index)
    values = [0.0] * len(scalars)
    for indices in by_device.values():
        device_values = torch.stack([scalars[index].detach().to(torch.float64) for index in indices]).tolist()
        for index, value in zip(indices, device_values, strict=True):
            values[index] = value
    return values
