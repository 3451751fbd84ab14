"""Windows and soft-caps against transformers: Mistral, Ministral and the attention of Gemma 2, in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_shapes import LLAMA, drawn
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.gemma2 import Gemma2Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention

from hpc_train.checkpoint.convert.model_config import encode_hf_config, parse_hf_config
from hpc_train.config.model import TransformerConfig
from hpc_train.errors import UserError
from hpc_train.models.hf.library import make_library_config
from hpc_train.models.huggingface import find_model_family, from_huggingface, to_huggingface
from hpc_train.models.layers import Attention, ScaledDotProduct, make_rotary_table

LENGTH, WINDOW = 150, 7
CASES = {
    "mistral": replace(LLAMA, sliding_window=WINDOW),
    "ministral": replace(LLAMA, layers=4, sliding_window=WINDOW, global_every=2),
}


class _Angles(nn.Module):
    """In place of the library's rotary embedding, which computes in float32 whatever the model is in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine, each (B, T, width)."""
        frequencies = 10000 ** (-torch.arange(0, self.width, 2, dtype=torch.float64) / self.width)
        angles = (position_ids.double().unsqueeze(-1) * frequencies).repeat(1, 1, 2)
        return angles.cos(), angles.sin()


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library casts to torch.float32 in norms and in the softmax; here that name means float64."""
    monkeypatch.setattr(torch, "float32", torch.float64)


def _reference(config: TransformerConfig) -> Any:
    """The library's model of the same shape, built from the config.json that an export writes."""
    body = encode_hf_config(config, "float64")
    settings = make_library_config(body, body["model_type"])
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(settings, dtype=torch.float64, attn_implementation="eager")
    theirs.model.rotary_emb = _Angles(settings.head_dim)
    return theirs


def _tokens(config: TransformerConfig) -> Tensor:
    return torch.randint(config.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_are_those_of_transformers(name: str) -> None:
    config = CASES[name]
    assert find_model_family(config) == name
    theirs, ours = _reference(config), drawn(config)
    ours.load_state_dict(from_huggingface(theirs.state_dict(), config))
    tokens = _tokens(config)
    out, expected = ours(tokens), theirs(tokens).logits
    assert (out - expected).abs().max() <= 1e-10 * expected.abs().max()
    ours.loss_sum(out, tokens.roll(-1)).backward()  # type: ignore[operator]
    F.cross_entropy(expected.flatten(0, 1), tokens.roll(-1).flatten(), reduction="sum").backward()
    gradients = from_huggingface({key: value.grad for key, value in theirs.named_parameters()}, config)
    for key, parameter in ours.named_parameters():
        assert parameter.grad is not None
        assert (parameter.grad - gradients[key]).abs().max() <= 1e-10 * gradients[key].abs().max(), key


@pytest.mark.parametrize("name", CASES)
def test_generate_with_a_cache_goes_on_as_our_model_would(name: str) -> None:
    """Greedy, far beyond the window, with the library's cache of keys and values."""
    config = CASES[name]
    ours, theirs = drawn(config), _reference(config)
    theirs.load_state_dict(to_huggingface(ours.state_dict(), config))
    prompt = _tokens(config)[:, :20]
    found = theirs.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0, use_cache=True)
    expected = prompt
    with torch.no_grad():
        for _ in range(12):
            expected = torch.cat((expected, ours(expected)[:, -1].argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", CASES)
def test_a_config_comes_back_as_it_was(name: str) -> None:
    config = CASES[name]
    body = encode_hf_config(config, "float32")
    back = parse_hf_config(body, config.name)
    assert isinstance(back, TransformerConfig)
    assert (back.sliding_window, back.global_every) == (config.sliding_window, config.global_every)


def test_another_order_of_layers_is_refused() -> None:
    body = encode_hf_config(CASES["ministral"], "float32")
    body["layer_types"] = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    with pytest.raises(UserError, match="full attention in every n-th layer"):
        parse_hf_config(body, "other")


def test_soft_caps_have_no_family() -> None:
    with pytest.raises(UserError, match="use --format safetensors"):
        find_model_family(replace(LLAMA, logit_softcap=30.0))


@pytest.mark.parametrize("window", [WINDOW, None])
def test_attention_with_soft_caps_is_that_of_gemma_2(window: int | None) -> None:
    heads, groups, width, hidden = 4, 2, 8, 24
    settings = Gemma2Config(
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=width,
        query_pre_attn_scalar=width,
        attn_logit_softcapping=1.5,
        sliding_window=window or 4096,
        num_hidden_layers=2,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    theirs = Gemma2Attention(settings, layer_idx=0 if window else 1).double()
    core = ScaledDotProduct(causal=True, dropout=0.0, window=window, softcap=1.5)
    ours = Attention(hidden, heads, groups, width, bias=False, core=core).double()
    for name in "qkvo":
        _copy(getattr(theirs, f"{name}_proj"), getattr(ours, name))
    x = torch.randn(2, LENGTH, hidden, dtype=torch.float64) * 5
    back = torch.arange(LENGTH).unsqueeze(1) - torch.arange(LENGTH)
    visible = (back >= 0) & (back < (window or LENGTH))
    mask = torch.zeros(LENGTH, LENGTH, dtype=torch.float64).masked_fill(~visible, -torch.inf).expand(2, 1, -1, -1)
    places = torch.arange(LENGTH)
    found, expected = [], []
    for results, attend in (
        (found, lambda y: ours(y, make_rotary_table(TransformerConfig(name="x"), width, places, torch.float64))),
        (expected, lambda y: theirs(y, _Angles(width)(y, places.unsqueeze(0)), mask)[0]),
    ):
        given = x.clone().requires_grad_()
        out = attend(given)
        out.square().sum().backward()
        results += [out.detach(), given.grad]
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= 1e-10 * b.abs().max()


def _copy(source: nn.Module, target: nn.Linear) -> None:
    with torch.no_grad():
        target.weight.copy_(source.weight)  # type: ignore[arg-type]
