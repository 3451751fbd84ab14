"""Common part of the engines: clip gradients, update parameters and list tensor shards after a backward."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from hpc_train.interfaces import TensorShard
from hpc_train.parallel.optimizer_step import GradientUpdate


class UpdatingEngine:
    """The part of interfaces.Engine that passes calls on to a GradientUpdate, which the engine's constructor sets."""

    _updates: GradientUpdate

    def clip(self, max_norm: float | None) -> Tensor:
        """Clip the gradient and return its norm before that. An asynchronous worker clips its own."""
        return self._updates.clip(max_norm)

    def update(self, lr: float) -> bool:
        """Step the optimizer, or send the gradient to the servers, and clear it; False if the step was skipped."""
        return self._updates.update(lr)

    def skip_update(self) -> None:
        """Clear the gradients; parameters and optimizer state stay as they are."""
        self._updates.clear_gradients()

    def shards(self) -> Iterator[TensorShard]:
        """List what this rank saves and loads."""
        return self._updates.shards()
