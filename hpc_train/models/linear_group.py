"""Linear layers that read the same input."""

from __future__ import annotations

from torch import Tensor, nn


class LinearGroup(nn.Module):
    """Apply several linear layers to one input; no parameters of its own.

    A module so that a technique can put another forward in its place: tensor parallelism gathers the input once for
    all layers of the group, and adds their input gradients up once.
    """

    def forward(self, x: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
        """x (..., K) -> the output (..., N_i) of each layer."""
        return tuple(layer(x) for layer in layers)
