"""Find out whether the weights that adapters were trained on are still those in model.path.

A run's checkpoints hold the frozen weights, so the run goes on correctly whatever becomes of the folder. Exported
adapters do not: PEFT adds them to the weights in the folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hpc_train.checkpoint.convert.merge_adapters import find_adapted_layers
from hpc_train.checkpoint.convert.pretrained_weights import find_weights
from hpc_train.checkpoint.convert.tensor_sources import TensorSource, make_blank_shard
from hpc_train.checkpoint.format.rectangle import make_slices
from hpc_train.checkpoint.format.shard_layout import SavedTensor
from hpc_train.config.model import HfModelConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import TensorShard
from hpc_train.models.hf.build import build_hf_model
from hpc_train.models.hf.config_file import read_config_file
from hpc_train.models.hf.library import list_names_of_experts
from hpc_train.units import join_first

_SAMPLES = 4
"""Tensors that are compared: training or replacing a base changes all of them."""


def explain_lost_layers(layers: Sequence[str], model: HfModelConfig) -> str | None:
    """Return why PEFT would leave out some adapters; None if it takes all. layers: names of those with an adapter.

    In mixtures of experts PEFT recognises the experts' layers by their last name alone, and so mistakes others of the
    same name, such as those of shared experts, for parts of the experts.
    """
    try:
        kind = read_config_file(model).model_type
    except UserError:
        return None
    names = list_names_of_experts(kind)
    lost = [layer for layer in layers if layer.rpartition(".")[2] in names]
    if not lost:
        return None
    return f"PEFT takes {join_first(lost, 1)} for parts of the experts of {kind}, and loses their adapters"


def explain_missing_base(shards: Iterable[TensorShard], model: HfModelConfig) -> str | None:
    """Return why exported adapters on these weights have no base in model.path; None if they have.

    The folder may be on another machine, or be no more: that is no reason.
    """
    try:
        has_weights = find_weights(model) is not None
        changed = find_changed_weight(shards, model) if has_weights else None
    except UserError:
        return None
    if not has_weights:
        return f"model.path={model.path} has no weights for these adapters; those they were trained on are in this run"
    return None if changed is None else describe_change(model, changed)


def describe_change(model: HfModelConfig, name: str) -> str:
    """Return a sentence about a base with another weight of this name."""
    return f"its adapters were trained on other weights than those now in model.path={model.path} ({name} differs)"


def find_changed_weight(shards: Iterable[TensorShard], model: HfModelConfig) -> str | None:
    """Return the name of a weight that is not as in the files of model.path, in the type of its shard; None if all are.

    shards: any parts of a step; some of the model's own weights among them are compared. Raises UserError for files
    that do not fit the model.
    """
    weights = find_weights(model)
    if weights is None:
        return None
    with torch.device("meta"):
        values = weights.plan(build_hf_model(model)).parameters
    frozen = [shard for shard in shards if shard.name in values and shard.local.numel()]
    for shard in frozen[:: max(1, len(frozen) // _SAMPLES)]:
        stored = values[shard.name]()[make_slices(shard.offset, shard.local.shape)]
        if not torch.equal(stored.to(shard.dtype), shard.local.cpu()):
            return shard.name
    return None


def read_adapted_weights(source: TensorSource, tensors: Sequence[SavedTensor]) -> list[TensorShard]:
    """Read some of the weights that adapters change, whole. tensors: those of a step."""
    weights = [parts[0] for parts in find_adapted_layers(tensors).values()]
    shards = [make_blank_shard(tensor, tensor.rectangle) for tensor in weights[:: max(1, len(weights) // _SAMPLES)]]
    source.fill(shards)
    return shards
