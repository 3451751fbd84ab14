"""The instructions of a pipeline: computations of one stage with one micro-batch, in an order for each rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What is computed."""

    F = "F"
    """Forward."""
    I = "I"  # noqa: E741  the field's letter
    """Backward for the inputs: the gradient that the stage before waits for."""
    W = "W"
    """Backward for the weights, any time after I (Qi et al. 2024, arXiv:2401.10241)."""
    B = "B"
    """I and W at once."""


class Action(NamedTuple):
    """One computation; str() is torch's notation, such as 2F0."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @property
    def gives(self) -> tuple[Action, ...]:
        """What is computed when this is done, in terms of F, I and W alone."""
        if self.kind is not Kind.B:
            return (self,)
        return Action(self.stage, Kind.I, self.micro_batch), Action(self.stage, Kind.W, self.micro_batch)

    def needs(self, stages: int) -> tuple[Action, ...]:
        """What must have been computed before, in terms of F and I alone; `stages`: of the whole pipeline."""
        if self.kind is Kind.F:
            return (Action(self.stage - 1, Kind.F, self.micro_batch),) if self.stage else ()
        if self.kind is Kind.W:
            return (Action(self.stage, Kind.I, self.micro_batch),)
        own = Action(self.stage, Kind.F, self.micro_batch)
        return (own,) if self.stage == stages - 1 else (own, Action(self.stage + 1, Kind.I, self.micro_batch))


@dataclass(frozen=True)
class Overlap:
    """A forward and a backward of one rank that hide each other's communication; they begin and end as one.

    torch computes first one and then the other, and sends both results at the end.
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Step = Action | Overlap
"""One entry of a rank's list."""


def parts(step: Step) -> tuple[Action, ...]:
    """The computations of an entry, in their order."""
    return (step,) if isinstance(step, Action) else (step.forward, step.backward)


@dataclass(frozen=True)
class Order:
    """What every rank does, one entry after another."""

    rows: tuple[tuple[Step, ...], ...]
    """The entries of each rank."""
    placement: tuple[int, ...]
    """The rank of each stage."""

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def micro_batches(self) -> int:
        """How many there are, if they are numbered without a gap."""
        seen = (action.micro_batch for rank in range(self.ranks) for action in self.actions(rank))
        return max(seen, default=-1) + 1

    @property
    def splits_backward(self) -> bool:
        """Whether some gradients of weights are computed apart."""
        return any(action.kind is Kind.W for rank in range(self.ranks) for action in self.actions(rank))

    def actions(self, rank: int) -> Iterator[Action]:
        """All computations of a rank, in order."""
        for step in self.rows[rank]:
            yield from parts(step)


def looped(ranks: int, virtual_stages: int = 1) -> tuple[int, ...]:
    """Placement round and round (Narayanan et al. 2021, arXiv:2104.04473, section 2.2)."""
    return tuple(range(ranks)) * virtual_stages


def v_shaped(ranks: int) -> tuple[int, ...]:
    """Placement of two stages a rank, there and back (Qi et al. 2024, arXiv:2401.10241, section 6)."""
    return (*range(ranks), *reversed(range(ranks)))
