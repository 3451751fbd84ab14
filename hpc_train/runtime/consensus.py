"""Agree between ranks: rank 0 decides, and all ranks succeed or all raise the same error.

`run_on_rank_0` and `gather_and_decide` are for all ranks, `gather_on_subset` for some, `send_object` and
`receive_object` for two. Values travel as data (hpc_train.messages), over CPU tensors; nothing is unpickled. A rank
that fails still takes part, so nobody waits for it.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.checkpoint.errors import CheckpointError, LostRanksError, RemoteError, format_error
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.messages import Codec, MessageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
R = TypeVar("R")
_log = logging.getLogger(__name__)
_FIRST_BYTES = 1024
_LENGTH = struct.Struct("<Q")
_FIRST_PAYLOAD = _FIRST_BYTES - _LENGTH.size


@dataclass(frozen=True)
class RemoteFailure:
    """An error as it travels between ranks."""

    text: str
    by_user: bool = False
    lost: bool = False
    """A rank is, and with it the group."""


def run_on_rank_0(world: World | None, work: Callable[[], R], group: ProcessGroup | None = None) -> R:
    """Run `work` on rank 0; every rank gets its result or raises its error. No world means a single process.

    Raises LostRanksError, not the same on every rank, where one of them is gone or late; the group is then of no use.
    """
    verdict = capture_failure(work) if _is_rank_0(world) else None
    return cast(R, raise_failure(_broadcast_from_rank_0(world, verdict, group)))


def gather_and_decide(
    world: World | None,
    work: Callable[[], T],
    then: Callable[[list[T]], R],
    group: ProcessGroup | None = None,
) -> R:
    """Run `work` on every rank, then `then` on rank 0 with all results in rank order.

    Every rank gets the result of `then`, or raises the first error of any of them. A rank that fails still takes part,
    so nobody waits for it. Raises LostRanksError as `on_first` does.
    """
    who = f"rank {world.rank}: " if world and world.size > 1 else ""
    results = _gather_on_rank_0(world, capture_failure(work, who), group)
    verdict: Any = None
    if _is_rank_0(world):
        failure = next((result for result in results if isinstance(result, RemoteFailure)), None)
        verdict = failure or capture_failure(lambda: then(cast(list[T], results)))
    return cast(R, raise_failure(_broadcast_from_rank_0(world, verdict, group)))


def gather_on_subset(
    ranks: Sequence[int],
    rank: int,
    work: Callable[[], T],
    then: Callable[[list[T]], Sequence[R]],
    group: ProcessGroup | None = None,
) -> R:
    """As on_all for some ranks, of which `rank` is one: `then`, on the first of them, has an answer for each.

    Only they call it. Raises ToldError where it is another's error, and LostRanksError as `on_first` does.
    """
    mine, first = capture_failure(work, f"rank {rank}: "), ranks[0]
    if rank != first:
        send_object(mine, first, group)
        return cast(R, raise_failure(receive_object(first, group)))
    results = [mine, *(capture_failure(partial(receive_object, it, group)) for it in ranks[1:])]
    verdict: Any = next((result for result in results if isinstance(result, RemoteFailure)), None)
    verdict = verdict or capture_failure(lambda: list(then(cast(list[T], results))), f"rank {rank}: ")
    for index, it in enumerate(ranks[1:], 1):
        with suppress(LostRanksError):  # the others must hear it
            send_object(verdict if isinstance(verdict, RemoteFailure) else verdict[index], it, group)
    return cast(R, raise_failure(verdict)[0])


def send_object(value: Any, rank: int, group: ProcessGroup | None = None) -> None:
    """Give it to a rank that calls `hear`, and wait until it has it. Raises LostRanksError."""
    first, rest = _encode_message(value)
    with report_lost_ranks():
        dist.send(first, dst=rank, group=group)
        if len(rest):
            dist.send(rest, dst=rank, group=group)


def receive_object(rank: int, group: ProcessGroup | None = None) -> Any:
    """What a rank tells this one. Raises LostRanksError."""
    first = torch.empty(_FIRST_BYTES, dtype=torch.uint8)
    with report_lost_ranks():
        dist.recv(first, src=rank, group=group)
        rest = torch.empty(_count_missing_bytes(first), dtype=torch.uint8)
        if len(rest):
            dist.recv(rest, src=rank, group=group)
    return _decode_message(first, rest)


def capture_failure(work: Callable[[], T], who: str = "") -> T | RemoteFailure:
    """The result, or the error as it may travel. who: begins its text, unless another rank had it."""
    try:
        return work()
    except UserError as error:
        return RemoteFailure(str(error), by_user=True)
    except RemoteError as error:
        return RemoteFailure(str(error))
    except LostRanksError as error:
        return RemoteFailure(who + format_error(error), lost=True)
    except Exception as error:
        if not isinstance(error, (OSError, CheckpointError)):
            _log.exception("checkpoint: unexpected error")  # the others see one line; the traceback is here
        return RemoteFailure(who + format_error(error))


def raise_failure(verdict: Any) -> Any:
    """What `attempt` gave; raises its error if it is one."""
    if isinstance(verdict, RemoteFailure):
        raise _error_of(verdict)
    return verdict


def _error_of(failure: RemoteFailure) -> Exception:
    if failure.by_user:
        return UserError(failure.text)
    return LostRanksError(failure.text) if failure.lost else RemoteError(failure.text)


@cache
def make_codec() -> Codec:
    """Return the codec for all messages between ranks about checkpoints."""
    # imported here, because those modules use this one
    from hpc_train.checkpoint.errors import Problem
    from hpc_train.checkpoint.format import manifest, shard_layout
    from hpc_train.checkpoint.format.hdf5_layout import DatasetRow, dtype_name, parse_dtype
    from hpc_train.checkpoint.provenance import Origin, SaveTimes
    from hpc_train.checkpoint.save import save_step
    from hpc_train.checkpoint.save.shared_file import FileSection
    from hpc_train.checkpoint.storage.file_system import WritePolicy

    held = (
        shard_layout.FileLayout,
        shard_layout.EnclosingDataset,
        DatasetRow,
        shard_layout.StepLayout,
        shard_layout.TensorKind,
        shard_layout.SharedLayout,
        shard_layout.RowCut,
    )
    files = (manifest.Manifest, manifest.ShardFile, save_step.WrittenShard, Origin, SaveTimes, FileSection, WritePolicy)
    return Codec((RemoteFailure, Problem, *held, *files), {torch.dtype: (dtype_name, parse_dtype)})


def _is_rank_0(world: World | None) -> bool:
    return world is None or world.rank == 0


def _gather_on_rank_0(world: World | None, mine: T, group: ProcessGroup | None) -> list[T]:
    """What every rank has, on rank 0; an empty list on the others."""
    if world is None or world.size == 1:
        return [mine]
    first, rest = _encode_message(mine)
    firsts = list(torch.empty(world.size, _FIRST_BYTES, dtype=torch.uint8)) if world.rank == 0 else None
    found = [mine] if world.rank == 0 else []
    with report_lost_ranks():
        dist.gather(first, firsts, dst=0, group=group)
        if world.rank != 0 and len(rest):
            dist.send(rest, dst=0, group=group)
        for rank, it in enumerate((firsts or [])[1:], 1):
            more = torch.empty(_count_missing_bytes(it), dtype=torch.uint8)
            if len(more):
                dist.recv(more, src=rank, group=group)
            found.append(_decode_message(it, more))
    return found


def _broadcast_from_rank_0(world: World | None, value: Any, group: ProcessGroup | None) -> Any:
    if world is None or world.size == 1:
        return value
    first, rest = _encode_message(value)
    with report_lost_ranks():
        dist.broadcast(first, src=0, group=group)
        if world.rank != 0:
            rest = torch.empty(_count_missing_bytes(first), dtype=torch.uint8)
        if len(rest):
            dist.broadcast(rest, src=0, group=group)
    return value if world.rank == 0 else _decode_message(first, rest)


def _encode_message(value: Any) -> tuple[Tensor, Tensor]:
    """_MESSAGE bytes with which most is said, so that one collective does; and those that do not fit."""
    data = make_codec().encode(value)
    begin = _LENGTH.pack(len(data)) + data[:_FIRST_PAYLOAD]
    first, rest = (torch.from_numpy(np.frombuffer(it, np.uint8).copy()) for it in (begin, data[_FIRST_PAYLOAD:]))
    return torch.nn.functional.pad(first, (0, _FIRST_BYTES - len(first))), rest


def _count_missing_bytes(first: Tensor) -> int:
    """Bytes that do not fit into it."""
    return max(0, int(_LENGTH.unpack(first[: _LENGTH.size].numpy().tobytes())[0]) - _FIRST_PAYLOAD)


def _decode_message(first: Tensor, rest: Tensor) -> Any:
    """Decode a message from another rank. Raises LostRanksError for bytes that no rank sends."""
    data = first.numpy()[_LENGTH.size :].tobytes() + rest.numpy().tobytes()
    try:
        return make_codec().decode(data)
    except MessageError as error:
        raise LostRanksError(str(error)) from None


@contextmanager
def report_lost_ranks() -> Iterator[None]:
    """A collective; gloo tells of a lost rank by a RuntimeError of several lines."""
    try:
        yield
    except RuntimeError as error:
        why = " ".join(str(error).split())[:200]
        raise LostRanksError(f"a rank is gone, or did not come in time ({why})") from error
