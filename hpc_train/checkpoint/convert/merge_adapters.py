"""Read a step that has adapters: the adapters alone for PEFT's files, or merged into the weights that they change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpc_train.checkpoint.convert.rewrite import OnBytes
from hpc_train.checkpoint.convert.tensor_sources import TensorSource, make_blank_shard, read_whole_tensors
from hpc_train.checkpoint.format.rectangle import make_slices
from hpc_train.checkpoint.format.shard_layout import SavedTensor
from hpc_train.checkpoint.storage.step_directory import is_weight
from hpc_train.config.adapter import AdapterConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import TensorShard
from hpc_train.models.adapters.names import ADAPTER_A, ADAPTER_B, ADAPTER_MAGNITUDE, is_adapter_parameter, is_transposed


def find_adapted_layers(tensors: Sequence[SavedTensor]) -> dict[str, list[SavedTensor]]:
    """Return the tensors of each layer with an adapter: its weight, then the adapter's parameters."""
    by_name = {tensor.name: tensor for tensor in tensors if is_weight(tensor.name)}
    layers = sorted({name.rpartition(".")[0] for name in by_name if is_adapter_parameter(name)})
    leaves = ("weight", ADAPTER_A, ADAPTER_B, ADAPTER_MAGNITUDE)
    adapted = {
        layer: [by_name[f"{layer}.{leaf}"] for leaf in leaves if f"{layer}.{leaf}" in by_name] for layer in layers
    }
    for layer, parts in adapted.items():
        if len(parts) < 3:
            raise UserError(f"{layer}: this step has only some of its weight, A and B; give a step that has all three")
    return adapted


def read_adapters(source: TensorSource, tensors: Sequence[SavedTensor], on_bytes: OnBytes) -> dict[str, Tensor]:
    """Read all adapters as A (rank, inputs), B (outputs, rank), with DoRA's magnitudes made absolute.

    Of the weights, one is in memory at a time.
    """
    state: dict[str, Tensor] = {}
    for layer, parts in find_adapted_layers(tensors).items():
        is_dora = len(parts) == 4
        values = read_whole_tensors(source, parts if is_dora else parts[1:])
        weight = values.pop(f"{layer}.weight", None)
        transposed = _is_transposed(parts)
        if weight is not None:
            values[f"{layer}.{ADAPTER_MAGNITUDE}"] += measure_rows(weight.t() if transposed else weight)
        for leaf in (ADAPTER_A, ADAPTER_B) if transposed else ():
            values[f"{layer}.{leaf}"] = values[f"{layer}.{leaf}"].t()
        state |= values
        on_bytes(sum(tensor.rectangle.volume * tensor.itemsize for tensor in parts[1:]))
    return state


def list_transposed_layers(tensors: Sequence[SavedTensor]) -> list[str]:
    """List the layers with an adapter whose weight is (inputs, outputs)."""
    return [layer for layer, parts in find_adapted_layers(tensors).items() if _is_transposed(parts)]


def _is_transposed(parts: Sequence[SavedTensor]) -> bool:
    weight, a, b = (tensor.shape for tensor in parts[:3])
    return is_transposed(weight, a, b)


def measure_rows(weight: Tensor) -> Tensor:
    """Return the length of each row of a weight (outputs, inputs): (outputs,)."""
    lengths: Tensor = torch.linalg.vector_norm(weight, dim=1)
    return lengths


@dataclass(frozen=True)
class MergedTensors:
    """The weights of a source with adapters, as one model without (a TensorSource)."""

    source: TensorSource
    adapter: AdapterConfig

    @property
    def tensors(self) -> Sequence[SavedTensor]:
        """The weights of the source, without adapters."""
        weights = [tensor for tensor in self.source.tensors if is_weight(tensor.name)]
        return [tensor for tensor in weights if not is_adapter_parameter(tensor.name)]

    def fill(self, shards: Sequence[TensorShard]) -> None:
        """Read the shards; of a layer with an adapter, the whole weight is read and changed."""
        layers = find_adapted_layers(self.source.tensors)
        adapted = {f"{layer}.weight": parts for layer, parts in layers.items()}
        self.source.fill([shard for shard in shards if shard.name not in adapted])
        for shard in shards:
            if shard.name in adapted:
                where = make_slices(shard.offset, shard.local.shape)
                shard.local.copy_(self._merge(adapted[shard.name])[where])

    def _merge(self, parts: Sequence[SavedTensor]) -> Tensor:
        """Return W + s B A, or with DoRA that with the trained lengths of each output's weights."""
        wholes = [make_blank_shard(tensor, tensor.rectangle) for tensor in parts]
        self.source.fill(wholes)
        weight, a, b, *magnitude = (shard.local for shard in wholes)
        if _is_transposed(parts):
            weight, a, b = weight.t(), a.t(), b.t()
        merged = weight + (self.adapter.alpha / self.adapter.rank) * (b @ a)
        if magnitude:
            merged *= ((measure_rows(weight) + magnitude[0]) / measure_rows(merged)).unsqueeze(1)
        return merged.t() if _is_transposed(parts) else merged
