"""Compute attention with the configured kernel: torch's fused kernels, FlexAttention, or plain operations.

`auto` leaves the choice to torch's scaled_dot_product_attention, which has no soft-caps and takes a window only as a
mask. On GPUs FlexAttention (Dong et al. 2024, arXiv:2412.05496) computes these and packed documents, and skips blocks
of keys that no query sees. On CPUs, where it has no backward, a window is cut into blocks of the sequence, each with
the keys of its own and of the previous block, and soft-caps are computed by plain operations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from hpc_train.models.attention.plain_attention import ScoreRule, attend_plainly
from hpc_train.models.dropout import list_positions

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""The backends of scaled_dot_product_attention by the names of model.attention."""

DocumentMask = Tensor | BlockMask
"""The mask that keeps packed documents apart, in the form that the kernel takes; see make_document_mask."""


def choose_implementation(rule: ScoreRule, backend: str, length: int, like: Tensor, *, packed: bool) -> str:
    """Return how attention is computed: sdpa, window (sdpa in blocks), plain or flex.

    length: of the sequences. like: a tensor of the device and dtype of the queries.
    """
    special = packed or rule.softcap is not None or rule.cuts(length)
    if backend == "flex" or (backend == "auto" and special and like.is_cuda and like.dtype != torch.float64):
        return "flex"
    if rule.softcap is not None:
        return "plain"
    return "window" if rule.cuts(length) and not packed else "sdpa"


def attend(
    q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, backend: str, mask: DocumentMask | None, dropout: float = 0.0
) -> Tensor:
    """Return the attention, shaped as q, of whole sequences under `rule`.

    q: (B, heads, T, head_dim); k and v: (B, kv_heads, T, head_dim), and kv_heads divides heads. mask: from
    make_document_mask. dropout: of weights, with torch's own masks; not with soft-caps or FlexAttention.
    """
    implementation = choose_implementation(rule, backend, q.shape[2], q, packed=mask is not None)
    if implementation == "flex":
        assert dropout == 0.0, "not with FlexAttention"
        assert not isinstance(mask, Tensor), "made for another kernel"
        return attend_flexibly(q, k, v, rule, mask)
    assert not isinstance(mask, BlockMask), "made for FlexAttention"
    if implementation == "plain":
        assert dropout == 0.0, "soft-caps take dropout in hpc_train's engines only, which give each layer a site"
        return attend_plainly(q, k, v, list_positions(q.shape[2], q.device), None, rule, starts=mask)
    if backend == "auto":  # also leaves alone what the user has switched off by torch.backends
        return _attend_fused(q, k, v, rule, implementation, mask, dropout)
    with sdpa_kernel(KERNELS[backend]):
        return _attend_fused(q, k, v, rule, implementation, mask, dropout)


def _attend_fused(
    q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, implementation: str, mask: Tensor | None, dropout: float
) -> Tensor:
    if implementation == "window":
        assert rule.window is not None
        return attend_window(q, k, v, rule.window, dropout)
    is_causal, grouped = rule.causal and mask is None, q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, enable_gqa=grouped
    )


def make_document_mask(starts: Tensor, rule: ScoreRule, backend: str, like: Tensor) -> DocumentMask:
    """Return what `attend` needs to keep the documents of packed sequences apart.

    A query sees the keys of its own document up to its own position, and of these only those in the window. starts: (B,
    T), int64, the place in its sequence at which the document of each place begins. like: of the device and dtype of
    the queries. Returns (B, 1, T, T) bool, a BlockMask for FlexAttention, or `starts` themselves.
    """
    implementation = choose_implementation(rule, backend, starts.shape[1], like, packed=True)
    if implementation == "plain":
        return starts
    if implementation == "flex":
        return make_document_block_mask(starts, rule)
    places = list_positions(starts.shape[1], starts.device)
    first = starts if rule.window is None else starts.maximum(places - rule.window + 1)
    return ((places >= first.unsqueeze(-1)) & (places <= places.unsqueeze(-1))).unsqueeze(1)


MIN_BLOCK = 64
"""Shortest block of attend_window: below it the kernel's own overhead is more than what is left out."""


def attend_window(q: Tensor, k: Tensor, v: Tensor, window: int, dropout: float) -> Tensor:
    """Return causal attention to the last `window` keys, in work and memory of O(T window).

    The sequence is cut into blocks as long as the window; the queries of a block see keys of it and of the one before
    (Beltagy et al. 2020, arXiv:2004.05150, section 3.1), all of which is one call with blocks as sequences.
    """
    length, size, grouped = q.shape[2], max(window, MIN_BLOCK), q.shape[1] != k.shape[1]
    if length <= 2 * size:
        mask = _make_window_mask(list_positions(length, q.device), list_positions(length, q.device), window)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, enable_gqa=grouped)
    count = -(-length // size)
    q, k, v = (
        F.pad(x, (0, 0, 0, count * size - length)).view(*x.shape[:2], count, size, x.shape[3]) for x in (q, k, v)
    )
    # (B, heads, blocks, size, d): the block before the first one is zeros, which the mask hides.
    k, v = (torch.cat((F.pad(x, (0, 0, 0, 0, 1, 0))[:, :, :-1], x), dim=3) for x in (k, v))
    mask = _make_window_mask(list_positions(size, q.device) + size, list_positions(2 * size, q.device), window)
    masks = mask.expand(count, 1, size, 2 * size).clone()
    masks[0, ..., :size] = False
    batch = q.shape[0]
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=masks.repeat(batch, 1, 1, 1), dropout_p=dropout, enable_gqa=grouped
    )
    return out.view(batch, count, *out.shape[1:]).transpose(1, 2).flatten(2, 3)[:, :, :length]


def _make_window_mask(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """Return which keys each query sees, (queries, keys) bool."""
    back = queries.unsqueeze(-1) - keys
    return (back >= 0) & (back < window)


def attend_flexibly(q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, mask: BlockMask | None) -> Tensor:
    """Compute `attend` with FlexAttention. mask: of documents; None: as the rule says."""
    if mask is None and rule.causal:
        mask = _make_block_mask(rule, q.shape[2], q.device)
    call: Any = flex_attention if torch.compiler.is_compiling() or not q.is_cuda else _compile_flex()
    cap = None if rule.softcap is None else _make_cap(rule.softcap)
    out: Tensor = call(q, k, v, score_mod=cap, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return out


@cache
def _compile_flex() -> Callable[..., Any]:
    """Compile FlexAttention once: uncompiled it stores all scores."""
    return torch.compile(flex_attention, dynamic=False)


@cache
def _make_cap(softcap: float) -> Callable[..., Tensor]:
    """Return the score function of a soft-cap; the same object each time, so that nothing is compiled again."""

    def cap(score: Tensor, *_: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


def _is_visible(rule: ScoreRule, query: Tensor, key: Tensor) -> Tensor:
    visible = key <= query
    return visible if rule.window is None else visible & (query - key < rule.window)


@lru_cache(maxsize=8)
def _make_block_mask(rule: ScoreRule, length: int, device: torch.device) -> BlockMask:
    """Return the blocks of keys that blocks of queries see, made once for a length."""
    return create_block_mask(lambda b, h, q, k: _is_visible(rule, q, k), None, None, length, length, device=device)


def make_document_block_mask(starts: Tensor, rule: ScoreRule) -> BlockMask:
    """Return the block mask of packed documents; starts: (B, T), as in make_document_mask."""
    batch, length = starts.shape

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return _is_visible(rule, q, k) & (k >= starts[b, q])

    return create_block_mask(visible, batch, None, length, length, device=starts.device, _compile=starts.is_cuda)
