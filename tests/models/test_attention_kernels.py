"""Every way to compute attention is the attention of a mask over all positions, values and gradients, in float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from hpc_train.config.model import TransformerConfig
from hpc_train.models.attention import attention_kernels, plain_attention
from hpc_train.models.attention.attention_kernels import attend, choose_implementation, make_document_mask
from hpc_train.models.attention.plain_attention import ScoreRule
from hpc_train.models.counts import compute_flops_per_token, compute_mean_keys
from hpc_train.models.registry import build_model
from hpc_train.models.shape import find_window

LENGTH = 200
STARTS = torch.tensor([[0] * 50 + [50] * 90 + [140] * 60, [0] * 180 + [180] * 20])
RULES = [ScoreRule(True, window, cap) for window, cap in product((None, 5, 70), (None, 2.0))]


def _brute(q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, starts: Tensor | None) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    places = torch.arange(LENGTH)
    back = places.unsqueeze(1) - places
    visible = ((back >= 0) & (back < (rule.window or LENGTH))).expand(len(q), 1, LENGTH, LENGTH)
    if starts is not None:
        visible = visible & (starts.unsqueeze(2) == starts.unsqueeze(1)).unsqueeze(1)
    return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v


def _error(rule: ScoreRule, backend: str, packed: bool) -> float:
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(2, n, LENGTH, 6, generator=generator, dtype=torch.float64).mul_(2).requires_grad_()
        for n in (4, 2, 2, 4)
    )
    starts = STARTS if packed else None
    mask = None if starts is None else make_document_mask(starts, rule, backend, q)
    results = []
    for out in (attend(q, k, v, rule, backend, mask), _brute(q, k, v, rule, starts)):
        results.append([out.detach(), *torch.autograd.grad(out, (q, k, v), grad)])
    return max((a - b).abs().max().item() for a, b in zip(*results, strict=True))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("backend", ["auto", "flash", "math", "flex"])
def test_each_way_is_the_mask(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_attention, "MAX_SCORES", 1 << 13)  # several blocks of queries
    # torch refuses the backward of FlexAttention on CPUs; here its unfused form runs, which is the same function.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    attention_kernels._make_block_mask.cache_clear()
    ways = set()
    for rule, packed in product(RULES, (False, True)):
        if backend == "flash" and rule.softcap is not None:
            continue
        ways.add(choose_implementation(rule, backend, LENGTH, torch.empty(0), packed=packed))
        assert _error(rule, backend, packed) <= 1e-12, (rule, packed)
    expected = {"flex": {"flex"}, "flash": {"sdpa", "window"}}
    assert ways == expected.get(backend, {"sdpa", "window", "plain"})


def test_a_window_as_long_as_the_sequence_changes_nothing() -> None:
    shape = {"name": "x", "vocab_size": 30, "layers": 2, "hidden": 16, "heads": 2, "feed_forward": 24}
    tokens = torch.randint(30, (2, 12), generator=torch.Generator().manual_seed(0))
    outs = []
    for window in (None, 12, 11):
        torch.manual_seed(0)
        outs.append(build_model(TransformerConfig(**shape, sliding_window=window))(tokens))  # type: ignore[arg-type]
    assert torch.equal(outs[0], outs[1])
    assert not torch.allclose(outs[0][:, -1], outs[2][:, -1])
    assert torch.allclose(outs[0][:, :11], outs[2][:, :11])


def test_flops_count_the_keys_in_the_window() -> None:
    """By counting pairs; T / 2 and its like leave out half a key per token."""
    config = TransformerConfig(name="x", layers=6, sliding_window=10, global_every=3)
    for layer, length in product(range(6), (4, 10, 37, 1000)):
        window = length if layer % 3 == 2 else 10
        seen = sum(min(place + 1, window) for place in range(length)) / length
        assert compute_mean_keys(find_window(config, layer), length) == pytest.approx(seen, abs=0.5)
    plain = TransformerConfig(name="x", layers=6)
    assert compute_flops_per_token(plain, 8) == compute_flops_per_token(config, 8)
    saved = 12 * config.hidden * 4 * (500 - (10 - 100 / 2000))
    whole, less = (compute_flops_per_token(one, 1000) for one in (plain, config))
    assert whole is not None
    assert less == pytest.approx(whole - saved)
