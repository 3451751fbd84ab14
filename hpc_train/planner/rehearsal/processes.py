"""Call a function for each of several items, each in a process of its own, a few at a time."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, TypeVar

import torch

from hpc_train.errors import UserError

T = TypeVar("T")


def in_own_processes(function: Callable[[int], T], items: Sequence[int], at_once: int) -> dict[int, T]:
    """function(item) by item, begun in the order of `items`. A process is forked for each: what torch remembers of one
    rank's meshes would be wrong for the next one.

    Raises the first UserError of any of them, and UserError for one that dies.
    """
    waiting, running, found = list(reversed(items)), dict[Connection, tuple[int, ForkProcess]](), dict[int, T]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                item = waiting.pop()
                receiver, process = _begin(function, item)
                running[receiver] = item, process
            ready = wait(list(running))
            for receiver in [it for it in running if it in ready]:
                item, process = running.pop(receiver)
                found[item] = _result(receiver, item)
                process.join()
    finally:
        for _, process in running.values():
            process.kill()
            process.join()
    return found


def _begin(function: Callable[[int], Any], item: int) -> tuple[Connection, ForkProcess]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(sender, function, item))
    process.start()
    sender.close()
    return receiver, process


def _call(sender: Connection, function: Callable[[int], Any], item: int) -> None:
    try:
        torch.set_num_threads(1)
        sender.send((function(item), ""))
    except BaseException as error:
        sender.send((error if isinstance(error, UserError) else None, traceback.format_exc()))
    finally:
        sender.close()
        os._exit(0)  # skip the exit handlers of the parent's copy


def _result(receiver: Connection, item: int) -> Any:
    try:
        value, wrong = receiver.recv()
    except EOFError:
        raise UserError(
            f"rank {item}: its process was killed, as when memory is short; rehearse other ranks, or fewer at a time"
        ) from None
    finally:
        receiver.close()
    if wrong:
        raise value or RuntimeError(wrong) from RuntimeError(wrong)
    return value
