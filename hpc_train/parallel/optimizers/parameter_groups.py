"""Say which optimizer updates a parameter, and with which settings: by name, by shape, and by where it is in the model.

A glob that matches no parameter of the whole model is an error. With pipeline stages a rank has only some of the
names, so the ranks agree on what matched.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hpc_train.config.optim import OptimConfig, ParameterGroupConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.models.experts import Experts
from hpc_train.parallel.materialise import is_rehearsal
from hpc_train.parallel.mesh_axes import get_axis_degree
from hpc_train.parallel.optimizer_step import Stages
from hpc_train.parallel.user_model import get_named_blocks


@dataclass(frozen=True)
class TrainedParameter:
    """A parameter that is trained, and what its optimizer depends on."""

    name: str
    value: nn.Parameter
    hidden: bool
    """A matrix, or a stack of an expert's matrices, inside one of the model's blocks."""
    embedding: bool
    """The table of an embedding."""


def list_trained(split: nn.Module) -> list[TrainedParameter]:
    """List the trained parameters of a model, or of the stages of a rank. Raises UserError if there are none."""
    trained: dict[nn.Parameter, TrainedParameter] = {}
    for part in list_parts(split):
        for parameter in _list_of_part(part):
            trained.setdefault(parameter.value, parameter)  # stages of one rank may share a parameter
    if not trained:
        raise UserError("model: no parameter requires a gradient; there is nothing to train")
    return list(trained.values())


def list_parts(split: nn.Module) -> list[nn.Module]:
    """Return the stages of a rank, or the model itself."""
    return list(split) if isinstance(split, Stages) else [split]


def _list_of_part(part: nn.Module) -> Iterator[TrainedParameter]:
    blocks = {p for block in get_named_blocks(part).values() for p in block.parameters()}
    tables = {p for m in part.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) for p in m.parameters()}
    stacks = {p for m in part.modules() if isinstance(m, Experts) for p in m.parameters()}
    for name, p in part.named_parameters():
        if p.requires_grad:
            hidden = p in blocks and p not in tables and (p.ndim == 2 or p in stacks)
            yield TrainedParameter(name, p, hidden, p in tables)


def select_for_muon(trained: Sequence[TrainedParameter], config: OptimConfig, world: World) -> set[nn.Parameter]:
    """Return the parameters that Muon updates. Raises UserError for globs that name what it cannot update."""
    globs = config.muon.parameters
    if not globs:
        selected = [parameter for parameter in trained if parameter.hidden]
        if not agree_on([bool(selected)], world)[0]:
            raise UserError(
                "optim.name=muon: the model has no matrices in blocks(); name hidden matrices with "
                "optim.muon.parameters=['<glob>'], or use optim=adamw"
            )
        return {parameter.value for parameter in selected}
    check_globs(globs, "optim.muon.parameters", trained, world)
    selected = [parameter for parameter in trained if any(fnmatchcase(parameter.name, glob) for glob in globs)]
    for parameter in selected:
        if parameter.embedding:
            raise UserError(
                f"optim.muon.parameters: {parameter.name} is an embedding, which AdamW updates; leave it out"
            )
        if not parameter.hidden and parameter.value.ndim != 2:
            raise UserError(
                f"optim.muon.parameters: {parameter.name} has {parameter.value.ndim} dimensions, and Muon updates "
                "matrices; leave it out"
            )
    return {parameter.value for parameter in selected}


def make_groups(
    trained: Sequence[TrainedParameter], config: OptimConfig, *, by_mesh: bool = False
) -> list[dict[str, Any]]:
    """Return torch's parameter groups: `params`, `weight_decay` and `lr_factor`, those of matrices first.

    by_mesh: separate the parameters of different meshes, for an optimizer that steps over lists of DTensors: torch's
    kernels take those of one mesh at a time, and experts are on a mesh of their own.
    """
    groups: dict[tuple[bool, ParameterGroupKey, object], list[nn.Parameter]] = {}
    for parameter in trained:
        mesh = parameter.value.device_mesh if by_mesh and isinstance(parameter.value, DTensor) else None
        is_vector = parameter.value.ndim < 2
        rule = find_group(parameter.name, config.groups)
        decay = 0.0 if is_vector else config.weight_decay
        if rule is not None and rule.weight_decay is not None:
            decay = rule.weight_decay
        key = ParameterGroupKey(decay, 1.0 if rule is None else rule.lr_scale)
        groups.setdefault((is_vector, key, mesh), []).append(parameter.value)
    return [
        {"params": parameters, "weight_decay": key.weight_decay, "lr_factor": key.lr_factor}
        for (_, key, _), parameters in sorted(groups.items(), key=lambda item: item[0][0])
    ]


@dataclass(frozen=True)
class ParameterGroupKey:
    """Settings that all parameters of a group share."""

    weight_decay: float
    lr_factor: float


def find_group(name: str, groups: Sequence[ParameterGroupConfig]) -> ParameterGroupConfig | None:
    """Return the first group whose glob matches a name."""
    return next((group for group in groups if fnmatchcase(name, group.match)), None)


def check_globs(globs: Sequence[str], option: str, trained: Sequence[TrainedParameter], world: World | None) -> None:
    """Raise UserError for a glob that matches no parameter of the whole model, with the nearest names."""
    names = [parameter.name for parameter in trained]
    matched = agree_on([any(fnmatchcase(name, glob) for name in names) for glob in globs], world)
    for glob, is_matched in zip(globs, matched, strict=True):
        if not is_matched:
            close_names = difflib.get_close_matches(glob.replace("*", ""), names, n=3, cutoff=0.3) or names[:3]
            raise UserError(f"{option}: '{glob}' matches no trained parameter; near are {', '.join(close_names)}")


def agree_on(flags: list[bool], world: World | None) -> list[bool]:
    """Return what is true on any rank; stages have different parameters. In a rehearsal only rank 0's is known."""
    if world is None or not flags or get_axis_degree(world, "pp") == 1:
        return flags
    if is_rehearsal():
        return [True] * len(flags)
    counts = torch.tensor(flags, dtype=torch.int32, device=world.device)
    dist.all_reduce(counts)
    return [bool(count) for count in counts.tolist()]
