"""All ranks succeed, or all raise the same error: the only collectives of this room (objects, over CPU tensors)."""

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

from hpc_train.api import World
from hpc_train.checkpoint.errors import CheckpointError, LostRanksError, ToldError, one_line
from hpc_train.errors import UserError
from hpc_train.messages import Codec, MessageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
R = TypeVar("R")
_log = logging.getLogger(__name__)
_MESSAGE = 1024
_LENGTH = struct.Struct("<Q")
_ROOM = _MESSAGE - _LENGTH.size


@dataclass(frozen=True)
class Failure:
    """An error as it travels between ranks."""

    text: str
    by_user: bool = False
    lost: bool = False
    """A rank is, and with it the group."""


def on_first(world: World | None, work: Callable[[], R], group: ProcessGroup | None = None) -> R:
    """Run `work` on rank 0; every rank gets its result or raises its error. No world means a single process.

    Raises LostRanksError, not the same on every rank, where one of them is gone or late; the group is then of no use.
    """
    verdict = attempt(work) if _is_first(world) else None
    return cast(R, opened(_from_first(world, verdict, group)))


def on_all(
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
    results = _to_first(world, attempt(work, who), group)
    verdict: Any = None
    if _is_first(world):
        failure = next((result for result in results if isinstance(result, Failure)), None)
        verdict = failure or attempt(lambda: then(cast(list[T], results)))
    return cast(R, opened(_from_first(world, verdict, group)))


def among(
    ranks: Sequence[int],
    rank: int,
    work: Callable[[], T],
    then: Callable[[list[T]], Sequence[R]],
    group: ProcessGroup | None = None,
) -> R:
    """As on_all for some ranks, of which `rank` is one: `then`, on the first of them, has an answer for each.

    Only they call it. Raises ToldError where it is another's error, and LostRanksError as `on_first` does.
    """
    mine, first = attempt(work, f"rank {rank}: "), ranks[0]
    if rank != first:
        tell(mine, first, group)
        return cast(R, opened(hear(first, group)))
    results = [mine, *(attempt(partial(hear, it, group)) for it in ranks[1:])]
    verdict: Any = next((result for result in results if isinstance(result, Failure)), None)
    verdict = verdict or attempt(lambda: list(then(cast(list[T], results))), f"rank {rank}: ")
    for index, it in enumerate(ranks[1:], 1):
        with suppress(LostRanksError):  # the others must hear it
            tell(verdict if isinstance(verdict, Failure) else verdict[index], it, group)
    return cast(R, opened(verdict)[0])


def tell(value: Any, rank: int, group: ProcessGroup | None = None) -> None:
    """Give it to a rank that calls `hear`, and wait until it has it. Raises LostRanksError."""
    first, rest = _message(value)
    with together():
        dist.send(first, dst=rank, group=group)
        if len(rest):
            dist.send(rest, dst=rank, group=group)


def hear(rank: int, group: ProcessGroup | None = None) -> Any:
    """What a rank tells this one. Raises LostRanksError."""
    first = torch.empty(_MESSAGE, dtype=torch.uint8)
    with together():
        dist.recv(first, src=rank, group=group)
        rest = torch.empty(_missing(first), dtype=torch.uint8)
        if len(rest):
            dist.recv(rest, src=rank, group=group)
    return _said(first, rest)


def attempt(work: Callable[[], T], who: str = "") -> T | Failure:
    """The result, or the error as it may travel. who: begins its text, unless another rank had it."""
    try:
        return work()
    except UserError as error:
        return Failure(str(error), by_user=True)
    except ToldError as error:
        return Failure(str(error))
    except LostRanksError as error:
        return Failure(who + one_line(error), lost=True)
    except Exception as error:
        if not isinstance(error, (OSError, CheckpointError)):
            _log.exception("checkpoint: unexpected error")  # the others see one line; the traceback is here
        return Failure(who + one_line(error))


def opened(verdict: Any) -> Any:
    """What `attempt` gave; raises its error if it is one."""
    if isinstance(verdict, Failure):
        raise _error_of(verdict)
    return verdict


def _error_of(failure: Failure) -> Exception:
    if failure.by_user:
        return UserError(failure.text)
    return LostRanksError(failure.text) if failure.lost else ToldError(failure.text)


@cache
def codec() -> Codec:
    """Return the codec for all messages between ranks about checkpoints."""
    # imported here, because those modules use this one
    from hpc_train.checkpoint import holdings, manifest, saving
    from hpc_train.checkpoint.dtypes import dtype_name, dtype_of
    from hpc_train.checkpoint.errors import Problem
    from hpc_train.checkpoint.image import Row
    from hpc_train.checkpoint.origin import Origin, Times
    from hpc_train.checkpoint.shared_file import Spot
    from hpc_train.checkpoint.storage.policy import Behaviour

    held = (holdings.Held, holdings.Within, Row, holdings.Holdings, holdings.Kind, holdings.Layout, holdings.Cut)
    files = (manifest.Manifest, manifest.ShardFile, saving.Written, Origin, Times, Spot, Behaviour)
    return Codec((Failure, Problem, *held, *files), {torch.dtype: (dtype_name, dtype_of)})


def _is_first(world: World | None) -> bool:
    return world is None or world.rank == 0


def _to_first(world: World | None, mine: T, group: ProcessGroup | None) -> list[T]:
    """What every rank has, on rank 0; an empty list on the others."""
    if world is None or world.size == 1:
        return [mine]
    first, rest = _message(mine)
    firsts = list(torch.empty(world.size, _MESSAGE, dtype=torch.uint8)) if world.rank == 0 else None
    found = [mine] if world.rank == 0 else []
    with together():
        dist.gather(first, firsts, dst=0, group=group)
        if world.rank != 0 and len(rest):
            dist.send(rest, dst=0, group=group)
        for rank, it in enumerate((firsts or [])[1:], 1):
            more = torch.empty(_missing(it), dtype=torch.uint8)
            if len(more):
                dist.recv(more, src=rank, group=group)
            found.append(_said(it, more))
    return found


def _from_first(world: World | None, value: Any, group: ProcessGroup | None) -> Any:
    if world is None or world.size == 1:
        return value
    first, rest = _message(value)
    with together():
        dist.broadcast(first, src=0, group=group)
        if world.rank != 0:
            rest = torch.empty(_missing(first), dtype=torch.uint8)
        if len(rest):
            dist.broadcast(rest, src=0, group=group)
    return value if world.rank == 0 else _said(first, rest)


def _message(value: Any) -> tuple[Tensor, Tensor]:
    """_MESSAGE bytes with which most is said, so that one collective does; and those that do not fit."""
    data = codec().encode(value)
    begin = _LENGTH.pack(len(data)) + data[:_ROOM]
    first, rest = (torch.from_numpy(np.frombuffer(it, np.uint8).copy()) for it in (begin, data[_ROOM:]))
    return torch.nn.functional.pad(first, (0, _MESSAGE - len(first))), rest


def _missing(first: Tensor) -> int:
    """Bytes that do not fit into it."""
    return max(0, int(_LENGTH.unpack(first[: _LENGTH.size].numpy().tobytes())[0]) - _ROOM)


def _said(first: Tensor, rest: Tensor) -> Any:
    """Decode a message from another rank. Raises LostRanksError for bytes that no rank sends."""
    data = first.numpy()[_LENGTH.size :].tobytes() + rest.numpy().tobytes()
    try:
        return codec().decode(data)
    except MessageError as error:
        raise LostRanksError(str(error)) from None


@contextmanager
def together() -> Iterator[None]:
    """A collective; gloo tells of a lost rank by a RuntimeError of several lines."""
    try:
        yield
    except RuntimeError as error:
        why = " ".join(str(error).split())[:200]
        raise LostRanksError(f"a rank is gone, or did not come in time ({why})") from error
