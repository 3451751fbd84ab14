"""Build one pipeline stage of a transformers model: its structure on the meta device, without the layers of other
stages.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hpc_train.models.hf.adapter import HfModel, copy_to_meta
from hpc_train.models.hf.library import get_pipeline_plan
from hpc_train.models.layers import match_tensor_plan


class SkippedLayer(nn.Module):
    """A layer of another stage: passes hidden states on. Keeps the attributes that the model asks its layers for."""

    def __init__(self, layer: nn.Module, *, returns_tuple: bool) -> None:
        super().__init__()
        self._returns_tuple = returns_tuple
        for name in ("attention_type", "layer_idx"):
            if hasattr(layer, name):
                setattr(self, name, getattr(layer, name))

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor | tuple[Tensor, None]:
        """Return the hidden states."""
        return (x, None) if self._returns_tuple else x


class SkippedEmbedding(nn.Module):
    """An embedding of the first stage: adds nothing to the hidden states of a later one."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Return zero, without dimensions."""
        return torch.zeros(())


def cut_stage(model: HfModel, names: list[str]) -> HfModel:
    """Return the part of `model` that has the layers `names`, on the meta device, under the same parameter names.

    By the pipeline plan of the model, or of its family, what comes before the layers is in the first stage, and what
    comes after in the last. The last one keeps the embedding too where the head is tied to it.
    """
    all_names = model.block_names
    part = copy_to_meta(model)
    part.is_first, part.is_last = names[0] == all_names[0], names[-1] == all_names[-1]
    part.block_names = list(names)
    for name in all_names:
        if name not in names:
            _replace(part, name, SkippedLayer(part.get_submodule(name), returns_tuple=model.family.tuples))
    layers = all_names[0].rpartition(".")[0]
    path = _order_modules(part, layers)
    before, after = path[: path.index(layers)], path[path.index(layers) + 1 :]
    library: Any = part
    tied = library.get_output_embeddings().weight is library.get_input_embeddings().weight
    for name in before if not part.is_first else ():
        if not (part.is_last and tied and part.get_submodule(name) is library.get_input_embeddings()):
            is_embedding = isinstance(part.get_submodule(name), nn.Embedding)
            _replace(part, name, SkippedEmbedding() if is_embedding else nn.Identity())
    if not part.is_first and hasattr(library.base_model, "embedding_multiplier"):
        library.base_model.embedding_multiplier = 1.0  # the first stage has multiplied (Granite)
    for name in after if not part.is_last else ():
        _replace(part, name, nn.Identity())
    part.plan = match_tensor_plan(model.plan, part)
    return part


def _order_modules(model: HfModel, layers: str) -> list[str]:
    """Return the modules of the pipeline plan in the order of a forward: the head, which it lists first, is last."""
    plan = [name for name in model.family.modules if _has_module(model, name)] or get_pipeline_plan(model)
    base = layers.rpartition(".")[0]
    inner = [name for name in plan if name.rpartition(".")[0] == base]
    return [*inner, *(name for name in plan if name not in inner)]


def _has_module(model: nn.Module, name: str) -> bool:
    """Return whether the model has this module, which some configurations of a family leave out."""
    try:
        return isinstance(model.get_submodule(name), nn.Module)
    except AttributeError:
        return False


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)
