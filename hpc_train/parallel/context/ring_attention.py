"""Ring attention: pass keys and values around the ranks of a sequence (Liu et al. 2023, arXiv:2310.01889).

Each rank keeps its queries and attends to one rank's keys and values at a time; blocks are merged by their log-sum-exp
(Dao et al. 2022, arXiv:2205.14135). On rank r of cp = 3, in order of time:

    round 0   start to send its own k, v to r + 1 and to receive those of r - 1; attend to its own
    round 1   start to send those of r - 1 to r + 1 and to receive those of r - 2; attend to those of r - 1
    round 2   attend to those of r - 2

So a message is on its way while a block is computed. Backward passes k and v around once more; the gradients of a
rank's k and v travel behind them, every rank adds its part, and the last message brings them back. Which blocks those
are, and the messages, are in ring_schedule.py; the attention of one block is in block_attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpc_train._torch.process_groups import find_group
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
from hpc_train.parallel.context.ring_schedule import KeyValueRing, RingSchedule, VisibleBlock


class _RingAttention(torch.autograd.Function):
    """Maps q (B, heads, T / cp, d) and contiguous kv (2, B, kv_heads, T / cp, d) to the attention, shaped as q."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, schedule: RingSchedule) -> Tensor:
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


def _make_schedule(group: str, causal: bool, window: int, softcap: float, balanced: bool) -> RingSchedule:
    """Make the schedule from what an operator can take: the name of a group, and 0 for no window and no soft-cap."""
    return RingSchedule(KeyValueRing(find_group(group)), ScoreRule(causal, window or None, softcap or None), balanced)


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


def _attend(q: Tensor, kv: Tensor, schedule: RingSchedule) -> tuple[Tensor, Tensor]:
    """Return the attention, shaped as q, and the log-sum-exp of all scores of each query, in the accumulation dtype."""
    # In memory the result is (B, T, heads, d), which the output
    # layer reads, so that both save the same tensor for backward.
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
    grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, schedule: RingSchedule
) -> tuple[Tensor, Tensor]:
    """Return (dq, dkv) in the accumulation dtype.

    The gradient of a rank's keys and values follows them around the ring and then returns to the rank, where the part
    from its own queries is added: cp - 1 messages, as many as the keys and values take. Under a window it returns
    directly.
    """
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    zeros = torch.zeros_like(q, dtype=get_accumulation_dtype(q.dtype))
    backward = _Backward(grad, q, out, lse, zeros, schedule.rule)
    local_dkv, pending_dkv = torch.zeros_like(kv, dtype=get_accumulation_dtype(kv.dtype)), None
    direct = schedule.list_shifts(q.shape[2]) is not None
    dkv_by_source: dict[int, Tensor] = {}
    for source, current in schedule.circulate(kv):
        gradients = [backward.differentiate(current, block) for block in schedule.list_blocks(source, q.shape[2])]
        if source == schedule.ring.rank:
            _add_gradients(local_dkv, gradients)
            continue
        # The sum over the ranks before was received while this rank computed.
        dkv = torch.zeros_like(local_dkv) if pending_dkv is None else pending_dkv.wait()
        _add_gradients(dkv, gradients)
        if direct:
            dkv_by_source[source] = dkv
        else:
            pending_dkv = schedule.ring.pass_on(dkv)
    if pending_dkv is not None:
        local_dkv.add_(pending_dkv.wait())
    for part in schedule.return_gradients(dkv_by_source, local_dkv) if direct else ():
        local_dkv.add_(part)
    return backward.dq, local_dkv


def _add_gradients(dkv: Tensor, gradients: list[KeyGradients]) -> None:
    for gradient in gradients:
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
        self._schedule = RingSchedule(ring, rule, balanced)

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
