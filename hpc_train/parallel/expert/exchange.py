"""Send tokens to the ranks that hold their experts and the results back, by all-to-all over ep.

Rows are sorted by expert, so that the rows for one rank are contiguous. The ranks first exchange how many rows each one
sends. The first exchange overlaps the computation that needs no routed expert: shared experts in forward, and their
gradients in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpc_train.config.model import ExpertsConfig
from hpc_train.models.experts import Dispatch, Experts, restore_order, sort_by_expert


class RowExchange:
    """One all-to-all of rows and its way back, and the transfer that is under way."""

    def __init__(self, sent: list[int], received: list[int], group: dist.ProcessGroup) -> None:
        """sent, received: rows for and from each rank."""
        self._sent, self._received, self._group = sent, received, group
        self._work: dist.Work | None = None
        self._rows: Tensor | None = None
        self._arriving: Tensor | None = None

    def start(self, rows: Tensor, *, back: bool = False) -> Tensor:
        """Start to send `rows`; returns the memory that others' rows arrive in. back: the way back."""
        given, taken = (self._received, self._sent) if back else (self._sent, self._received)
        out = rows.new_empty(sum(taken), rows.shape[1])
        self._rows = rows.contiguous()  # must live until the transfer has ended
        self._work = dist.all_to_all_single(out, self._rows, taken, given, group=self._group, async_op=True)
        self._arriving = out
        return out

    def wait(self) -> Tensor:
        """Wait for the transfer that was started last, and return the rows that have arrived."""
        arrived = self._arriving
        assert self._work is not None
        assert arrived is not None
        self._work.wait()
        self._work = self._rows = self._arriving = None
        return arrived


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.start(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.wait(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arrived: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        exchange.wait()
        return arrived.view_as(arrived)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # The gradients go the way back, and _Start waits for them: what lies between runs meanwhile. Autograd passes on
        # only what has the shape of this function's input.
        ctx.exchange.start(gradient, back=True)
        return gradient, None


def start_exchange(rows: Tensor, exchange: RowExchange) -> Tensor:
    """Start to send rows (n, hidden); the result must go through finish_exchange before it is read."""
    arriving: Tensor = _Start.apply(rows, exchange)  # type: ignore[no-untyped-call]
    return arriving


def finish_exchange(arriving: Tensor, exchange: RowExchange) -> Tensor:
    """Wait for the rows of all ranks."""
    arrived: Tensor = _Finish.apply(arriving, exchange)  # type: ignore[no-untyped-call]
    return arrived


class ExchangedDispatch(Dispatch):
    """Takes the place of models.experts.Dispatch where each rank of `group` holds an equal part of the experts."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(
        self, x: Tensor, chosen: Tensor, experts: Experts, config: ExpertsConfig, meanwhile: Callable[[], Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        """See Dispatch."""
        order, counts = sort_by_expert(chosen, config)
        given, taken = self.exchange_counts(counts)
        # The one place of a layer where the host waits for the device: all-to-all takes its sizes from the host.
        given_rows, taken_rows = torch.stack((given, taken)).sum(2).tolist()
        there = RowExchange(given_rows, taken_rows, self.group)
        # `order` numbers (token, choice) pairs, so that order // choices is the token: it goes once for each choice.
        arriving = start_exchange(x[order // chosen.shape[1]], there)
        other = None if meanwhile is None else meanwhile()
        rows = finish_exchange(arriving, there)
        # Rows come by rank, then by expert; experts take them by expert.
        expert = torch.arange(taken.shape[1], device=x.device).repeat(len(taken))
        held = expert.repeat_interleave(taken.flatten(), output_size=sum(taken_rows))
        by_expert = held.argsort(stable=True)
        results = experts(rows[by_expert], taken.sum(0))
        # Back into the order in which the rows came, because the way back sends each rank one piece, too.
        results = torch.zeros_like(results).index_copy(0, by_expert, results)
        back = RowExchange(taken_rows, given_rows, self.group)
        returned = finish_exchange(start_exchange(results, back), back)
        return restore_order(returned, order, chosen), other

    def exchange_counts(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows that this rank sends and gets: (ranks, experts of a rank), for and from each rank."""
        given = counts.view(self.group.size(), -1)
        taken = torch.empty_like(given)
        dist.all_to_all_single(taken, given.contiguous(), group=self.group)
        return given, taken
