"""Linear layers that read the same input."""

from __future__ import annotations

from torch import Tensor, nn


class LinearGroup(nn.Module):
    """Apply several linear layers to one input; has no parameters of its own.

    It is a module so that a technique can replace its forward: tensor parallelism gathers the input once for all layers
    of the group, and sums their input gradients once.
    """

    def forward(self, x: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
        """Map x (..., K) to the output (..., N_i) of each layer."""
        return tuple(layer(x) for layer in layers)
