"""Stages of a pipeline that sleep for known times, so that a few cores can be many ranks that compute at once."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor, nn

from hpc_train.schedules.actions import Order
from hpc_train.schedules.simulate import Times

FEATURES = 8


def times(order: Order, seconds: float) -> Times:
    """F, I and W of a rank's whole share of the model take `seconds` each, spread evenly over its stages.

    The first stage has no gradient for its inputs to compute: all of its backward is W, also for torch.
    """
    each = seconds * order.ranks / order.stages
    rest = (each,) * (order.stages - 1)
    return Times((each, *rest), (0.0, *rest), (2 * each, *rest))


class SleepingStage(nn.Module):
    """(rows, FEATURES) -> the same. Sleeps in forward, and in backward on the way to the inputs and to the weights."""

    def __init__(self, forward: float, inputs: float, weights: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(FEATURES))
        self._seconds = (forward, inputs, weights)
        self.sleeps = True

    def forward(self, x: Tensor) -> Tensor:
        """Two branches that meet at the end: torch runs the backward of either by itself where it is split."""
        forward, inputs, weights = self._seconds if self.sleeps else (0.0, 0.0, 0.0)
        return slept(x, forward, inputs) + slept(self.weight, 0.0, weights)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return grads[0].contiguous(), None, None  # a sum gives an expanded one, which cannot be sent


def wake_first() -> bool:
    """Let this process, and threads that it starts, run before all others when they wake: others' load is not measured.

    It takes little from them, as it sleeps nearly all the time. False: not permitted here (it needs CAP_SYS_NICE).
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError:
        return False
    return True


def slept(x: Tensor, forward: float, backward: float) -> Tensor:
    """x after so many seconds; its gradient too takes some."""
    out: Tensor = _Sleep.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return out
