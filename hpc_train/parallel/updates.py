"""Updates: what follows backward, the same for every engine: the norm over all axes, clipping, the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from hpc_train.api import Piece, World
from hpc_train.parallel.norm import clip, scale_gradients, total_norm
from hpc_train.parallel.pieces import pieces, prime
from hpc_train.parallel.scaling import LossScale


class Updating(Protocol):
    """What an engine needs once its gradients are there."""

    @property
    def loss_scale(self) -> float: ...

    def norm(self) -> Tensor: ...

    def clip(self, max_norm: float | None) -> Tensor: ...

    def update(self, lr: float) -> bool: ...

    def forget(self) -> None: ...

    def pieces(self) -> Iterator[Piece]: ...


class Updates:
    """Gradients in, new parameters out, for all stages that this rank holds."""

    def __init__(
        self,
        parts: list[nn.Module],
        optimizer: torch.optim.Optimizer,
        world: World,
        borrowed: frozenset[nn.Parameter] = frozenset(),
        scaling: LossScale | None = None,
    ) -> None:
        """borrowed: parameters of this rank that another stage owns (tied embeddings). scaling: for fp16."""
        self._parts, self._optimizer, self._world, self._borrowed = parts, optimizer, world, borrowed
        self._trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._scaling = scaling
        self._norm: Tensor | None = None
        """Of the gradient, once it is freed of the loss scale."""
        prime(optimizer)

    @property
    def loss_scale(self) -> float:
        """What an engine multiplies the loss by before backward; 1 but for fp16."""
        return 1.0 if self._scaling is None else self._scaling.factor

    def norm(self) -> Tensor:
        """Norm of the gradient as it is now, over all axes, without the loss scale."""
        norm = total_norm(self._trained, self._world, self._borrowed)
        return norm if self._scaling is None else norm / self.loss_scale

    def clip(self, max_norm: float | None) -> Tensor:
        """See api.Engine."""
        norm = self.norm()
        if self._scaling is not None:
            scale_gradients(self._trained, 1.0 / self.loss_scale)
            self._norm = norm
        if max_norm is not None:
            clip(self._trained, max_norm, norm)
        return norm

    def update(self, lr: float) -> bool:
        """See api.Engine. Waits for the device where the loss is scaled, to know whether the gradient is finite."""
        if self._scaling is not None and not self._usable():
            self.forget()
            return False
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self.forget()
        return True

    def _usable(self) -> bool:
        """Whether the scaled gradient is finite, the same on every rank; the scale learns of it."""
        assert self._scaling is not None
        norm = self.clip(None) if self._norm is None else self._norm
        self._norm = None
        finite = bool(norm.isfinite())
        self._scaling.learn(finite)
        return finite

    def forget(self) -> None:
        """Drop the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def pieces(self) -> Iterator[Piece]:
        """See api.Engine."""
        yield from pieces(self._parts, self._optimizer, self._world, self._borrowed)
        if self._scaling is not None:
            yield from self._scaling.pieces(self._world)
