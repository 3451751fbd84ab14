"""Read the weights of a step with their average in place of the trained values.

The average is a moving one (optim.ema), saved as it is, or that of a schedule-free optimizer, which follows from the
trained weights and its state z.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from hpc_train.checkpoint.convert.tensor_sources import TensorSource
from hpc_train.checkpoint.format.shard_layout import SavedTensor
from hpc_train.checkpoint.storage.step_directory import is_weight
from hpc_train.config.optim import EmaConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import TensorShard

_PREFIX = "optim.ema."
"""Prefix of the name of a parameter's average, in the state of its optimizer."""
_SCHEDULE_FREE, _BETA = "optim.z.", "optim.beta1."
"""Prefixes of the state of a schedule-free optimizer that its average follows from."""


def check_average(tensors: Sequence[SavedTensor], where: str) -> None:
    """Raise UserError for a step that has no average. where: names the step."""
    if not any(tensor.name.startswith((_PREFIX, _SCHEDULE_FREE)) for tensor in tensors):
        raise UserError(
            f"{where}: has no average of the weights; train with optim.ema.decay=0.999, or take the trained ones"
        )


def is_schedule_free(tensors: Sequence[SavedTensor]) -> bool:
    """Return whether a step is of a schedule-free optimizer, whose result is the average."""
    return any(tensor.name.startswith(_SCHEDULE_FREE) for tensor in tensors)


def choose_weights(source: TensorSource, wanted: str | None, ema: EmaConfig, where: str) -> TensorSource:
    """Return the average of a step's weights, or the source as it is.

    wanted: average, trained, or None for what the run's own evaluations use. Raises UserError for a step without an
    average that was asked for.
    """
    has_average = any(tensor.name.startswith(_PREFIX) for tensor in source.tensors)
    if wanted == "average":
        check_average(source.tensors, where)
    evaluates = (ema.decay is not None and ema.evaluate and has_average) or is_schedule_free(source.tensors)
    return AveragedTensors(source) if wanted == "average" or (wanted is None and evaluates) else source


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
        for shard in shards:
            if f"{_SCHEDULE_FREE}{shard.name}" in names:
                self._average_schedule_free(shard)

    def _average_schedule_free(self, shard: TensorShard) -> None:
        """Turn trained weights into their average, as the package schedulefree does for an evaluation."""
        z = replace(shard, name=f"{_SCHEDULE_FREE}{shard.name}", local=torch.empty_like(shard.local))
        beta = torch.zeros((), dtype=torch.float64)
        self.source.fill([z, TensorShard(f"{_BETA}{shard.name}", (), beta.dtype, (), beta, 0)])
        shard.local.lerp_(z.local, 1 - 1 / beta.item())
