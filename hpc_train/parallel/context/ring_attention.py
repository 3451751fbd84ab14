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
from hpc_train.parallel.context.block_attention import (
    attend_block,
    cast_to_autocast,
    differentiate_block,
    get_accumulation_dtype,
)


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
        operations = [
            dist.P2POp(dist.isend, tensor, self._next, self._group),
            dist.P2POp(dist.irecv, incoming, self._previous, self._group),
        ]
        return PendingReceive(incoming, tensor, dist.batch_isend_irecv(operations))

    def rounds(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (rank, its tensor) for every rank, this one first, while the next tensor is being received."""
        current = own
        for step in range(self.size):
            coming = self.pass_on(current) if step < self.size - 1 else None
            yield (self.rank - step) % self.size, current
            if coming is not None:
                current = coming.wait()


@dataclass(frozen=True)
class VisibleBlock:
    """The part of a round that a causal mask leaves: which queries of this rank see which keys of the other."""

    queries: slice
    keys: slice
    causal: bool
    """Query i sees keys 0 ... i of the block; else all."""


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


@dataclass(frozen=True)
class _Plan:
    ring: KeyValueRing
    causal: bool
    balanced: bool

    def block(self, source: int, length: int) -> VisibleBlock | None:
        return find_visible_block(self.ring.rank, source, length, causal=self.causal, balanced=self.balanced)


class _RingAttention(torch.autograd.Function):
    """Maps q (B, heads, T / cp, d) and contiguous kv (2, B, kv_heads, T / cp, d) to the attention, shaped as q."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, plan: _Plan) -> Tensor:
        out, lse = _attend(q, kv, plan)
        ctx.save_for_backward(q, kv, out, lse)
        ctx.plan = plan
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        q, kv, out, lse = ctx.saved_tensors
        dq, dkv = _differentiate(grads[0], q, kv, out, lse, ctx.plan)
        return dq.to(q.dtype), dkv.to(kv.dtype), None


@torch.library.custom_op("hpc_train::ring_attention", mutates_args=())
def _compiled_attend(q: Tensor, kv: Tensor, group: str, causal: bool, balanced: bool) -> tuple[Tensor, Tensor]:
    """Run _RingAttention.forward as one operator, because a compiled graph cannot contain messages between ranks."""
    with torch.autocast(q.device.type, enabled=False):
        out, lse = _attend(q, kv, _Plan(KeyValueRing(find_group(group)), causal, balanced))
        return out, lse.contiguous()


@_compiled_attend.register_fake
def _(q: Tensor, kv: Tensor, group: str, causal: bool, balanced: bool) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
    return out.transpose(1, 2), q.new_empty(q.shape[:-1], dtype=get_accumulation_dtype(q.dtype))


@torch.library.custom_op("hpc_train::ring_attention_backward", mutates_args=())
def _compiled_differentiate(
    grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, group: str, causal: bool, balanced: bool
) -> tuple[Tensor, Tensor]:
    with torch.autocast(q.device.type, enabled=False):
        dq, dkv = _differentiate(grad, q, kv, out, lse, _Plan(KeyValueRing(find_group(group)), causal, balanced))
        return dq.to(q.dtype), dkv.to(kv.dtype)


@_compiled_differentiate.register_fake
def _(
    grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, group: str, causal: bool, balanced: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(kv)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, kv, *plan = inputs
    ctx.save_for_backward(q, kv, *output)
    ctx.plan = plan
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return (*_compiled_differentiate(grad, *ctx.saved_tensors, *ctx.plan), None, None, None)


_compiled_attend.register_autograd(_backward, setup_context=_save_for_backward)


def _attend(q: Tensor, kv: Tensor, plan: _Plan) -> tuple[Tensor, Tensor]:
    """Return the attention, shaped as q, and the log-sum-exp of all scores of each query, in the accumulation dtype."""
    rounds = plan.ring.rounds(kv)
    _, (k, v) = next(rounds)
    first, first_lse = attend_block(q, k, v, plan.causal)
    # Copied, because selective recomputation may save what a kernel returned. In memory it is (B, T, heads, d), which
    # the output layer reads, so that both save the same tensor for backward.
    out = torch.empty_like(
        q.transpose(1, 2), dtype=get_accumulation_dtype(q.dtype), memory_format=torch.contiguous_format
    )
    out, lse = out.transpose(1, 2).copy_(first), first_lse.clone()
    for source, (k, v) in rounds:
        block = plan.block(source, q.shape[2])
        if block is not None:
            rows, columns = block.queries, block.keys
            part, part_lse = attend_block(q[:, :, rows], k[:, :, columns], v[:, :, columns], block.causal)
            _merge(out[:, :, rows], lse[:, :, rows], part, part_lse)
    return out.to(q.dtype), lse


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

    def block(self, kv: Tensor, block: VisibleBlock) -> KeyGradients:
        """Return the gradients of the block's keys and values; adds that of its queries to dq."""
        rows, (k, v) = block.queries, kv[:, :, :, block.keys]
        grad, q, out, lse = (x[:, :, rows] for x in (self.grad, self.q, self.out, self.lse))
        dq, dk, dv = differentiate_block(grad, q, k, v, out, lse, block.causal)
        self.dq[:, :, rows] += dq
        return KeyGradients(block.keys, dk, dv)


def _differentiate(grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, plan: _Plan) -> tuple[Tensor, Tensor]:
    """Return (dq, dkv) in the accumulation dtype.

    The gradient of a rank's keys and values follows them around the ring and then returns to the rank, where the part
    from its own queries is added: cp - 1 messages, as many as the keys and values take.
    """
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    backward = _Backward(grad, q, out, lse, torch.zeros_like(q, dtype=get_accumulation_dtype(q.dtype)))
    own, coming = torch.zeros_like(kv, dtype=get_accumulation_dtype(kv.dtype)), None
    for source, current in plan.ring.rounds(kv):
        block = plan.block(source, q.shape[2])
        found = None if block is None else backward.block(current, block)
        if source == plan.ring.rank:
            _add(own, found)
            continue
        # The sum over the ranks before was received while this rank computed.
        dkv = torch.zeros_like(own) if coming is None else coming.wait()
        _add(dkv, found)
        coming = plan.ring.pass_on(dkv)
    return backward.dq, own if coming is None else own.add_(coming.wait())


def _add(dkv: Tensor, found: KeyGradients | None) -> None:
    if found is not None:
        dkv[0, :, :, found.keys] += found.dk
        dkv[1, :, :, found.keys] += found.dv


class RingAttention(nn.Module):
    """Attention over a sequence whose positions are split over the ranks of `ring`; no parameters.

    balanced: whether positions are in balanced order; must match the inputs, also for attention that is not causal.
    Keys and values are sent with their own number of heads, (cp - 1) times forward and, with their gradients (in
    float32 at least), (cp - 1) times backward.
    """

    def __init__(self, ring: KeyValueRing, *, causal: bool, balanced: bool) -> None:
        super().__init__()
        self._plan = _Plan(ring, causal, balanced)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend: q (B, heads, T / cp, head_dim), k and v (B, kv_heads, T / cp, head_dim); returns a tensor like q."""
        q, k, v = cast_to_autocast(q, k, v)
        plan = self._plan
        out: Tensor
        if torch.compiler.is_compiling():
            out, _ = _compiled_attend(q, torch.stack((k, v)), plan.ring.name, plan.causal, plan.balanced)
            return out
        # No custom operator here: selective recomputation and `plan rehearse` must see each kernel and message.
        with torch.autocast(q.device.type, enabled=False):
            out = _RingAttention.apply(q, torch.stack((k, v)), plan)  # type: ignore[no-untyped-call]
        return out
