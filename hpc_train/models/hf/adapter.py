"""A model of transformers as an interfaces.Model, under its own parameter names.

The class of a built model is replaced by a subclass with the methods that techniques ask for; nothing is wrapped, so
checkpoints, adapters and exports know the names that transformers knows.
"""

from __future__ import annotations

import copy
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from hpc_train.errors import UserError
from hpc_train.models.hf.families import Family, Task
from hpc_train.models.hf.library import is_block
from hpc_train.models.hf.translated_plan import make_tensor_plan
from hpc_train.models.layers import cross_entropy_sum


class HfModel(nn.Module):
    """The methods of interfaces.Model that a class of transformers lacks; `adapt_model` mixes them into its class."""

    plan: dict[str, str]
    family: Family
    task: Task
    block_names: list[str]
    is_first: bool
    is_last: bool

    def forward(
        self,
        x: Tensor | None = None,
        positions: Tensor | None = None,
        document_starts: Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """Run the model on its main input, or in a later pipeline stage on hidden states (B, T, hidden).

        positions: (T,), int64, where in its sequence each token stands; None: 0 ... T - 1. document_starts: (B, T),
        int64, the place at which the document of each place begins; the library keeps apart what positions restart at.
        inputs: further ones, or all of them, by the names that transformers has for them.
        Returns logits, or in a stage that is not the last hidden states.
        """
        if (
            x is not None and x.is_meta and not self.is_last
        ):  # asked for a shape only: the library looks at the values of positions
            return torch.empty(*x.shape[:2], self._get_width(), dtype=next(self.parameters()).dtype, device="meta")
        if x is not None:
            inputs[self._name_input(x)] = x
        if self.task in ("causal_lm", "seq2seq_lm"):
            inputs["use_cache"] = False
        if positions is not None:
            inputs["position_ids"] = positions.unsqueeze(0)
        if document_starts is not None:
            places = torch.arange(document_starts.shape[1], device=document_starts.device)
            inputs["position_ids"] = places - document_starts
        library = cast(Any, super())
        if self.is_last:
            return library.forward(**inputs).logits
        return cast(Any, self).base_model(**inputs).last_hidden_state

    def _name_input(self, x: Tensor) -> str:
        if self.task in ("causal_lm", "masked_lm") and x.is_floating_point():
            return "inputs_embeds"
        return str(cast(Any, self).main_input_name)

    def _get_width(self) -> int:
        return int(cast(Any, self).config.get_text_config().hidden_size)

    def blocks(self) -> dict[str, nn.Module]:
        """Return the layers by module name, in order."""
        return {name: self.get_submodule(name) for name in self.block_names}

    def stage(self, names: list[str]) -> nn.Module:
        """Return the part that holds the layers `names`, on the meta device."""
        from hpc_train.models.hf.stages import cut_stage

        return cut_stage(self, names)

    def expose_attention(self) -> None:
        """Compute attention in children that context parallelism can replace."""
        from hpc_train.models.hf.attention import expose_attention

        expose_attention(self)

    def loss_sum(self, out: Any, target: Tensor) -> Tensor:
        """Sum the cross entropy in nats. out: logits (..., classes); target: (...), int64."""
        return cross_entropy_sum(out, target)


def adapt_model(model: nn.Module, family: Family, task: Task) -> HfModel:
    """Give a model of transformers the methods of interfaces.Model, in place."""
    blocks = find_block_names(model)
    plan = make_tensor_plan(model, family) if family.tensor is None else {}
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, glob) for glob in family.unused):
            parameter.requires_grad_(False)
    model.__class__ = _make_adapted_class(type(model))  # type: ignore[arg-type]  # torch: __hash__(object)
    adapted = cast(HfModel, model)
    adapted.family, adapted.task, adapted.block_names, adapted.plan = family, task, blocks, plan
    adapted.is_first = adapted.is_last = True
    return adapted


@cache
def _make_adapted_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Make the subclass, under the class's own name and module: the library looks models up by both."""
    return type(kind.__name__, (HfModel, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def find_block_names(model: nn.Module) -> list[str]:
    """Return the names of the layers: the outermost elements of module lists that the model wants left whole.

    A model that names none has the elements of its module lists, such as ALBERT's groups of layers. Lists in lists, as
    Funnel has them, are no elements: they have no forward.
    """
    elements = {
        f"{path}.{key}" if path else key: element
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        for key, element in module.named_children()
        if not isinstance(element, (nn.ModuleList, nn.ModuleDict))
    }
    candidates = [name for name, element in elements.items() if is_block(model, element)] or list(elements)
    blocks: list[str] = []
    for name in candidates:  # an outer one comes before what it holds
        if not name.startswith(tuple(f"{outer}." for outer in blocks)):
            blocks.append(name)
    if not blocks:
        raise UserError(f"model: {type(model).__name__} of transformers does not say which of its modules are layers")
    return blocks


def copy_to_meta(model: HfModel) -> HfModel:
    """Return a copy of the model without memory: parameters and buffers on the meta device."""
    memo: dict[int, Any] = {}
    tensors = [*model.parameters(), *model.buffers()]
    for tensor in tensors:
        on_meta: Tensor = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            on_meta = nn.Parameter(on_meta, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = on_meta
    return copy.deepcopy(model, memo)
