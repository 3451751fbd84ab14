"""Which positions of a sequence a rank holds, and a hook that tells the model: context and sequence parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hpc_train.api import World
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.parallel.axes import degree, index


@dataclass(frozen=True)
class Share:
    """How the positions of a sequence lie on the ranks of the cp axis, and which of those ranks this is."""

    rank: int
    ranks: int
    balanced: bool
    """Cut into 2 x ranks chunks, of which rank r takes chunks r and 2 x ranks - 1 - r; else a chunk a rank."""

    def positions(self, length: int) -> Tensor:
        """Those of this rank, (length / ranks,), int64, ascending. UserError where `length` does not divide."""
        chunks = self.ranks * (2 if self.balanced else 1)
        if length % chunks:
            raise UserError(
                f"a sequence of {length} positions does not divide into the {chunks} equal parts that parallel.cp="
                f"{self.ranks} takes; use sequences of a multiple of {chunks}"
            )
        size = length // chunks
        mine = (self.rank, chunks - 1 - self.rank) if self.balanced else (self.rank,)
        return torch.cat([torch.arange(chunk * size, (chunk + 1) * size) for chunk in mine])


def share(config: RunConfig, world: World) -> Share:
    """This rank's share of every sequence."""
    context, ranks = config.parallel.context, degree(world, "cp")
    return Share(index(world, "cp"), ranks, context.method == "ring" and context.balanced and ranks > 1)


def provide(part: nn.Module, config: RunConfig, world: World) -> None:
    """Give every forward of `part` the argument `positions` (T,), T being the length before tp splits positions.

    A caller's own `positions` go first, so that two techniques may both ask for this.
    """
    mine, tp = share(config, world), degree(world, "tp")
    splits = config.parallel.tensor.sequence and "seq" in getattr(part, "plan", {}).values()

    def fill(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if len(args) > 1 or kwargs.get("positions") is not None:
            return None
        x: Tensor = args[0]
        whole = getattr(part, "is_first", not x.is_floating_point())  # tp splits hidden states, and no tokens
        length = x.shape[1] * (tp if splits and not whole else 1)
        positions = mine.positions(length * mine.ranks).to(x.device, non_blocking=True)
        return args, {**kwargs, "positions": positions}

    part.register_forward_pre_hook(fill, with_kwargs=True)
