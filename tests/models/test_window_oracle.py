"""Models of transformers in float64: windows (Mistral, Ministral), Gemma 2 and 3, OLMo 2 and 3, scaled positions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_shapes import LLAMA, drawn
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.gemma2 import Gemma2Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention

from hpc_train.checkpoint.convert.model_config import encode_hf_config, parse_hf_config
from hpc_train.config.model import ExpertsConfig, LatentConfig, RopeConfig, TransformerConfig
from hpc_train.errors import UserError
from hpc_train.models.attention.rotary import make_rotary_table
from hpc_train.models.hf.library import make_library_config
from hpc_train.models.huggingface import from_huggingface, to_huggingface
from hpc_train.models.huggingface_family import find_model_family
from hpc_train.models.layers import Attention, ScaledDotProduct

LENGTH, WINDOW = 150, 7
GEMMA = TransformerConfig(
    name="gemma",
    vocab_size=97,
    layers=4,
    hidden=64,  # its root is a number of float32, which is what the library's scale of embeddings is
    heads=4,
    kv_heads=2,
    head_dim=24,
    feed_forward=80,
    activation="geglu",
    norm="rmsnorm_1p",
    norm_eps=1e-6,
    post_norms=True,
    scaled_embeddings=True,
    tied_embeddings=True,
    sliding_window=WINDOW,
    global_every=2,
    attention_scale=20**-0.5,
    attention_softcap=1.5,
    logit_softcap=2.0,
)
GEMMA3_ROPE = RopeConfig(local_theta=1e3)
CASES = {
    "mistral": replace(LLAMA, sliding_window=WINDOW),
    "ministral": replace(LLAMA, layers=4, sliding_window=WINDOW, global_every=2),
    "gemma2": GEMMA,
    "gemma3_text": replace(
        GEMMA, attention_softcap=None, logit_softcap=None, query_key_norm="head", rope=GEMMA3_ROPE, rope_theta=1e5
    ),
}
OLMO = replace(LLAMA, layers=4, pre_norms=False, post_norms=True, query_key_norm="full", rope_theta=5e3)
CASES |= {"olmo2": OLMO, "olmo3": replace(OLMO, sliding_window=WINDOW, global_every=4)}
YARN = {"rope_scaling": "yarn", "rope_factor": 4.0, "rope": RopeConfig(original_positions=32)}
EXPERTS = ExpertsConfig(count=6, top_k=2, feed_forward=24)
SCALED: dict[str, TransformerConfig] = {
    "llama": replace(
        LLAMA, rope_scaling="llama3", rope_factor=4.0, rope=RopeConfig(original_positions=64, low=2.0, high=8.0)
    ),
    "llama linear": replace(LLAMA, rope_scaling="linear", rope_factor=4.0),
    "llama yarn": replace(
        LLAMA,
        rope_scaling="yarn",
        rope=RopeConfig(original_positions=40, beta_fast=8.0, beta_slow=0.5, truncate=False, table_factor=1.3),
    ),
    "gemma3_text linear": replace(CASES["gemma3_text"], rope_scaling="linear", logit_softcap=2.0),
    "olmo3 yarn": replace(
        CASES["olmo3"], **{**YARN, "rope": RopeConfig(original_positions=32, local_theta=5e3, table_factor=1.2)}
    ),
    "mixtral": replace(LLAMA, experts=replace(EXPERTS, feed_forward=None), **YARN),
    "qwen3_moe": replace(LLAMA, query_key_norm="head", experts=EXPERTS, **YARN),
    "olmoe": replace(LLAMA, query_key_norm="full", experts=replace(EXPERTS, normalise=False), **YARN),
    "deepseek_v3": replace(
        LLAMA,
        kv_heads=None,
        rope_scaling="yarn",
        rope_factor=40.0,
        rope=RopeConfig(original_positions=32, mscale=1.0, mscale_all_dim=0.7),
        latent=LatentConfig(kv_rank=20, q_rank=28, nope_head_dim=12, rope_head_dim=8, value_head_dim=10),
        experts=ExpertsConfig(
            count=8,
            top_k=3,
            feed_forward=24,
            shared=2,
            first_dense=1,
            gate="sigmoid",
            scale=2.5,
            groups=4,
            top_groups=2,
            balance_bias=0.001,
        ),
    ),
}


class _Angles(nn.Module):
    """Rotary angles for an attention layer of the library alone."""

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
    """The library casts to float32 in norms, angles and scores of routers; here that name means float64."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(Tensor, "float", Tensor.double)


def _reference(config: TransformerConfig) -> Any:
    """The library's model of the same shape, built from the config.json that an export writes."""
    body = {**encode_hf_config(config, "float64"), "initializer_range": 0.2, "pad_token_id": None}
    settings = make_library_config(body, body["model_type"])
    options = {"experts_implementation": "eager"} if config.experts.count else {}
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(settings, dtype=torch.float64, attn_implementation="eager", **options)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return theirs


def _tokens(config: TransformerConfig) -> Tensor:
    return torch.randint(config.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def _load_state(theirs: Any, config: TransformerConfig, folder: Path) -> dict[str, Tensor]:
    """Its weights under our names, by way of the file that the library writes."""
    theirs.save_pretrained(folder)
    return from_huggingface(load_file(folder / "model.safetensors"), config)


@pytest.mark.parametrize("name", [*CASES, *SCALED])
def test_logits_and_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    config = (CASES | SCALED)[name]
    assert find_model_family(config) == name.split()[0]
    theirs, ours = _reference(config), drawn(config)
    ours.load_state_dict(_load_state(theirs, config, tmp_path / "weights"))
    tokens = _tokens(config)
    out, expected = ours(tokens), theirs(tokens).logits
    assert (out - expected).abs().max() <= 1e-10 * expected.abs().max()
    ours.loss_sum(out, tokens.roll(-1)).backward()  # type: ignore[operator]
    F.cross_entropy(expected.flatten(0, 1), tokens.roll(-1).flatten(), reduction="sum").backward()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad)
    gradients = _load_state(theirs, config, tmp_path / "gradients")
    for key, parameter in ours.named_parameters():
        assert parameter.grad is not None
        assert (parameter.grad - gradients[key]).abs().max() <= 1e-10 * gradients[key].abs().max(), key


@pytest.mark.parametrize("name", CASES)
def test_generate_with_a_cache_goes_on_as_our_model_would(name: str) -> None:
    """Greedy, far beyond the window, with the library's cache of keys and values."""
    config = CASES[name]
    ours, theirs = drawn(config), _reference(config)
    theirs.load_state_dict(to_huggingface(ours.state_dict(), config), strict=not config.tied_embeddings)
    prompt = _tokens(config)[:, :20]
    found = theirs.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0, use_cache=True)
    expected = prompt
    with torch.no_grad():
        for _ in range(12):
            expected = torch.cat((expected, ours(expected)[:, -1].argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", [*CASES, *SCALED])
def test_a_config_comes_back_as_it_was(name: str) -> None:
    """From what an export writes, and from what the library makes of it."""
    config = (CASES | SCALED)[name]
    body = encode_hf_config(config, "float32")
    for given in (body, make_library_config(body, body["model_type"]).to_dict()):
        back = parse_hf_config(given, config.name)
        assert isinstance(back, TransformerConfig)
        width = replace(back.experts, feed_forward=config.experts.feed_forward)
        assert replace(back, experts=width, feed_forward=config.feed_forward) == config


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
