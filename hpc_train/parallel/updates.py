"""Updates: what follows backward, the same for every engine: the norm over all axes, clipping, the optimizer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hpc_train.api import Piece, World
from hpc_train.parallel.norm import clip, total_norm
from hpc_train.parallel.pieces import pieces, prime


class Updates:
    """Gradients in, new parameters out, for all stages that this rank holds."""

    def __init__(
        self,
        parts: list[nn.Module],
        optimizer: torch.optim.Optimizer,
        world: World,
        borrowed: frozenset[nn.Parameter] = frozenset(),
    ) -> None:
        """borrowed: parameters of this rank that another stage owns (tied embeddings)."""
        self._parts, self._optimizer, self._world, self._borrowed = parts, optimizer, world, borrowed
        self._trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        prime(optimizer)

    def norm(self) -> Tensor:
        """Norm of the gradient as it is now, over all axes."""
        return total_norm(self._trained, self._world, self._borrowed)

    def clip(self, max_norm: float | None) -> Tensor:
        """See api.Engine."""
        norm = self.norm()
        if max_norm is not None:
            clip(self._trained, max_norm, norm)
        return norm

    def update(self, lr: float) -> bool:
        """See api.Engine."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self.forget()
        return True

    def forget(self) -> None:
        """Drop the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def pieces(self) -> Iterator[Piece]:
        """See api.Engine."""
        return pieces(self._parts, self._optimizer, self._world, self._borrowed)
