"""Agree between ranks: rank 0 decides, and all ranks succeed or all raise the same error.

With a process group: `Consensus`, for all ranks, for some of them, or for two. Values travel as data
(hpc_train.messages) over CPU tensors; nothing is unpickled. A rank that fails still takes part, so nobody waits for it.

Before there is a process group, processes have no rank: `decide_on_process_0` and `leave_together` use the job's store.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.errors import LostRanksError, RemoteError, UserError
from hpc_train.interfaces import Task, World
from hpc_train.messages import Codec, MessageError
from hpc_train.runtime.store.exchange import arrive_at_gate, publish_value, read_published, wait_for_gate

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
R = TypeVar("R")
_log = logging.getLogger(__name__)
# A message's first part has a fixed size, so that one collective is enough for nearly all of them: without it, ranks
# would first have to exchange lengths.
_FIRST_BYTES = 1024
_LENGTH = struct.Struct("<Q")
_FIRST_PAYLOAD = _FIRST_BYTES - _LENGTH.size


@dataclass(frozen=True)
class RemoteFailure:
    """An error as it travels between ranks."""

    text: str
    by_user: bool = False
    """Raised as UserError."""
    lost: bool = False
    """Raised as LostRanksError: a rank is gone, and the group with it."""


def make_plain_codec() -> Codec:
    """Return a codec for values of Python's plain types."""
    return Codec((RemoteFailure,))


