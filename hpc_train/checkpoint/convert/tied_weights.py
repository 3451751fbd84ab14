"""Weights that a step has under another name: of a layer with an adapter that is tied to the embedding, such as a head.

Its adapter changes the layer alone. With the adapter merged, layer and embedding are two tensors, so the model of
transformers that takes them is one without tied embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from hpc_train.checkpoint.convert.tensor_sources import TensorSource
from hpc_train.checkpoint.format.shard_layout import SavedTensor
from hpc_train.checkpoint.storage.step_directory import is_weight
from hpc_train.config.model import HfModelConfig, ModelConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import TensorShard
from hpc_train.models.adapters.names import is_adapter_parameter
from hpc_train.models.hf.build import build_hf_model


@dataclass(frozen=True)
class TiedTensors:
    """The tensors of a source, some of them also under the names of layers that share them (a TensorSource)."""

    source: TensorSource
    shared: Mapping[str, str]
    """Name of a layer's weight -> name of the tensor that it is."""

    @property
    def tensors(self) -> Sequence[SavedTensor]:
        """The tensors of the source, then those with another name."""
        saved = {tensor.name: tensor for tensor in self.source.tensors}
        return [*saved.values(), *(saved[real]._replace(name=name) for name, real in self.shared.items())]

    def fill(self, shards: Sequence[TensorShard]) -> None:
        """Read the shards."""
        self.source.fill([replace(shard, name=self.shared.get(shard.name, shard.name)) for shard in shards])


def list_missing_weights(tensors: Sequence[SavedTensor]) -> list[str]:
    """Return the names of weights that are not there, and whose layer has an adapter among these tensors."""
    names = {tensor.name for tensor in tensors if is_weight(tensor.name)}
    wanted = {f"{name.rpartition('.')[0]}.weight" for name in names if is_adapter_parameter(name)}
    return sorted(wanted - names)


def add_tied_weights(source: TensorSource, model: ModelConfig) -> TensorSource:
    """Give layers whose adapter is in `source` their weight where it is saved under another name."""
    missing = list_missing_weights(source.tensors)
    if not missing or not isinstance(model, HfModelConfig):
        return source
    saved = {tensor.name for tensor in source.tensors}
    with torch.device("meta"):
        names = find_tied_names(build_hf_model(model))
    return TiedTensors(source, {name: names[name] for name in missing if names.get(name) in saved})


def find_tied_names(model: nn.Module) -> dict[str, str]:
    """Return the other names of parameters that several modules share -> the name that checkpoints have."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = {name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}
    return {name: saved for name, saved in every.items() if name != saved}


def check_untied(names: Sequence[str], task: str) -> None:
    """Raise UserError for a model that would compute something else without sharing its weights `names`.

    Only of decoders it is known that the setting does nothing but share: T5 also scales what a shared head reads.
    """
    if names and task != "causal_lm":
        raise UserError(
            f"{names[0]}: has an adapter and is shared with the embeddings, and a {task} of transformers with two "
            "weights in its place may compute something else; export it with --adapter"
        )
