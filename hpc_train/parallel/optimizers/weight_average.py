"""Keep an exponential moving average of the trained weights, for the shards that this rank holds.

It is part of the optimizer's state, as `ema` of each parameter, so it is saved, loaded and split like that. The average
of a shard is the same shard of the average, so nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hpc_train._torch.tensors import copy_tensor_lists, interpolate_tensors
from hpc_train.config.optim import EmaConfig
from hpc_train.parallel.materialise import is_rehearsal
from hpc_train.parallel.optimizer_step import get_local


class WeightAverage:
    """The average of the parameters of an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, config: EmaConfig) -> None:
        """optimizer: with its state; `ema` and `ema_step`, the number of updates so far, are added to it."""
        self._config, self._optimizer = config, optimizer
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter in self._parameters:
            optimizer.state[parameter]["ema"] = parameter.detach().clone()
            optimizer.state[parameter]["ema_step"] = torch.zeros((), dtype=torch.float32)

    @property
    def evaluates(self) -> bool:
        """Whether evaluations use the average."""
        return self._config.evaluate

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights, after an update of them; until `start` updates it is a copy."""
        assert self._config.decay is not None
        for parameter in self._parameters:
            self._optimizer.state[parameter]["ema_step"].add_(1)
        if self._count_updates() <= self._config.start:
            copy_tensor_lists(self._list_averages(), self._list_weights())
        else:
            interpolate_tensors(self._list_averages(), self._list_weights(), 1 - self._config.decay)

    @contextmanager
    def replace_weights(self) -> Iterator[None]:
        """Exchange weights and average in place for a block of code; before the first update there is no average."""
        exchanges = self.evaluates and self._count_updates() > 0
        if exchanges:
            self._exchange()
        try:
            yield
        finally:
            if exchanges:
                self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for weights, average in zip(self._list_weights(), self._list_averages(), strict=True):
            copy = weights.clone()
            weights.copy_(average)
            average.copy_(copy)

    def _count_updates(self) -> float:
        # A rehearsal's tensors have no values; it takes the path of a long run, the average of several updates.
        if is_rehearsal() or not self._parameters:
            return self._config.start + 1
        return float(self._optimizer.state[self._parameters[0]]["ema_step"])

    def _list_weights(self) -> list[Tensor]:
        return [get_local(parameter) for parameter in self._parameters]

    def _list_averages(self) -> list[Tensor]:
        return [get_local(self._optimizer.state[parameter]["ema"]) for parameter in self._parameters]
