"""torch's fused attention kernels: which one is chosen, and their log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend


def find_sdpa_backend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> SDPBackend:
    """Return the backend that scaled_dot_product_attention would take for these tensors.

    Private because torch has public checks of single backends on CUDA only, and none that tells its own choice.
    """
    grouped = q.shape[1] != k.shape[1]
    return SDPBackend(torch._fused_sdp_choice(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped))


def has_flash_attention(q: Tensor) -> bool:
    """Whether torch has a fused attention for these queries (B, heads, T, head_dim) that gives the log-sum-exp too."""
    if q.device.type == "cpu":
        return hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    fits = q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return q.device.type == "cuda" and fits and torch.backends.cuda.is_flash_attention_available()


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return (attention, log-sum-exp of the scores (B, heads, T)); k and v may have fewer heads.

    Private because the public function keeps the log-sum-exp to itself, without which blocks cannot be merged.
    """
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return out, lse
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return out, lse


def flash_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of flash_attention. Private as that is; out and lse may be those over more keys than k."""
    if q.device.type == "cpu":
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = backward(grad, q, k, v, out, lse, 0.0, causal)
        return dq, dk, dv
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # state of dropout's generator
    lengths = (None, None, q.shape[2], k.shape[2])
    dq, dk, dv = backward(grad, q, k, v, out, lse.contiguous(), *lengths, 0.0, causal, unused, unused)
    return dq, dk, dv
