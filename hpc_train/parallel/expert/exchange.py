"""Send tokens to the ranks that hold their experts and the results back, by all-to-all over ep.

Rows are sorted by expert, so that the rows for one rank are contiguous. A layer, in order of time:

    forward    1  exchange how many rows each rank sends; the host waits for these numbers
               2  start to send the rows; the shared experts compute meanwhile
               3  the routed experts compute the rows that have arrived
               4  send the results back, and wait for those of this rank's tokens
    backward   4  send the gradients of the results to the experts, and wait
               3  the gradients of the routed experts
               2  start to send the gradients of the rows back; those of the shared experts are computed meanwhile

For n tokens of which each goes to k experts, a rank sends about n k (ep - 1) / ep rows in each of these four exchanges.
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
        send_rows, receive_rows = (self._received, self._sent) if back else (self._sent, self._received)
        out = rows.new_empty(sum(receive_rows), rows.shape[1])
        self._rows = rows.contiguous()  # must live until the transfer has ended
        self._work = dist.all_to_all_single(out, self._rows, receive_rows, send_rows, group=self._group, async_op=True)
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
        sent_counts, received_counts = self.exchange_counts(counts)
        # The one place of a layer where the host waits for the device: all-to-all takes its sizes from the host.
        sent_rows, received_rows = torch.stack((sent_counts, received_counts)).sum(2).tolist()
        forward_exchange = RowExchange(sent_rows, received_rows, self.group)
        # `order` numbers (token, choice) pairs, so that order // choices is the token: it goes once for each choice.
        pending_rows = start_exchange(x[order // chosen.shape[1]], forward_exchange)
        other = None if meanwhile is None else meanwhile()
        rows = finish_exchange(pending_rows, forward_exchange)
        # Rows come by rank, then by expert; experts take them by expert.
        expert = torch.arange(received_counts.shape[1], device=x.device).repeat(len(received_counts))
        expert_of_row = expert.repeat_interleave(received_counts.flatten(), output_size=sum(received_rows))
        by_expert = expert_of_row.argsort(stable=True)
        results = experts(rows[by_expert], received_counts.sum(0))
        # Back into the order in which the rows came, because the way back sends each rank one piece, too.
        results = torch.zeros_like(results).index_copy(0, by_expert, results)
        return_exchange = RowExchange(received_rows, sent_rows, self.group)
        returned = finish_exchange(start_exchange(results, return_exchange), return_exchange)
        return restore_order(returned, order, chosen), other

    def exchange_counts(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows that this rank sends and gets: (ranks, experts of a rank), for and from each rank."""
        sent_counts = counts.view(self.group.size(), -1)
        received_counts = torch.empty_like(sent_counts)
        dist.all_to_all_single(received_counts, sent_counts.contiguous(), group=self.group)
        return sent_counts, received_counts
