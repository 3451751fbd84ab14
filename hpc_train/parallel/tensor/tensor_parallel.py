"""Tensor parallelism: apply the model's tensor plan on the tp axis (Shoeybi et al. 2019, arXiv:1909.08053).

At rest every parameter is a DTensor on that axis, so that fully_shard finds one kind of parameter only; the model's
own code computes with the local tensors, and what ranks exchange is in the layers that the plan names. Hidden states
between layers, and so between pipeline stages, are plain tensors: (B, T / tp, h) where positions are split, else
(B, T, h).

Volume of a transformer layer, forward and backward, in calls over tensors of B T h numbers: 4 all-reduces, or with
split positions 4 all-gathers and 4 reduce-scatters, which together carry as many bytes.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn

from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import IGNORED_TARGET, Model, World
from hpc_train.models.adapters.names import is_adapter_parameter
from hpc_train.models.layers import cross_entropy_sum
from hpc_train.parallel.mesh_axes import get_axis_degree, provide_positions
from hpc_train.parallel.reduce_scatter import reduces_by_all_to_all
from hpc_train.parallel.tensor import head_layers, layers
from hpc_train.parallel.tensor.fused_layouts import FUSED_STYLES
from hpc_train.parallel.tensor.layers import TensorAxis
from hpc_train.parallel.tensor.local_parameters import ParameterLayouts, distribute_parameters
from hpc_train.parallel.tensor.tensor_plan import check_plan_coverage, read_tensor_plan


def apply_tensor_parallel(part: nn.Module, config: RunConfig, world: World) -> str:
    """Split the modules that the model's plan names over tp."""
    plan, options = read_tensor_plan(part, whole_model=get_axis_degree(world, "pp") == 1), config.parallel.tensor
    sequence = options.sequence and "seq" in plan.values()
    mesh = world.mesh["tp"]
    by_all_to_all = sequence and reduces_by_all_to_all(mesh.get_group(), world)
    axis = TensorAxis(mesh, sequence=sequence, symmetric=options.symmetric, by_all_to_all=by_all_to_all)
    if options.symmetric:
        from hpc_train.parallel.tensor.symmetric_matmul import check_symmetric_memory

        check_symmetric_memory(world.device)
    if axis.sequence:
        check_plan_coverage(part, plan)
        if "positions" in inspect.signature(part.forward).parameters:
            provide_positions(part, config, world)  # a stage's input does not show how many positions there are
    elif options.asynchronous:
        raise UserError(
            f"parallel.tensor.asynchronous=true: overlaps the exchange of positions, and {type(part).__name__}.plan "
            "has no lines seq; leave it out"
        )
    layouts: ParameterLayouts = {}
    _split_layers(part, plan, axis, options.asynchronous, layouts)
    if options.vocabulary:
        _split_vocabulary(part, plan, axis, layouts, has_logits=config.train.loss_chunk == 0)
    else:
        for name in _list_vocabulary(plan):
            layers.keep_vocabulary(part.get_submodule(name), axis)
    distribute_parameters(part, axis.mesh, layouts)
    counts = Counter(style for style in plan.values() if style != "seq" or axis.sequence)
    if not options.vocabulary:
        del counts["vocab"]
    description = ", ".join(f"{count} {style}" for style, count in sorted(counts.items()))
    return f"tensor: {description} modules over tp={axis.size}{', asynchronous' if options.asynchronous else ''}"


def _split_layers(
    part: nn.Module, plan: dict[str, str], axis: TensorAxis, asynchronous: bool, layouts: ParameterLayouts
) -> None:
    """Split the modules of a part as the tensor plan says: names -> styles, in the order of the plan."""
    groups: dict[str, dict[str, tuple[nn.Module, str]]] = {}
    norms: dict[str, dict[str, nn.Module]] = {}
    for name, style in plan.items():
        module = part.get_submodule(name)
        if style == "seq" and axis.sequence:
            layers.split_positions(module, axis, layouts)
        elif style == "col" or style in FUSED_STYLES:
            groups.setdefault(name.rpartition(".")[0], {})[name] = (module, style)
        elif style == "row":
            layers.split_rows(name, module, axis, asynchronous, layouts)
        elif style == "enter":
            head_layers.enter_heads(module, axis)
        elif style == "heads":
            head_layers.split_head_norm(name, module, axis, layouts)
        elif style == "all_heads":
            norms.setdefault(name.rpartition(".")[0], {})[name] = module
        elif style == "sinks":
            head_layers.split_sinks(module, layouts)
        elif style == "head_bias":
            head_layers.split_head_bias(module, axis, layouts)
        elif style == "shared_key":
            head_layers.share_key(module, part.get_submodule(name.rpartition(".")[0]), axis)
        elif style == "expert":
            from hpc_train.parallel.tensor.expert_layers import split_mixture

            split_mixture(name, module, axis, layouts)
        elif style == "stacked_experts":
            from hpc_train.parallel.tensor.stacked_experts import share_out_experts

            share_out_experts(name, module, axis, layouts)
    # Column-parallel layers of one parent have the same input, which is then gathered once for all of them.
    for parent, group in groups.items():
        layers.split_columns(part.get_submodule(parent), group, axis, asynchronous, layouts)
    for name in (name for name, style in plan.items() if style == "attention"):
        head_layers.count_local_heads(name, part.get_submodule(name), axis)  # last: layouts are of all heads
    for parent, group_norms in norms.items():
        from hpc_train.parallel.tensor.full_norms import split_full_norms

        split_full_norms(part.get_submodule(parent), group_norms, axis, layouts)


def _list_vocabulary(plan: dict[str, str]) -> list[str]:
    return [name for name, style in plan.items() if style == "vocab"]


def _split_vocabulary(
    part: nn.Module, plan: dict[str, str], axis: TensorAxis, layouts: ParameterLayouts, *, has_logits: bool
) -> None:
    modules = {name: part.get_submodule(name) for name in _list_vocabulary(plan)}
    rows = _find_vocabulary_size(part, modules.values())
    for name, module in modules.items():
        if isinstance(module, nn.Embedding):
            layers.split_embedding(name, module, axis, layouts)
        else:
            _check_loss(part, rows)
            layers.split_head(module, rows, axis, layouts, has_logits=has_logits)


def _find_vocabulary_size(part: nn.Module, modules: Iterable[nn.Module]) -> int:
    sizes = {
        len(parameter)
        for module in modules
        for name, parameter in module.named_parameters()
        if not is_adapter_parameter(name)
    }
    if len(sizes) > 1:
        raise UserError(
            f"{type(part).__name__}.plan: the vocab modules have {sorted(sizes)} rows; they must have the same number"
        )
    return max(sizes, default=0)


def _check_loss(part: nn.Module, classes: int) -> None:
    """Check that the model's loss is the cross entropy, which is computed here in its place for split logits."""
    assert isinstance(part, Model)
    logits = torch.linspace(-2.0, 2.0, 3 * classes, dtype=torch.float64).view(1, 3, classes).sin()
    target = torch.tensor([[classes - 1, IGNORED_TARGET, 0]])
    if not torch.allclose(part.loss_sum(logits, target), cross_entropy_sum(logits, target)):
        raise UserError(
            f"{type(part).__name__}.loss_sum is not the cross entropy, which is all that can be computed from split "
            "logits; use parallel.tensor.vocabulary=false"
        )
