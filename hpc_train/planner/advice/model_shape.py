"""Lints of a model's shape: widths that run slowly on GPUs, and a vocabulary that tp does not divide.

A lint is a function from RunFacts to one Advice or None; lints.LINTS lists them all, in the order of printing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpc_train.models.counts import count_parameters
from hpc_train.models.shape import compute_head_dim
from hpc_train.planner.advice.facts import Advice, RunFacts

_ALIGNED = 8
"""Tensor cores and attention kernels need widths that are multiples of 16 bytes, 8 elements of 16 bits (NVIDIA, Matrix
Multiplication Background User's Guide, "Requirements to Use Tensor Cores")."""
_TILE = 128
"""Rows and columns of the product that one GPU thread block computes (same guide, "Tile Quantization")."""
_PADDINGS = (128, 64, 32, 16, 8)
"""Multiples to pad a vocabulary to. The first is Megatron-LM's default of --make-vocab-size-divisible-by."""
_PADDING_WASTE = 0.01
"""Padding may add this share of rows; if a multiple adds more, the next smaller one is used."""


def check_head_width(facts: RunFacts) -> Advice | None:
    """Report a head_dim that is not a multiple of 8."""
    model = facts.transformer
    if model is None or not facts.tensor_cores or compute_head_dim(model) % _ALIGNED == 0:
        return None
    width = compute_head_dim(model)
    head_counts = [n for n in range(1, model.hidden + 1) if model.hidden % n == 0 and model.hidden // n % _ALIGNED == 0]
    nearest = min(head_counts, key=lambda n: abs(math.log(n / model.heads)), default=None)
    has_grouped_queries = model.kv_heads not in (None, model.heads)
    aligned_width = -(-width // _ALIGNED) * _ALIGNED
    if model.head_dim is not None or nearest is None or has_grouped_queries:
        fix = f"model.head_dim={aligned_width}"
    else:
        fix = f"model.heads={nearest} (head_dim {model.hidden // nearest}), or model.head_dim={aligned_width}"
    why = f"head_dim {width} is not a multiple of {_ALIGNED}: attention pads it, or falls back to slower kernels"
    return Advice("model.heads" if model.head_dim is None else "model.head_dim", why, fix, "warning")


def check_hidden_width(facts: RunFacts) -> Advice | None:
    """Report a hidden width that is not a multiple of 128."""
    model = facts.transformer
    if model is None or not facts.tensor_cores or model.hidden % _TILE == 0:
        return None
    # Without a head_dim of its own, hidden / heads must stay a multiple of 8, too.
    unit = _TILE if model.head_dim is not None else math.lcm(_TILE, _ALIGNED * model.heads)
    below = model.hidden // unit * unit
    choices = [size for size in (below, below + unit) if size]
    why = (
        f"hidden {model.hidden} is not a multiple of {_TILE}: the last tile of every product is partly empty (BLOOM's "
        "training chronicles: 27 % more FLOP/s at 13824 than at 14400)"
    )
    return Advice("model.hidden", why, f"model.hidden={' or '.join(map(str, choices))}", "warning")


def check_feed_forward_width(facts: RunFacts) -> Advice | None:
    """Report a feed-forward width that is not a multiple of 128 on each rank."""
    model, tp = facts.transformer, facts.degrees.tp
    if model is None or not facts.tensor_cores or model.feed_forward % tp or model.feed_forward % (_TILE * tp) == 0:
        return None
    unit = _TILE * tp
    below = model.feed_forward // unit * unit
    choices = " or ".join(str(size) for size in (below, below + unit) if size)
    width = f"feed_forward {model.feed_forward}" + (
        f" over tp={tp}: {model.feed_forward // tp} per rank" if tp > 1 else ""
    )
    why = f"{width} is not a multiple of {_TILE}: the last tile of its products is partly empty"
    return Advice("model.feed_forward", why, f"model.feed_forward={choices}", "hint")


@dataclass(frozen=True)
class VocabPadding:
    """A vocabulary size padded so that it divides well over the tensor-parallel ranks."""

    multiple: int
    """Each rank's rows are a multiple of this."""
    padded: int
    """Rows after padding."""
    waste: float
    """Rows added, as a share of the original ones."""


def choose_vocab_padding(vocab: int, tp: int) -> VocabPadding:
    """Pad to the largest of _PADDINGS that adds at most 1 % of rows; to the smallest if none does."""
    for multiple in _PADDINGS:
        padded = -(-vocab // (multiple * tp)) * multiple * tp
        if padded - vocab <= _PADDING_WASTE * vocab:
            break
    return VocabPadding(multiple, padded, (padded - vocab) / vocab)


def check_vocabulary(facts: RunFacts) -> Advice | None:
    """Report a vocabulary that is not a multiple of a good width on each tensor-parallel rank."""
    model = facts.transformer
    if model is None or not facts.tensor_cores:
        return None
    tp = facts.degrees.tp if facts.config.parallel.tensor.vocabulary else 1
    padding = choose_vocab_padding(model.vocab_size, tp)
    if padding.padded == model.vocab_size:
        return None
    tables = 1 if model.tied_embeddings else 2
    parameters = (padding.padded - model.vocab_size) * model.hidden * tables / (count_parameters(model) or 1)
    ranks = f", over tp={tp}" if tp > 1 else ""
    size = f"a vocabulary of {model.vocab_size}{ranks}"
    why = f"{size} is not a multiple of {padding.multiple} per rank: the head is slower"
    fix = f"model.vocab_size={padding.padded} ({padding.waste:.2%} more rows, {parameters:.2%} more parameters)"
    aligned = model.vocab_size % (_ALIGNED * tp) == 0
    return Advice("model.vocab_size", why, fix, "hint" if aligned else "warning")


def check_precision(facts: RunFacts) -> Advice | None:
    """Report fp32 or fp64 on a GPU whose bf16 peak is much higher."""
    peaks, name = facts.config.cluster.gpu.peak_tflops, facts.config.precision.name
    if name not in ("fp32", "fp64") or not peaks.get("bf16") or not peaks.get(name):
        return None
    ratio = peaks["bf16"] / peaks[name]
    why = f"{name} peaks at {peaks[name]:g} TFLOP/s here, bf16 at {ratio:.0f} times that, in half the memory or less"
    return Advice("precision", why, "precision=bf16 (parameters and the optimizer stay in fp32)", "warning")


def check_adapter_base(facts: RunFacts) -> Advice | None:
    """Report frozen weights of adapters that are kept in fp32, though products are computed in bf16."""
    adapter = facts.config.adapter
    if adapter.kind == "none" or adapter.base != "full" or facts.config.precision.name != "bf16":
        return None
    why = "frozen weights are kept in fp32, and rounded to bf16 for each product"
    return Advice("adapter.base", why, "adapter.base=bf16 (half of their memory, the same losses)", "hint")
