"""Match a model's tensor plan with its modules: which of them are split over tp, and how."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from hpc_train.errors import UserError
from hpc_train.interfaces import Model
from hpc_train.models.adapters.adapted_linear import AdaptedLayer, is_conv1d
from hpc_train.parallel.tensor.fused_layouts import FUSED_STYLES

_KINDS: dict[str, tuple[type[nn.Module], ...]] = {
    "col": (nn.Linear,),  # each rank computes some of the outputs
    "row": (nn.Linear,),  # each rank computes with some of the inputs; the results are summed
    "vocab": (nn.Linear, nn.Embedding),  # each rank has some of the tokens
    "seq": (nn.Module,),  # each rank runs the whole module on its own positions
    "heads": (nn.Module,),  # each rank runs the whole module, such as a norm of queries, on its own heads
    "all_heads": (nn.Module,),  # a root-mean-square norm over all heads, of which each rank has some
    "enter": (nn.Identity,),  # where an activation that all heads share passes to the heads of each rank
    "attention": (nn.Module,),  # code that must count this rank's heads only
    "head_bias": (nn.Embedding,),  # a column for each head, of which each rank returns its own
    "shared_key": (nn.Linear,),  # makes the rotary part of a key that all heads share, beside what col layers read
    "stacked_experts": (nn.Module,),  # experts whose parameters are stacked: each rank has some of them, whole
    "fused_qkv": (nn.Linear,),  # heads of queries, then of keys, then of values: each rank has some of each
    "fused_gate_up": (nn.Linear,),  # two equal parts: each rank has some outputs of both
    "sinks": (nn.Module,),  # an attention with a parameter `sinks`, an entry for each head
    "expert": (nn.Module,),  # a mixture of experts, the width of each of which is split
}
"""How a module may be split, and which modules can be."""


def read_tensor_plan(part: nn.Module, *, whole_model: bool) -> dict[str, str]:
    """Map module names to how each is split (see _KINDS), for every module that a line of the plan matches.

    whole_model: `part` is the model and not one of its stages, so every line of the plan must match a module.
    Raises UserError for a line that matches nothing, contradicts another one, or asks for what its module cannot do.
    """
    assert isinstance(part, Model)
    title = f"{type(part).__name__}.plan"
    modules = dict(part.named_modules())
    styles: dict[str, str] = {}
    for glob, style in part.plan.items():
        names = [name for name in modules if fnmatchcase(name, glob)]
        if whole_model and not names:
            raise UserError(f"{title}: {glob!r} matches no module; correct or remove that line")
        for name in names:
            _check_line(title, glob, name, modules[name], style)
            if styles.setdefault(name, style) != style:
                raise UserError(f"{title}: {name} is both {styles[name]} and {style}; keep one of these lines")
    if not set(styles.values()) & {"col", "row", "vocab", "expert", "stacked_experts", *FUSED_STYLES}:
        raise UserError(
            f"{title}: no line col, row, vocab or expert matches a module: parallel.tp has nothing to split"
        )
    return styles


def _check_line(title: str, glob: str, name: str, module: nn.Module, style: str) -> None:
    if style not in _KINDS:
        raise UserError(f"{title}: {glob!r} is {style!r}; use {', '.join(_KINDS)}")
    tied_head = style == "vocab" and not any(True for _ in module.parameters())
    is_linear = style in ("col", "row", *FUSED_STYLES) and (isinstance(module, AdaptedLayer) or is_conv1d(module))
    if not isinstance(module, _KINDS[style]) and not tied_head and not is_linear:
        expected = " or ".join(kind.__name__ for kind in _KINDS[style])
        raise UserError(f"{title}: {name} is {type(module).__name__}, and only {expected} can be {style}")


def check_plan_coverage(part: nn.Module, plan: dict[str, str]) -> None:
    """Raise UserError for parameters that no line names, where the plan splits positions.

    Nobody could tell whether such a module sees all positions or this rank's, hence whether to add its gradients up.
    """
    kind = type(part).__name__
    for name, _ in part.named_parameters():
        module_name = name.rpartition(".")[0]
        parents = [module_name.rsplit(".", cut)[0] for cut in range(module_name.count(".") + 1)]
        if not any(parent in plan for parent in parents):
            raise UserError(
                f"{kind}.plan: names {name} in no line, but has lines seq; name it seq if it sees the positions "
                "between layers, or use parallel.tensor.sequence=false"
            )
