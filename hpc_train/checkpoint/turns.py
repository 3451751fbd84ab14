"""Ranks of a node that write one after another, where its link or its disk is slower with many streams at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from hpc_train.checkpoint.agreement import hear, tell
from hpc_train.checkpoint.errors import LostRanksError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


@dataclass(frozen=True)
class Turns:
    """A rank's place in a row: it begins when one rank has ended, and then tells another. No rank: nobody waits."""

    before: int | None = None
    after: int | None = None

    def run(self, work: Callable[[], T], group: ProcessGroup | None = None) -> T:
        """Do it when it is this rank's turn, which the next has as soon as it ends, or fails.

        Raises LostRanksError where the one before is gone, or does not end within the group's timeout.
        """
        try:
            if self.before is not None:
                hear(self.before, group)
            return work()
        finally:
            if self.after is not None:
                with suppress(LostRanksError):  # all will hear of it when they meet
                    tell(None, self.after, group)


def turns_of(rank: int, nodes: Sequence[int], writers: int) -> Turns:
    """So that at most `writers` ranks of a node are at it at a time; 0: all of them.

    nodes: that of every rank.
    """
    here = [it for it, node in enumerate(nodes) if node == nodes[rank]]
    at = here.index(rank)
    if not writers:
        return Turns()
    before = here[at - writers] if at >= writers else None
    after = here[at + writers] if at + writers < len(here) else None
    return Turns(before, after)
