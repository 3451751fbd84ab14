"""Read the weights of a step with their moving average in place of the trained values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpc_train.checkpoint.convert.tensor_sources import TensorSource
from hpc_train.checkpoint.format.shard_layout import SavedTensor
from hpc_train.checkpoint.storage.step_directory import is_weight
from hpc_train.config.optim import EmaConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import TensorShard

_PREFIX = "optim.ema."
"""Prefix of the name of a parameter's average, in the state of its optimizer."""


def check_average(tensors: Sequence[SavedTensor], where: str) -> None:
    """Raise UserError for a step that has no average. where: names the step."""
    if not any(tensor.name.startswith(_PREFIX) for tensor in tensors):
        raise UserError(
            f"{where}: has no average of the weights; train with optim.ema.decay=0.999, or take the trained ones"
        )


def choose_weights(source: TensorSource, wanted: str | None, ema: EmaConfig, where: str) -> TensorSource:
    """Return the average of a step's weights, or the source as it is.

    wanted: average, trained, or None for what the run's own evaluations use. Raises UserError for a step without an
    average that was asked for.
    """
    has_average = any(tensor.name.startswith(_PREFIX) for tensor in source.tensors)
    if wanted == "average":
        check_average(source.tensors, where)
    uses = wanted == "average" or (wanted is None and ema.decay is not None and ema.evaluate and has_average)
    return AveragedTensors(source) if uses else source


@dataclass(frozen=True)
class AveragedTensors:
    """The weights of a source, averaged where they were trained (a TensorSource)."""

    source: TensorSource

    @property
    def tensors(self) -> Sequence[SavedTensor]:
        """The weights of the source."""
        return [tensor for tensor in self.source.tensors if is_weight(tensor.name)]

    def fill(self, shards: Sequence[TensorShard]) -> None:
        """Read the shards; frozen parameters and buffers have no average and are read as they are."""
        names = {tensor.name for tensor in self.source.tensors}
        averages = {shard.name: f"{_PREFIX}{shard.name}" for shard in shards}
        self.source.fill([replace(s, name=averages[s.name]) if averages[s.name] in names else s for s in shards])
