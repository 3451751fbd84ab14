"""Activation recomputation: save less of a block's forward, and run it again in backward.

For whole blocks see Chen et al. 2016 (arXiv:1604.06174); for a choice of operators Korthikanti et al. 2022
(arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.parallel.user_model import Forward, get_blocks, replace_forward
from hpc_train.traffic.stages import splits_backward

GROUPS = {
    "mm": ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm"),
    "attention": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "hpc_train.ring_attention",
        "hpc_train.plain_attention",
    ),
}
"""Names that stand for several ATen operators: matrix products, and the fused kernels of attention."""


def recompute_activations(part: nn.Module, config: RunConfig) -> str:
    """Recompute every k-th block in backward: keep its inputs (full), or results of some operators too (selective)."""
    recompute = config.parallel.recompute
    blocks = get_blocks(part, f"parallel.recompute.mode={recompute.mode}")
    recomputed = blocks[:: recompute.every]
    keep = KeepPolicy.from_names(recompute.keep) if recompute.mode == "selective" else None
    splits = config.parallel.pp > 1 and splits_backward(config.parallel.pipeline)
    wrap: Callable[[Forward], Forward] = wrap_recompute_once if splits else partial(wrap_recompute, keep=keep)
    for block in recomputed:
        replace_forward(block, wrap)
    if keep is not None:
        keep.check_after(recomputed[-1])
    exceptions = f" but {', '.join(recompute.keep)}" if keep is not None else ""
    return f"recompute: everything{exceptions} in {len(recomputed)} of {len(blocks)} blocks"


@dataclass
class KeepPolicy:
    """A policy of torch's selective checkpointing: save the results of these operators, recompute all others."""

    names: dict[Any, str]
    """The user's name for each operator (torch.ops.aten.*)."""
    ran: set[Any] = field(default_factory=set)
    """Operators that have run in the blocks so far."""

    @classmethod
    def from_names(cls, names: Iterable[str]) -> KeepPolicy:
        """Make the policy for the names in parallel.recompute.keep. Raises UserError for an unknown operator."""
        return cls({operator: name for name in names for operator in _list_operators(name)})

    def __call__(
        self, context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        packet = getattr(operator, "overloadpacket", operator)
        self.ran.add(packet)
        return CheckpointPolicy.MUST_SAVE if packet in self.names else CheckpointPolicy.PREFER_RECOMPUTE

    def check_after(self, block: nn.Module) -> None:
        """Raise UserError after the first recomputed forward of `block` if a name matched no operator."""

        name = type(block).__name__  # fully_shard will call it something else

        def check(*_: Any) -> None:
            if self.ran:
                handle.remove()
                self._check(name)

        handle = block.register_forward_hook(check)

    def _check(self, block: str) -> None:
        unmatched = set(self.names.values()) - {self.names[packet] for packet in self.ran & self.names.keys()}
        if unmatched:
            ran = ", ".join(sorted(str(packet).removeprefix("aten.") for packet in self.ran))
            raise UserError(
                f"parallel.recompute.keep: {min(unmatched)} matches no operator of {block}; take it out, or name some "
                f"of those that ran: {ran}"
            )


def _list_operators(name: str) -> list[Any]:
    members = GROUPS.get(name, (name.removeprefix("aten."),))
    operators = [_find_operator(member) for member in members]
    if operators == [None]:
        raise UserError(
            f"parallel.recompute.keep: {name} is not an operator of torch {torch.__version__}; use {', '.join(GROUPS)} "
            "or the name of an ATen operator, such as _softmax"
        )
    return [operator for operator in operators if operator is not None]


def _find_operator(name: str) -> Any:
    namespace, _, operator = name.rpartition(".")
    return getattr(getattr(torch.ops, namespace or "aten"), operator, None)


def wrap_recompute_once(forward: Forward) -> Forward:
    """Wrap `forward` to save only its arguments, for a backward in two parts; see recompute_once."""
    from hpc_train.parallel.memory.recompute_once import recompute_once

    return partial(recompute_once, forward)


def wrap_recompute(forward: Forward, keep: KeepPolicy | None) -> Forward:
    """Wrap `forward` to save only its arguments, and results that `keep` names, and to run again in backward."""
    options: dict[str, Any] = {"use_reentrant": False}
    if keep is not None:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, keep)
    return partial(checkpoint, forward, **options)
