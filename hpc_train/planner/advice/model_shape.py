"""Lints of a model's shape: widths that GPUs multiply slowly, and a vocabulary that does not divide."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpc_train.models.shape import compute_head_dim, count_parameters
from hpc_train.planner.advice.facts import Advice, RunFacts

_ALIGNED = 8
"""Elements of 16 bits in 16 bytes, by multiples of which tensor cores and attention kernels take a head (NVIDIA, Matrix
Multiplication Background User's Guide, "Requirements to Use Tensor Cores")."""
_TILE = 128
"""Rows and columns of a product that one thread block of a GPU computes (same guide, "Tile Quantization")."""
_PADDINGS = (128, 64, 32, 16, 8)
"""Multiples to pad a vocabulary to, the first of which is Megatron-LM's --make-vocab-size-divisible-by."""
_PADDING_WASTE = 0.01
"""Share of rows that padding may add; where 128 adds more, a smaller multiple is used."""


def check_head_width(facts: RunFacts) -> Advice | None:
    """head_dim % 8."""
    model = facts.transformer
    if model is None or not facts.tensor_cores or compute_head_dim(model) % _ALIGNED == 0:
        return None
    width = compute_head_dim(model)
    fits = [n for n in range(1, model.hidden + 1) if model.hidden % n == 0 and model.hidden // n % _ALIGNED == 0]
    near = min(fits, key=lambda n: abs(math.log(n / model.heads)), default=None)
    grouped = model.kv_heads not in (None, model.heads)
    up = -(-width // _ALIGNED) * _ALIGNED
    if model.head_dim is not None or near is None or grouped:
        fix = f"model.head_dim={up}"
    else:
        fix = f"model.heads={near} (head_dim {model.hidden // near}), or model.head_dim={up}"
    why = f"head_dim {width} is no multiple of {_ALIGNED}: attention pads it, or falls back to slower kernels"
    return Advice("model.heads" if model.head_dim is None else "model.head_dim", why, fix, "warning")


def check_hidden_width(facts: RunFacts) -> Advice | None:
    """hidden % 128."""
    model = facts.transformer
    if model is None or not facts.tensor_cores or model.hidden % _TILE == 0:
        return None
    unit = _TILE if model.head_dim is not None else math.lcm(_TILE, _ALIGNED * model.heads)
    below = model.hidden // unit * unit
    choices = [size for size in (below, below + unit) if size]
    why = (
        f"hidden {model.hidden} is no multiple of {_TILE}: the last tile of every product is partly empty (BLOOM's "
        "training chronicles: 27 % more FLOP/s at 13824 than at 14400)"
    )
    return Advice("model.hidden", why, f"model.hidden={' or '.join(map(str, choices))}", "warning")


def check_feed_forward_width(facts: RunFacts) -> Advice | None:
    """feed_forward / tp % 128."""
    model, tp = facts.transformer, facts.degrees.tp
    if model is None or not facts.tensor_cores or model.feed_forward % tp or model.feed_forward % (_TILE * tp) == 0:
        return None
    unit = _TILE * tp
    below = model.feed_forward // unit * unit
    choices = " or ".join(str(size) for size in (below, below + unit) if size)
    share = f"feed_forward {model.feed_forward}" + (f" over tp={tp}" if tp > 1 else "")
    why = (
        f"{share} is {model.feed_forward // tp}, no multiple of {_TILE}: the last tile of its products is partly empty"
    )
    return Advice("model.feed_forward", why, f"model.feed_forward={choices}", "hint")


@dataclass(frozen=True)
class VocabPadding:
    """Rows to add to a vocabulary."""

    multiple: int
    """Of which a rank's part is one."""
    padded: int
    waste: float
    """Rows added over those that are needed."""


def choose_vocab_padding(vocab: int, tp: int) -> VocabPadding:
    """The largest multiple of _PADDINGS, a rank, that adds no more than 1 % of rows; the smallest if none does."""
    for multiple in _PADDINGS:
        padded = -(-vocab // (multiple * tp)) * multiple * tp
        if padded - vocab <= _PADDING_WASTE * vocab:
            break
    return VocabPadding(multiple, padded, (padded - vocab) / vocab)


def check_vocabulary(facts: RunFacts) -> Advice | None:
    """vocab_size % (multiple x tp)."""
    model = facts.transformer
    if model is None or not facts.tensor_cores:
        return None
    tp = facts.degrees.tp if facts.config.parallel.tensor.vocabulary else 1
    told = choose_vocab_padding(model.vocab_size, tp)
    if told.padded == model.vocab_size:
        return None
    tables = 1 if model.tied_embeddings else 2
    more = (told.padded - model.vocab_size) * model.hidden * tables / (count_parameters(model) or 1)
    ranks = f", over tp={tp}" if tp > 1 else ""
    why = f"a vocabulary of {model.vocab_size}{ranks} is no multiple of {told.multiple} a rank, which slows the head"
    fix = f"model.vocab_size={told.padded} ({told.waste:.2%} more rows, {more:.2%} more parameters)"
    aligned = model.vocab_size % (_ALIGNED * tp) == 0
    return Advice("model.vocab_size", why, fix, "hint" if aligned else "warning")


def check_precision(facts: RunFacts) -> Advice | None:
    """fp32 on a GPU that has a much higher peak in bf16."""
    peaks, name = facts.config.cluster.gpu.peak_tflops, facts.config.precision.name
    if name not in ("fp32", "fp64") or not peaks.get("bf16") or not peaks.get(name):
        return None
    ratio = peaks["bf16"] / peaks[name]
    why = f"{name} has a peak of {peaks[name]:g} TFLOP/s here, bf16 {ratio:.0f} times that, in half the memory or less"
    return Advice("precision", why, "precision=bf16 (parameters and the optimizer stay in fp32)", "warning")
