"""Sums over copies of the model, of which any but rank 0's may be lost (parallel.sync.lost_after_seconds).

A gloo group is unusable once a rank is gone, and the loss may fail a sum on some ranks and not on others. So after a
failure every copy says through the job's store how many sums it has completed. Rank 0 decides which copies go on, and
these make a new group. If some of them have completed the sum in question, it counts, and the others get its result;
otherwise all make it again without the lost copy. The copies that go on have thus had the same sums of the same copies.

The ranks of a copy stand or fall together: a sum counts as completed if all of them have it, each over the ranks at its
own place in the copies. Messages go through host memory, also on GPUs, because NCCL has no error for a lost rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train._torch.process_groups import make_named_group
from hpc_train.config.parallel import AXES
from hpc_train.errors import LostRanksError
from hpc_train.interfaces import World
from hpc_train.parallel.mesh_axes import get_axis_index
from hpc_train.runtime.consensus import report_lost_ranks
from hpc_train.runtime.store.client import JobStore
from hpc_train.runtime.store.exchange import publish_value, read_published

_POLL_SECONDS = 0.02
_MAX_ROUNDS = 3
"""Groups in a row that may fail while no copy is lost; then something else is wrong."""
_RANK_0_IS_LOST = "rank 0, or process 0 with the job's store, is lost: the other copies of the model cannot go on"


@dataclass(frozen=True)
class LostCopy:
    """A copy that no longer takes part."""

    copy: int
    ranks: tuple[int, ...]
    """Global ranks of the job."""
    why: str


class CopyGroup:
    """The copies that take part in a run, as one rank of one of them sees it."""

    def __init__(self, world: World, copy_world: World, lost_after: float) -> None:
        """Make the first group. A collective of all ranks of the job.

        copy_world: of this rank's copy. lost_after: seconds after which a copy that does not answer is lost.
        """
        assert world.store is not None
        self.world = world
        """The ranks of the copies that take part."""
        self.counted = 0
        """How many copies the last sum was of."""
        self._job, self._copy_world, self._store, self._lost_after = world, copy_world, world.store, lost_after
        ranks_of_copies = world.mesh.mesh.unbind(AXES.index("dp_replicate"))
        self._ranks: list[list[int]] = [ranks.flatten().tolist() for ranks in ranks_of_copies]
        self._copy, self._copies = get_axis_index(world, "dp_replicate"), list(range(len(ranks_of_copies)))
        self._completed = self._rounds = self._failures = 0
        self._last: Tensor | None = None
        self._lost: list[LostCopy] = []
        self._group: dist.ProcessGroup | None = None
        self._last_error = ""
        if self._is_first and isinstance(self._store, JobStore):
            self._store.set_at_end(_ended_key(self._copy), "")
        with report_lost_ranks():
            self._make_group()

    @property
    def index(self) -> int:
        """Index of this rank's copy among those that take part."""
        return self._copies.index(self._copy)

    @property
    def size(self) -> int:
        """Number of copies that take part."""
        return len(self._copies)

    def take_lost_copies(self) -> list[LostCopy]:
        """Return the copies that were lost since the last call; the same on all ranks after the same sum."""
        lost, self._lost = self._lost, []
        return lost

    def meet(self) -> None:
        """Notice a copy that was lost since the last sum."""
        self.sum(torch.zeros(1))

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over the copies, which all give as many.

        Raises LostRanksError if this copy cannot go on: it lost a rank, the others have gone on without it, or rank 0
        is lost.
        """
        return self._complete(lambda: _sum(values, self._group), lambda _: torch.empty_like(values, device="cpu"))

    def gather(self, message: Tensor) -> Tensor:
        """Return the messages of the copies, (copies, elements). message: (elements,). Raises as `sum`."""

        def make_room(copies: int) -> Tensor:
            return torch.empty(copies, len(message), dtype=message.dtype)

        return self._complete(lambda: _gather(message, make_room(self.size), self._group), make_room)

    def _complete(self, attempt: Callable[[], Tensor], make_room: Callable[[int], Tensor]) -> Tensor:
        """Return the result of `attempt`, made again after each failure, or the result that others have had.

        make_room: makes a tensor for a result of so many copies.
        """
        while True:
            result = self._try(attempt)
            if self._is_complete(result):
                assert result is not None
                return self._accept(result, self.size)
            received = self._recover(make_room)
            if received is not None:
                return received

    def _accept(self, result: Tensor, copies: int) -> Tensor:
        self._completed, self._last, self.counted, self._failures = self._completed + 1, result, copies, 0
        return result.clone()  # what the caller makes of the sum must not reach copies that still need it

    def _try(self, attempt: Callable[[], Tensor]) -> Tensor | None:
        try:
            return attempt()
        except RuntimeError as error:
            self._last_error = " ".join(str(error).split())[:200]
            return None

    def _is_complete(self, result: Tensor | None) -> bool:
        """Return whether all ranks of this copy have a result. Raises LostRanksError if one of them is gone."""
        have = torch.tensor(int(result is not None))
        if self._copy_world.size > 1:
            with report_lost_ranks():
                dist.all_reduce(have, dist.ReduceOp.MIN, group=self._copy_world.group)
        return bool(have.item())

    def _recover(self, make_room: Callable[[int], Tensor]) -> Tensor | None:
        """Make a group of the copies that are left; return the result of the failed sum if some copy has completed it.

        make_room: see `_complete`.
        """
        copies = self.size
        while True:
            completed = self._agree()
            result = self._try(partial(self._regroup, completed, make_room(copies)))
            if self._is_complete(result):
                assert result is not None
                behind = self._completed < max(completed.values())
                return self._accept(result.to(self._job.device), copies) if behind else None

    def _regroup(self, completed: dict[int, int], room: Tensor) -> Tensor:
        """Make a group of the copies that are left; return the last sum that any of them has completed.

        completed: how many each has completed. room: for the result of the failed sum, which some may have completed.
        """
        self._make_group()
        newest_update = max(completed.values())
        if self._group is None or min(completed.values()) == newest_update:
            return room  # no copy lacks a sum that another one has
        source = next(copy for copy in self._copies if completed[copy] == newest_update)
        if self._completed == newest_update:
            assert self._last is not None
            room = self._last.cpu()
        dist.broadcast(room, group_src=self._copies.index(source), group=self._group)
        return room

    def _agree(self) -> dict[int, int]:
        """Leave the broken group, and agree on the copies that go on; returns how many sums each has completed."""
        self._close_group()
        self._rounds += 1
        key = f"copies/{self._rounds}"
        try:
            if self._is_first:
                publish_value(self._store, f"{key}/completed/{self._copy}", self._completed)
            if self._is_first and self._copy == 0:
                publish_value(self._store, f"{key}/decision", self._decide(key))
            decision = self._read_decision(f"{key}/decision")
        except dist.DistError as error:
            raise LostRanksError(_RANK_0_IS_LOST) from error
        completed = {int(copy): int(count) for copy, count in decision["completed"]}
        if self._copy not in completed:
            raise LostRanksError("this copy of the model answered too late: the others go on without it")
        for copy, why in decision["lost"]:
            self._copies.remove(copy)
            self._lost.append(LostCopy(copy, tuple(self._ranks[copy]), why))
        self._failures = 0 if decision["lost"] else self._failures + 1
        if self._failures > _MAX_ROUNDS:
            raise LostRanksError(f"the copies of the model cannot exchange, though none is lost ({self._last_error})")
        return completed

    @property
    def _is_first(self) -> bool:
        """Whether this rank speaks for its copy."""
        return self._copy_world.rank == 0

    def _decide(self, key: str) -> dict[str, Any]:
        """Wait for each copy to answer or to be lost. Called on rank 0."""
        completed: dict[int, int] = {}
        lost: dict[int, str] = {}
        deadline = time.monotonic() + self._lost_after
        while waiting := [copy for copy in self._copies if copy not in completed and copy not in lost]:
            late = time.monotonic() > deadline
            for copy in waiting:
                if self._store.check([f"{key}/completed/{copy}"]):
                    completed[copy] = read_published(self._store, f"{key}/completed/{copy}")
                elif self._store.check([_ended_key(copy)]):
                    lost[copy] = "its process has ended"
                elif late:
                    lost[copy] = f"it has not answered for {self._lost_after:g} s"
            time.sleep(_POLL_SECONDS)
        return {"completed": list(completed.items()), "lost": list(lost.items())}

    def _read_decision(self, key: str) -> dict[str, Any]:
        # Rank 0 may come to the failed sum as late as any other copy, and then waits for the others as long again.
        deadline = time.monotonic() + 2 * self._lost_after + 1
        while not self._store.check([key]):
            if self._store.check([_ended_key(0)]) or time.monotonic() > deadline:
                raise LostRanksError(_RANK_0_IS_LOST)
            time.sleep(_POLL_SECONDS)
        decision: dict[str, Any] = read_published(self._store, key)
        return decision

    def _make_group(self) -> None:
        """Make the group of the ranks at this place of the copies and, once a copy is lost, that of all ranks left."""
        self._group = self._join([self._ranks[copy][self._copy_world.rank] for copy in self._copies], "place")
        surviving_ranks = [rank for copy in self._copies for rank in self._ranks[copy]]
        if len(surviving_ranks) < self._job.size:
            group = self._join(sorted(surviving_ranks), "left")
            self.world = replace(
                self._job, rank=sorted(surviving_ranks).index(self._job.rank), size=len(surviving_ranks), group=group
            )

    def _join(self, ranks: Sequence[int], kind: str) -> dist.ProcessGroup | None:
        if len(ranks) == 1:
            return None
        name = f"copies-{self._rounds}-{kind}-{ranks[0]}"
        return make_named_group(ranks, name, self._store, timedelta(seconds=self._lost_after))

    def _close_group(self) -> None:
        """Close the connections, so that the ranks that still wait in this group fail at once, too."""
        groups = [group for group in (self._group, self.world.group) if group is not None]
        self._group, self.world = None, replace(self.world, group=None)
        while groups:
            dist.destroy_process_group(groups.pop())


def _ended_key(copy: int) -> str:
    return f"copies/ended/{copy}"


def _sum(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    total = values.detach().to("cpu", copy=True)
    if group is not None:
        dist.all_reduce(total, group=group)
    return total.to(values.device)


def _gather(message: Tensor, room: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        room.copy_(message.view_as(room))
    else:
        dist.all_gather_into_tensor(room.view(-1), message.cpu(), group=group)
    return room.to(message.device)
