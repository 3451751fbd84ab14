"""Common part of the engines: clip gradients, update parameters and list tensor shards after a backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from torch import Tensor, nn

from hpc_train.interfaces import TensorShard
from hpc_train.parallel.optimizer_step import GradientUpdate, OptimizerUpdates

if TYPE_CHECKING:
    from hpc_train.parallel.data_parallel.float8_gather import WeightScales
    from hpc_train.parallel.expert.balance import ExpertBalance


def has_routers(parts: Iterable[nn.Module]) -> bool:
    """Whether a part has a router of a mixture of experts, of which a dense model imports nothing."""
    return any(hasattr(module, "move_bias") for part in parts for module in part.modules())


class UpdatingEngine:
    """The part of interfaces.Engine that passes calls on to a GradientUpdate, which the engine's constructor sets."""

    _updates: GradientUpdate
    _balance: ExpertBalance | None = None
    """Set where the model has mixtures of experts."""
    _weight_scales: WeightScales | None = None
    """Set where weights are gathered in 8 bits."""

    def clip(self, max_norm: float | None) -> Tensor:
        """Clip the gradient and return its norm before that. An asynchronous worker clips its own."""
        return self._updates.clip(max_norm)

    def update(self, lr: float) -> bool:
        """Step the optimizer, or send the gradient to the servers, and clear it; False if the step was skipped."""
        updated = self._updates.update(lr)
        if updated and self._balance is not None:
            self._balance.move_biases()
        return updated

    def _scale_weights(self) -> None:
        """Find the scales of weights that are gathered in 8 bits; before the first forward with new weights."""
        if self._weight_scales is not None:
            self._weight_scales.update()

    def _use_evaluation_weights(self) -> AbstractContextManager[None]:
        """Evaluate with the average of the weights, where one is kept; servers keep none."""
        return self._updates.use_evaluation_weights() if isinstance(self._updates, OptimizerUpdates) else nullcontext()

    def skip_update(self) -> None:
        """Clear the gradients; parameters and optimizer state stay as they are."""
        self._updates.clear_gradients()

    def shards(self) -> Iterator[TensorShard]:
        """List what this rank saves and loads."""
        return self._updates.shards()