def format_error_line(error: BaseException) -> str:
    """Format an error as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@dataclass(frozen=True)
class Consensus:
    """Rank 0 decides and errors are shared, in one room's values and errors."""

    make_codec: Callable[[], Codec] = make_plain_codec
    """Encodes the room's values, and RemoteFailure. Called for each message: cache it."""
    expected: tuple[type[Exception], ...] = ()
    """Errors that one line explains; of any other the traceback is logged where it happens."""
    shared: tuple[type[Exception], ...] = (Exception,)
    """Errors that all ranks raise, besides UserError; any other is raised at once, on its own rank alone."""
    format_error: Callable[[BaseException], str] = format_error_line
    """error -> one line."""
    remote_error: type[RemoteError] = RemoteError
    """Raised for an error that is not the user's, on the rank where it happened too."""

    def run_on_rank_0(self, world: World | None, work: Callable[[], R], group: ProcessGroup | None = None) -> R:
        """Run `work` on rank 0; every rank gets its result or raises its error. No world means a single process.

        Raises LostRanksError, perhaps on some ranks only, if a rank is gone or late; the group is then unusable.
        """
        outcome = self.capture_failure(work) if _is_rank_0(world) else None
        return cast(R, self.raise_failure(self._broadcast_from_rank_0(world, outcome, group)))

    def run_on_rank_0_first(self, world: World, work: Callable[[], T]) -> T:
        """Run `work` on rank 0, which may build a file that the others then find, then on the others.

        Returns each rank's own result, so that it need not travel. If rank 0 fails, the others fail too.
        """
        results: list[T] = []
        self.run_on_rank_0(world, lambda: results.append(work()))
        return results[0] if results else work()

    def gather_and_decide(
        self,
        world: World | None,
        work: Callable[[], T],
        decide: Callable[[list[T]], R],
        group: ProcessGroup | None = None,
    ) -> R:
        """Run `work` on every rank, then `decide` on rank 0 with all results in rank order.

        Every rank gets the result of `decide`, or raises the first error of any of them. Raises LostRanksError as
        `run_on_rank_0` does.
        """
        prefix = f"rank {world.rank}: " if world and world.size > 1 else ""
        results = self._gather_on_rank_0(world, self.capture_failure(work, prefix), group)
        outcome: Any = None
        if _is_rank_0(world):
            outcome = _find_failure(results) or self.capture_failure(lambda: decide(cast(list[T], results)))
        return cast(R, self.raise_failure(self._broadcast_from_rank_0(world, outcome, group)))

    def gather_on_subset(
        self,
        ranks: Sequence[int],
        rank: int,
        work: Callable[[], T],
        decide: Callable[[list[T]], Sequence[R]],
        group: ProcessGroup | None = None,
    ) -> R:
        """Run `work` on some ranks, of which `rank` is one, then `decide` on the first of them: a result for each.

        Only those ranks call it. Raises the first error of any of them, and LostRanksError as `run_on_rank_0` does.
        """
        prefix, first = f"rank {rank}: ", ranks[0]
        local_result = self.capture_failure(work, prefix)
        if rank != first:
            self.send_object(local_result, first, group)
            return cast(R, self.raise_failure(self.receive_object(first, group)))
        others = ranks[1:]
        results = [local_result, *(self.capture_failure(partial(self.receive_object, peer, group)) for peer in others)]
        outcome: Any = _find_failure(results)
        outcome = outcome or self.capture_failure(lambda: list(decide(cast(list[T], results))), prefix)
        for index, peer in enumerate(others, 1):
            with suppress(LostRanksError):  # one is gone: the rest still wait for the outcome
                self.send_object(outcome if isinstance(outcome, RemoteFailure) else outcome[index], peer, group)
        return cast(R, self.raise_failure(outcome)[0])

    def send_object(self, value: Any, rank: int, group: ProcessGroup | None = None) -> None:
        """Send `value` to a rank that calls `receive_object`; block until it is received. Raises LostRanksError."""
        first, rest = self._encode_message(value)
        with report_lost_ranks():
            dist.send(first, dst=rank, group=group)
            if len(rest):
                dist.send(rest, dst=rank, group=group)

    def receive_object(self, rank: int, group: ProcessGroup | None = None) -> Any:
        """Return the value that `rank` sends to this one. Raises LostRanksError."""
        first = torch.empty(_FIRST_BYTES, dtype=torch.uint8)
        with report_lost_ranks():
            dist.recv(first, src=rank, group=group)
            rest = torch.empty(_count_missing_bytes(first), dtype=torch.uint8)
            if len(rest):
                dist.recv(rest, src=rank, group=group)
        return self.decode_message(first, rest)

    def capture_failure(self, work: Callable[[], T], prefix: str = "") -> T | RemoteFailure:
        """Return the result of `work`, or its error in the form in which it travels.

        prefix: put before the error's text, unless the error came from another rank, which has named itself.
        """
        try:
            return work()
        except UserError as error:
            return RemoteFailure(str(error), by_user=True)
        except RemoteError as error:
            return RemoteFailure(str(error))
        except LostRanksError as error:
            return RemoteFailure(prefix + self.format_error(error), lost=True)
        except self.shared as error:
            if not isinstance(error, self.expected):
                _log.exception("unexpected error")  # the other ranks get one line; the traceback is here
            return RemoteFailure(prefix + self.format_error(error))

    def raise_failure(self, outcome: Any) -> Any:
        """Return what `capture_failure` returned; if that is an error, raise it."""
        if not isinstance(outcome, RemoteFailure):
            return outcome
        if outcome.by_user:
            raise UserError(outcome.text)
        raise LostRanksError(outcome.text) if outcome.lost else self.remote_error(outcome.text)

    def decode_message(self, first: Tensor, rest: Tensor) -> Any:
        """Decode a message from another rank. Raises LostRanksError for bytes that no rank sends."""
        data = first.numpy()[_LENGTH.size :].tobytes() + rest.numpy().tobytes()
        try:
            return self.make_codec().decode(data)
        except MessageError as error:
            raise LostRanksError(str(error)) from None

    def _encode_message(self, value: Any) -> tuple[Tensor, Tensor]:
        """Encode a value as its length and first bytes, padded to _FIRST_BYTES, and the bytes that do not fit there."""
        data = self.make_codec().encode(value)
        begin = _LENGTH.pack(len(data)) + data[:_FIRST_PAYLOAD]
        first, rest = (
            torch.from_numpy(np.frombuffer(part, np.uint8).copy()) for part in (begin, data[_FIRST_PAYLOAD:])
        )
        return torch.nn.functional.pad(first, (0, _FIRST_BYTES - len(first))), rest

    def _gather_on_rank_0(self, world: World | None, value: T, group: ProcessGroup | None) -> list[T]:
        """Return every rank's value on rank 0, in rank order; the result on other ranks is meaningless."""
        if world is None or world.size == 1:
            return [value]
        group = world.group if group is None else group
        first, rest = self._encode_message(value)
        firsts = list(torch.empty(world.size, _FIRST_BYTES, dtype=torch.uint8)) if world.rank == 0 else None
        values = [value] if world.rank == 0 else []
        with report_lost_ranks():
            dist.gather(first, firsts, group_dst=0, group=group)
            if world.rank != 0 and len(rest):
                dist.send(rest, group_dst=0, group=group)
            for rank, peer_first in enumerate((firsts or [])[1:], 1):
                peer_rest = torch.empty(_count_missing_bytes(peer_first), dtype=torch.uint8)
                if len(peer_rest):
                    dist.recv(peer_rest, group_src=rank, group=group)
                values.append(self.decode_message(peer_first, peer_rest))
        return values

    def _broadcast_from_rank_0(self, world: World | None, value: Any, group: ProcessGroup | None) -> Any:
        if world is None or world.size == 1:
            return value
        group = world.group if group is None else group
        first, rest = self._encode_message(value)
        with report_lost_ranks():
            dist.broadcast(first, group_src=0, group=group)
            if world.rank != 0:
                rest = torch.empty(_count_missing_bytes(first), dtype=torch.uint8)
            if len(rest):
                dist.broadcast(rest, group_src=0, group=group)
        return value if world.rank == 0 else self.decode_message(first, rest)


