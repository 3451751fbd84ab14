"""The tensor plan of a model of transformers in our words: the library's own, or its family's."""

from __future__ import annotations

import fnmatch
import re
from typing import Any, cast

from torch import nn

from hpc_train.models.hf.families import Family
from hpc_train.models.hf.family_plans import Projections
from hpc_train.models.hf.library import get_tensor_plan
from hpc_train.models.layers import match_tensor_plan

_SPLITS = {
    "colwise": "col",
    "rowwise": "row",
    "replicated_with_grad_allreduce": "heads",
    "moe_tp_experts": "stacked_experts",
    "mla_kv_a_proj": "shared_key",
}
"""transformers' words in a tensor plan -> ours; a plan with another one, as for packed matrices, is not applied."""
_VOCABULARY = {"colwise_gather_output", "embedding_rowwise"}
_HEAD_NORM = re.compile(r"(q|k|query|key)_(layer)?norm")
"""Names of norms of queries and keys in an attention."""


def make_tensor_plan(model: nn.Module, family: Family) -> dict[str, str]:
    """Translate the model's tensor plan, or take the family's own: name glob -> col, row, heads, vocab, ...

    With a plan of the library, embedding and head are split by vocabulary. With one of the family's own they stay whole
    on each rank, unless it names them. Empty for a plan that cannot be applied.
    """
    plan = dict(_choose_projections(model, family)) or _translate_plan(model)
    return match_tensor_plan({**_add_head_norms(plan, model), **plan}, model)


def _choose_projections(model: nn.Module, family: Family) -> Projections:
    """Return the family's own lines; those for one key of all heads where the model has one (Falcon, GPT-BigCode)."""
    config: Any = model.config
    one_key = getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False)
    return family.one_key_projections if one_key and family.one_key_projections else family.projections


def _translate_plan(model: nn.Module) -> dict[str, str]:
    plan: dict[str, str] = {}
    names = [name for name, _ in model.named_modules()]
    for glob, how in get_tensor_plan(model).items():
        if how in _VOCABULARY or not fnmatch.filter(names, glob):  # parameters of experts have lines, as their module
            continue
        if how not in _SPLITS:
            return {}
        plan[glob] = _SPLITS[how]
    ends = cast(Any, model).get_input_embeddings(), cast(Any, model).get_output_embeddings()
    vocabulary = {name: "vocab" for name, module in model.named_modules() if module in ends}
    return {**_add_shared_experts(plan), **plan, **vocabulary}


def _add_shared_experts(plan: dict[str, str]) -> dict[str, str]:
    """Return the lines of feed-forward layers for the experts that all tokens share, which are such layers too."""
    return {
        glob.replace(".mlp.", f".mlp.{name}."): how
        for glob, how in plan.items()
        for name in ("shared_expert", "shared_experts")
        if re.fullmatch(r".*\.mlp\.\w+_proj", glob)
    }


def _add_head_norms(plan: dict[str, str], model: nn.Module) -> dict[str, str]:
    """Return lines for norms of queries and keys that a plan leaves out: config.json may ask for them (Phi, Cohere)."""
    lines: dict[str, str] = {}
    columns = [glob for glob, how in plan.items() if how == "col"]
    for path, attention in model.named_modules():
        norms = {name: module for name, module in attention.named_children() if _HEAD_NORM.fullmatch(name)}
        children = [f"{path}.{name}" for name, _ in attention.named_children()] if norms else []
        if not any(fnmatch.filter(children, glob) for glob in columns):
            continue
        for name, norm in norms.items():
            weight = dict(norm.named_parameters(recurse=False)).get("weight")
            if weight is not None and not any(fnmatch.fnmatchcase(f"{path}.{name}", glob) for glob in plan):
                of_heads = weight.ndim == 2 or weight.numel() == getattr(attention, "head_dim", None)
                lines[re.sub(r"\.\d+\.", ".*.", f"{path}.{name}")] = "heads" if of_heads else "all_heads"
    return lines
