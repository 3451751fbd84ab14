"""Ring attention: pass keys and values around the ranks of a sequence (Liu et al. 2023, arXiv:2310.01889).

Each rank keeps its queries and attends to one rank's keys and values at a time; blocks are merged by their log-sum-exp
(Dao et al. 2022, arXiv:2205.14135). The next block is received while this one is computed. The balanced causal order
gives every rank a chunk from the beginning of the sequence and one from its end, so that all do the same work in every
round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpc_train._torch import find_group
from hpc_train.models.attention.plain_attention import ScoreRule
from hpc_train.parallel.context.block_attention import (
    BlockGradients,
    attend_block,
    attend_ruled_block,
    cast_to_autocast,
    differentiate_block,
    differentiate_ruled_block,
    get_accumulation_dtype,
)
from hpc_train.traffic.ring_blocks import RingLayout


@dataclass
class PendingReceive:
    """A tensor that is being received, and the one that is being sent, which must stay alive until then."""

    tensor: Tensor
    sent: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        """Wait until the tensor is received; returns it."""
        for work in self.works:
            work.wait()
        return self.tensor


class KeyValueRing:
    """The ranks of a process group as a ring."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.name = group.group_name
        self._group = group
        self._next = dist.get_global_rank(group, (self.rank + 1) % self.size)
        self._previous = dist.get_global_rank(group, (self.rank - 1) % self.size)

    def pass_on(self, tensor: Tensor) -> PendingReceive:
        """Start sending a contiguous tensor to the next rank and receiving one like it from the previous rank."""
        incoming = torch.empty_like(tensor)
        # One batch: NCCL runs the messages between two ranks one after another, and in a ring of two both would begin
        # with their send and wait for a receive that never starts.
        operations = [
            dist.P2POp(dist.isend, tensor, self._next, self._group),
            dist.P2POp(dist.irecv, incoming, self._previous, self._group),
        ]
        return PendingReceive(incoming, tensor, dist.batch_isend_irecv(operations))

    def circulate(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (rank, its tensor) for every rank, this one first, while the next tensor is being received."""
        current = own
        for step in range(self.size):
            coming = self.pass_on(current) if step < self.size - 1 else None
            yield (self.rank - step) % self.size, current
            if coming is not None:
                current = coming.wait()

    def exchange(self, shift: int, outgoing: Tensor | None, like: Tensor | None) -> PendingReceive | None:
        """Start sending `outgoing` to the rank that is `shift` further, and receiving a tensor from the one before.

        None sends nothing. like: of the shape that is received; None: nothing comes.
        """
        operations = []
        if outgoing is not None:
            operations.append(dist.P2POp(dist.isend, outgoing, self._find_rank(shift), self._group))
        if like is None:
            sent = dist.batch_isend_irecv(operations) if operations else []
            return None if outgoing is None else PendingReceive(outgoing, outgoing, sent)
        incoming = torch.empty_like(like)
        operations.append(dist.P2POp(dist.irecv, incoming, self._find_rank(-shift), self._group))
        return PendingReceive(incoming, incoming if outgoing is None else outgoing, dist.batch_isend_irecv(operations))

    def _find_rank(self, shift: int) -> int:
        return dist.get_global_rank(self._group, (self.rank + shift) % self.size)


@dataclass(frozen=True)
class VisibleBlock:
    """The part of a round that a causal mask leaves: which queries of this rank see which keys of the other."""

    queries: slice
    keys: slice
    causal: bool
    """Query i sees keys 0 ... i of the block; else all."""
    back: int | None = None
    """With a window or a soft-cap: positions from the first key to the first query. None: the block knows neither."""


def find_visible_block(rank: int, source: int, length: int, *, causal: bool, balanced: bool) -> VisibleBlock | None:
    """Return what the queries of `rank` see of the keys of `source`, `length` positions each; None if nothing.

    In balanced order, if source < rank, source's first chunk is before both chunks of rank and its second one after
    both. Else both are before rank's second chunk and after its first. So any two ranks compute half of the products.
    """
    everything = slice(0, length)
    if not causal or source == rank:
        return VisibleBlock(everything, everything, causal)
    if not balanced:
        return VisibleBlock(everything, everything, False) if source < rank else None
    half = length // 2
    if source < rank:
        return VisibleBlock(everything, slice(0, half), False)
    return VisibleBlock(slice(half, length), everything, False)


def list_ruled_blocks(layout: RingLayout, rank: int, source: int, rule: ScoreRule) -> list[VisibleBlock]:
    """List the blocks of causal attention under a window or a soft-cap; those of a chunk and itself come first."""
    size, found = layout.chunk, []
    for pair in sorted(layout.list_pairs(rank, source, rule.window), key=lambda pair: pair.back):
        queries, keys = (slice(index * size, (index + 1) * size) for index in (pair.query, pair.key))
        is_cut = rule.softcap is not None or (rule.window is not None and pair.back + size > rule.window)
        found.append(VisibleBlock(queries, keys, pair.back == 0, pair.back if is_cut else None))
    return found


@dataclass(frozen=True)
class _RingSchedule:
    """Who sends which keys to whom, and which blocks a rank computes of those it receives."""

    ring: KeyValueRing
    rule: ScoreRule
    balanced: bool

    def list_blocks(self, source: int, length: int) -> list[VisibleBlock]:
        """List what this rank's queries see of the keys of `source`, `length` positions each."""
        rule = self.rule
        if rule.window is None and rule.softcap is None:
            block = find_visible_block(self.ring.rank, source, length, causal=rule.causal, balanced=self.balanced)
            return [] if block is None else [block]
        if not rule.causal:
            everything = slice(0, length)
            return [VisibleBlock(everything, everything, False, 0)]
        return list_ruled_blocks(self._make_layout(length), self.ring.rank, source, rule)

    def _make_layout(self, length: int) -> RingLayout:
        return RingLayout(self.ring.size, length, self.balanced)

    def list_shifts(self, length: int) -> tuple[int, ...] | None:
        """List the distances over which ranks exchange keys under a window; None: all keys go round the ring."""
        window = self.rule.window
        return None if window is None else self._make_layout(length).list_shifts(window)

    def circulate(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (rank, its keys and values) for every rank whose keys this one sees, this one first.

        own: (2, B, kv_heads, T / cp, d). Under a window each rank sends directly to those that see something of it.
        """
        shifts = self.list_shifts(own.shape[3])
        if shifts is None:
            yield from self.ring.circulate(own)
            return
        coming = [self._start_exchange(shift, own) for shift in shifts[:1]]
        yield self.ring.rank, own
        for index, shift in enumerate(shifts):
            pending = coming[index]
            coming += [self._start_exchange(later, own) for later in shifts[index + 1 : index + 2]]
            if pending is not None:
                received = pending.wait()
                if self.sees(self.ring.rank - shift, shift, own.shape[3]):
                    yield (self.ring.rank - shift) % self.ring.size, received

    def _start_exchange(self, shift: int, own: Tensor) -> PendingReceive | None:
        rank, length = self.ring.rank, own.shape[3]
        outgoing = own if self.sees(rank, shift, length) else None
        return self.ring.exchange(shift, outgoing, own if self.sees(rank - shift, shift, length) else None)

    def return_gradients(self, found: dict[int, Tensor], like: Tensor) -> list[Tensor]:
        """Send the gradients of other ranks' keys to them, and return those that other ranks have for this one's.

        found: by rank. like: (2, B, kv_heads, T / cp, d). All keys were sent before, so that no two messages between
        two ranks can be mistaken for each other.
        """
        rank, length, pending = self.ring.rank, like.shape[3], []
        for shift in self.list_shifts(length) or ():
            outgoing = found.get((rank - shift) % self.ring.size)
            is_seen = self.sees(rank, shift, length)
            exchange = self.ring.exchange(-shift, outgoing, like if is_seen else None)
            pending += [] if exchange is None else [(exchange, is_seen)]
        done = [(exchange.wait(), is_seen) for exchange, is_seen in pending]  # also those that only send
        return [received for received, is_seen in done if is_seen]

    def sees(self, source: int, shift: int, length: int) -> bool:
        """Whether the rank that is `shift` further than `source` sees a key of it."""
        size = self.ring.size
        return bool(self._make_layout(length).list_pairs((source + shift) % size, source % size, self.rule.window))


class _RingAttention(torch.autograd.Function):
    """Maps q (B, heads, T / cp, d) and contiguous kv (2, B, kv_heads, T / cp, d) to the attention, shaped as q."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, schedule: _RingSchedule) -> Tensor:
        out, lse = _attend(q, kv, schedule)
        ctx.save_for_backward(q, kv, out, lse)
        ctx.schedule = schedule
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        q, kv, out, lse = ctx.saved_tensors
        dq, dkv = _differentiate(grads[0], q, kv, out, lse, ctx.schedule)
        return dq.to(q.dtype), dkv.to(kv.dtype), None


@torch.library.custom_op("hpc_train::ring_attention", mutates_args=())
def _compiled_attend(
    q: Tensor, kv: Tensor, group: str, causal: bool, window: int, softcap: float, balanced: bool
) -> tuple[Tensor, Tensor]:
    """Run _RingAttention.forward as one operator, because a compiled graph cannot contain messages between ranks."""
    with torch.autocast(q.device.type, enabled=False):
        return _attend(q, kv, _make_schedule(group, causal, window, softcap, balanced))


def _make_schedule(group: str, causal: bool, window: int, softcap: float, balanced: bool) -> _RingSchedule:
    """Make the schedule from what an operator can take: the name of a group, and 0 for no window and no soft-cap."""
    return _RingSchedule(KeyValueRing(find_group(group)), ScoreRule(causal, window or None, softcap or None), balanced)


@_compiled_attend.register_fake
def _(
    q: Tensor, kv: Tensor, group: str, causal: bool, window: int, softcap: float, balanced: bool
) -> tuple[Tensor, Tensor]:
    # With the strides of _attend's result, because a compiled graph is built from these.
    out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
    return out.transpose(1, 2), q.new_empty(q.shape[:-1], dtype=get_accumulation_dtype(q.dtype))


@torch.library.custom_op("hpc_train::ring_attention_backward", mutates_args=())
def _compiled_differentiate(
    grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor,
    group: str, causal: bool, window: int, softcap: float, balanced: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    with torch.autocast(q.device.type, enabled=False):
        dq, dkv = _differentiate(grad, q, kv, out, lse, _make_schedule(group, causal, window, softcap, balanced))
        return dq.to(q.dtype), dkv.to(kv.dtype)


@_compiled_differentiate.register_fake
def _(
    grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor,
    group: str, causal: bool, window: int, softcap: float, balanced: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(q), torch.empty_like(kv)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, kv, *ctx.options = inputs
    ctx.save_for_backward(q, kv, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return (*_compiled_differentiate(grad, *ctx.saved_tensors, *ctx.options), *(None,) * 5)


_compiled_attend.register_autograd(_backward, setup_context=_save_for_backward)


def _attend(q: Tensor, kv: Tensor, schedule: _RingSchedule) -> tuple[Tensor, Tensor]:
    """Return the attention, shaped as q, and the log-sum-exp of all scores of each query, in the accumulation dtype."""
    # In memory the result is (B, T, heads, d), which the output layer reads, so that both save the same tensor for
    # backward.
    out = torch.empty_like(
        q.transpose(1, 2), dtype=get_accumulation_dtype(q.dtype), memory_format=torch.contiguous_format
    ).transpose(1, 2)
    lse, is_empty = out.new_empty(out.shape[:-1]), True
    for source, (k, v) in schedule.circulate(kv):
        for block in schedule.list_blocks(source, q.shape[2]):
            part, part_lse = _attend_block(q, k, v, block, schedule.rule)
            if is_empty and block.queries == slice(0, q.shape[2]):
                # Copied, because selective recomputation may save what a kernel returned.
                out.copy_(part)
                lse.copy_(part_lse)
            else:
                if is_empty:
                    out.zero_()
                    lse.fill_(-torch.inf)
                _merge(out[:, :, block.queries], lse[:, :, block.queries], part, part_lse)
            is_empty = False
    return out.to(q.dtype), lse


def _attend_block(q: Tensor, k: Tensor, v: Tensor, block: VisibleBlock, rule: ScoreRule) -> tuple[Tensor, Tensor]:
    q, k, v = q[:, :, block.queries], k[:, :, block.keys], v[:, :, block.keys]
    return attend_block(q, k, v, block.causal) if block.back is None else attend_ruled_block(q, k, v, rule, block.back)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge the attention to more keys, in place: an average weighted by the exponentials of the log-sum-exps."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1))
    out.addcmul_(part.to(out.dtype), (part_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


@dataclass(frozen=True)
class KeyGradients:
    """dk and dv (B, kv_heads, number of keys, d) of some keys of a rank."""

    keys: slice
    dk: Tensor
    dv: Tensor


@dataclass
class _Backward:
    """Inputs of the gradients of every block, and the sum of dq, in the accumulation dtype."""

    grad: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor
    dq: Tensor
    rule: ScoreRule

    def differentiate(self, kv: Tensor, block: VisibleBlock) -> KeyGradients:
        """Return the gradients of the block's keys and values; adds that of its queries to dq."""
        rows = block.queries
        dq, dk, dv = self._differentiate_block(kv[:, :, :, block.keys], block)
        self.dq[:, :, rows] += dq
        return KeyGradients(block.keys, dk, dv)

    def _differentiate_block(self, kv: Tensor, block: VisibleBlock) -> BlockGradients:
        k, v = kv
        grad, q, out, lse = (x[:, :, block.queries] for x in (self.grad, self.q, self.out, self.lse))
        if block.back is None:
            return differentiate_block(grad, q, k, v, out, lse, block.causal)
        return differentiate_ruled_block(grad, q, k, v, out, lse, self.rule, block.back)


def _differentiate(
    grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, schedule: _RingSchedule
) -> tuple[Tensor, Tensor]:
    """Return (dq, dkv) in the accumulation dtype.

    The gradient of a rank's keys and values follows them around the ring and then returns to the rank, where the part
    from its own queries is added: cp - 1 messages, as many as the keys and values take. Under a window it returns
    directly.
    """
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    zeros = torch.zeros_like(q, dtype=get_accumulation_dtype(q.dtype))
    backward = _Backward(grad, q, out, lse, zeros, schedule.rule)
    own, coming = torch.zeros_like(kv, dtype=get_accumulation_dtype(kv.dtype)), None
    direct = schedule.list_shifts(q.shape[2]) is not None
    others: dict[int, Tensor] = {}
    for source, current in schedule.circulate(kv):
        found = [backward.differentiate(current, block) for block in schedule.list_blocks(source, q.shape[2])]
        if source == schedule.ring.rank:
            _add_gradients(own, found)
            continue
        # The sum over the ranks before was received while this rank computed.
        dkv = torch.zeros_like(own) if coming is None else coming.wait()
        _add_gradients(dkv, found)
        if direct:
            others[source] = dkv
        else:
            coming = schedule.ring.pass_on(dkv)
    if coming is not None:
        own.add_(coming.wait())
    for part in schedule.return_gradients(others, own) if direct else ():
        own.add_(part)
    return backward.dq, own


def _add_gradients(dkv: Tensor, found: list[KeyGradients]) -> None:
    for gradient in found:
        dkv[0, :, :, gradient.keys] += gradient.dk
        dkv[1, :, :, gradient.keys] += gradient.dv


class RingAttention(nn.Module):
    """Attention over a sequence whose positions are split over the ranks of `ring`; no parameters.

    balanced: whether positions are in balanced order; must match the inputs, also for attention that is not causal.
    Keys and values are sent with their own number of heads, (cp - 1) times forward and, with their gradients (in
    float32 at least), (cp - 1) times backward; under a window, only to the ranks that see some of them.
    """

    def __init__(self, ring: KeyValueRing, rule: ScoreRule, *, balanced: bool) -> None:
        super().__init__()
        self._schedule = _RingSchedule(ring, rule, balanced)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend: q (B, heads, T / cp, head_dim), k and v (B, kv_heads, T / cp, head_dim); returns a tensor like q."""
        q, k, v = cast_to_autocast(q, k, v)
        kv = torch.stack((k, v))  # one tensor, so that a round takes one message
        schedule = self._schedule
        out: Tensor
        if torch.compiler.is_compiling():
            numbers = schedule.rule.causal, schedule.rule.window or 0, schedule.rule.softcap or 0.0
            out, _ = _compiled_attend(q, kv, schedule.ring.name, *numbers, schedule.balanced)
            return out
        # No custom operator here: selective recomputation and `plan rehearse` must see each kernel and message.
        with torch.autocast(q.device.type, enabled=False):
            out = _RingAttention.apply(q, kv, schedule)  # type: ignore[no-untyped-call]
        return out