def _is_rank_0(world: World | None) -> bool:
    return world is None or world.rank == 0


def _find_failure(results: Sequence[Any]) -> RemoteFailure | None:
    return next((result for result in results if isinstance(result, RemoteFailure)), None)


def _count_missing_bytes(first: Tensor) -> int:
    """Return how many bytes of a message come after its first part."""
    return max(0, int(_LENGTH.unpack(first[: _LENGTH.size].numpy().tobytes())[0]) - _FIRST_PAYLOAD)


@contextmanager
def report_lost_ranks() -> Iterator[None]:
    """Raise LostRanksError where a collective fails: gloo reports a lost rank as a RuntimeError of several lines."""
    try:
        yield
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise LostRanksError(f"a rank is gone, or did not come in time ({reason})") from error


def leave_together(task: Task, gate: str = "leaving") -> None:
    """Keep process 0, with which the store ends, until all others have read what they need. A collective."""
    assert task.store is not None
    if task.process == 0:
        arrive_at_gate(task.store, gate, task.processes)
        wait_for_gate(task.store, gate)
    else:
        # The last one opens the gate, and process 0 may end, with the store, before the answer to that is here.
        with suppress(dist.DistNetworkError):
            arrive_at_gate(task.store, gate, task.processes)


def decide_on_process_0(task: Task, name: str, work: Callable[[], R]) -> R:
    """Run `work` on process 0; every process gets its result, of JSON's types, or raises its UserError. A collective.

    name: tells this decision from others of the job. Any other error is raised on process 0 alone: the others notice
    when its store ends. Costs every other process one message to the store.
    """
    assert task.store is not None
    if task.process != 0:
        outcome = read_published(task.store, name)
    else:
        try:
            outcome = {"result": work()}
        except UserError as error:
            outcome = {"refusal": str(error)}
        publish_value(task.store, name, outcome)
    if "refusal" in outcome:
        leave_together(task, f"{name}/refused")
        raise UserError(outcome["refusal"])
    return cast(R, outcome["result"])
