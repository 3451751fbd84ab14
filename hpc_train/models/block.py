"""A pre-norm block, and the blocks that one stage of a model holds."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

from torch import Tensor, nn

from hpc_train.models.attention import Attention
from hpc_train.models.dropout import Dropout
from hpc_train.models.rotary import Table


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)), with dropout on both branches."""

    def __init__(
        self, attention: Attention, feed_forward: nn.Module, norm: Callable[[], nn.Module], dropout: float
    ) -> None:
        super().__init__()
        self.attention_norm = norm()
        self.attention = attention
        self.feed_forward_norm = norm()
        self.feed_forward = feed_forward
        self.attention_dropout = Dropout(dropout)
        self.feed_forward_dropout = Dropout(dropout)

    def forward(self, x: Tensor, table: Table | None = None) -> Tensor:
        """x (B, T, hidden) -> (B, T, hidden)."""
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), table))
        out: Tensor = x + self.feed_forward_dropout(self.feed_forward(self.feed_forward_norm(x)))
        return out


def block_names(layers: int) -> list[str]:
    """Module names of all blocks of a model, in order."""
    return [f"layers.{index}" for index in range(layers)]


def ends(names: list[str], layers: int) -> tuple[bool, bool]:
    """Whether the stage with the blocks `names` is the first of its model, and whether it is the last."""
    every = block_names(layers)
    assert names, "a stage holds at least one block"
    assert names == [name for name in every if name in names], f"not blocks of this model in its order: {names}"
    return names[0] == every[0], names[-1] == every[-1]


def held_blocks(names: list[str], make: Callable[[], Block]) -> nn.ModuleDict:
    """The blocks `names` under the keys that give their parameters the names they have in the whole model."""
    return nn.ModuleDict({name.removeprefix("layers."): make() for name in names})


def matching(plan: dict[str, str], module: nn.Module) -> dict[str, str]:
    """The lines of a plan that match a module here: a stage and a variant of a model lack some."""
    names = [name for name, _ in module.named_modules()]
    return {glob: how for glob, how in plan.items() if any(fnmatchcase(name, glob) for name in names)}
