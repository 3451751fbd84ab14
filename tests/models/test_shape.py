"""Every model of conf/model: it builds, has the published size, and its formulas agree with the built model."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from model_shapes import FOLDER, GPT2, LLAMA, VIT, load, shipped
from torch.utils.flop_counter import FlopCounterMode

from hpc_train.config.model import (
    CustomModelConfig,
    ExpertsConfig,
    LatentConfig,
    ModelConfig,
    RopeConfig,
    TransformerConfig,
)
from hpc_train.errors import UserError
from hpc_train.models.counts import compute_flops_per_token, count_parameters
from hpc_train.models.registry import build_model
from hpc_train.models.shape import check_shape

PUBLISHED = {
    "deepseek_tiny": 1_366_464,  # ours
    "deepseek_v3": 671e9,  # DeepSeek-AI 2024, arXiv:2412.19437, abstract
    "gemma2_2b": 2_614_341_888,  # the sum over the published checkpoint, as of the next one
    "gemma3_1b": 999_885_952,
    "gemma_tiny": 821_632,  # ours
    "gpt2_tiny": 957_184,  # ours; pinned so that it stays what its comment says
    "gpt3_175b": 174.6e9,  # Narayanan et al. 2021, arXiv:2104.04473, table 2
    "gpt3_1_3b": 1.316e9,  # Dey et al. 2023, arXiv:2304.03208
    "gpt3_1t": 1008.0e9,  # Narayanan et al. 2021, table 1
    "gpt3_22b": 22e9,  # Korthikanti et al. 2022, arXiv:2205.05198, table 3
    "gpt3_530b": 529.6e9,  # Narayanan et al. 2021, table 1
    "llama_125m": 123_587_328,  # ours
    "llama_13b": 13_015_864_320,  # the sum over the published checkpoint, as of all below
    "llama_1b": 1_235_814_400,
    "llama_405b": 405_853_388_800,
    "llama_70b": 70_553_706_496,
    "llama_7b": 6_738_415_616,
    "llama_8b": 8_030_261_248,
    "llama_moe_tiny": 1_414_272,  # ours
    "llama_tiny": 820_352,  # ours
    "mixtral_8x7b": 46_702_792_704,  # the sum over the published checkpoint, as of the next two
    "olmoe_1b_7b": 6_919_161_856,
    "olmo2_13b": 13.7e9,  # OLMo Team 2025, arXiv:2501.00656
    "olmo2_32b": 32.2e9,
    "olmo2_7b": 7.3e9,
    "olmo3_32b": 32.2e9,  # Olmo Team 2025, arXiv:2512.13961
    "olmo3_7b": 7.3e9,
    "qwen3_30b_a3b": 30_532_122_624,
    "vit_large": 304_326_632,
    "vit_small": 22_050_664,
    "vit_tiny": 202_186,  # ours
}
OURS = ("llama_tiny", "llama_moe_tiny", "deepseek_tiny", "gemma_tiny")
LATENT = replace(
    LLAMA, kv_heads=None, latent=LatentConfig(kv_rank=20, nope_head_dim=12, rope_head_dim=8, value_head_dim=14)
)
VARIANTS = [
    LLAMA,
    GPT2,
    VIT,
    replace(LLAMA, tied_embeddings=True, bias=True),
    replace(LLAMA, head_dim=20, norm="layernorm"),
    replace(LLAMA, experts=ExpertsConfig(count=8, top_k=8, shared=2, first_dense=1), query_key_norm="full"),
    replace(GPT2, bias=False, tied_embeddings=False, activation="swiglu", kv_heads=2),
    replace(LLAMA, norm="rmsnorm_1p", activation="geglu", post_norms=True, query_key_norm="head"),
    replace(LLAMA, pre_norms=False, post_norms=True, query_key_norm="full"),
    LATENT,
    replace(LATENT, latent=replace(LATENT.latent, q_rank=30)),
]


def meta(config: ModelConfig) -> torch.nn.Module:
    with torch.device("meta"):
        return build_model(config)


def test_every_file_is_listed() -> None:
    assert sorted(PUBLISHED) == shipped()


@pytest.mark.parametrize("name", shipped())
def test_the_model_is_named_as_its_file_and_has_a_source(name: str) -> None:
    config = load(name)
    assert config.name == name
    assert name in OURS or all(page.startswith("https://") for page in config.source)  # type: ignore[attr-defined]
    assert name in OURS or config.source  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", shipped())
def test_the_size_is_the_published_one(name: str) -> None:
    count = count_parameters(load(name))
    assert count == pytest.approx(PUBLISHED[name], rel=0 if isinstance(PUBLISHED[name], int) else 0.01)


@pytest.mark.parametrize("config", [*map(load, shipped()), *VARIANTS], ids=lambda config: config.name)
def test_parameter_count_is_that_of_the_built_model(config: ModelConfig) -> None:
    assert count_parameters(config) == sum(parameter.numel() for parameter in meta(config).parameters())


@pytest.mark.parametrize(
    "config", [LLAMA, GPT2, LATENT, load("llama_8b"), load("gpt3_22b")], ids=["llama", "gpt2", "latent", "8b", "22b"]
)
def test_flops_are_those_that_torch_counts(config: TransformerConfig) -> None:
    length = 64
    model = meta(config)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, length, dtype=torch.int64, device="meta"))
    uncounted = _attention(config, length)  # torch counts no causal half
    forward = counter.get_total_flops()
    assert compute_flops_per_token(config, length) == pytest.approx(3 * (forward - uncounted) / length, rel=1e-12)


def _attention(config: TransformerConfig, length: int) -> float:
    """Half of the FLOPs of both products of attention without a mask, forward."""
    width = config.head_dim or config.hidden // config.heads
    whole = 4.0 * config.layers * config.heads * length * length
    if config.latent.kv_rank:  # values are computed as wide as keys; only their own width counts
        queries = config.latent.nope_head_dim + config.latent.rope_head_dim
        return whole * (queries - (queries + config.latent.value_head_dim) / 4)
    return whole * width / 2


def test_flops_of_an_image_are_those_that_torch_counts() -> None:
    model = meta(VIT)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, VIT.channels, VIT.image_size, VIT.image_size, device="meta"))
    assert compute_flops_per_token(VIT, 1) == pytest.approx(3 * counter.get_total_flops(), rel=1e-12)


def test_flops_of_llama_8b_by_hand() -> None:
    weights = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256
    assert compute_flops_per_token(load("llama_8b"), 8192) == 6 * weights + 6 * 32 * 4096 * 8192


def test_a_custom_model_has_no_formula() -> None:
    config = CustomModelConfig(name="mine")
    assert count_parameters(config) is None
    assert compute_flops_per_token(config, 128) is None


def test_the_shipped_custom_model_lacks_only_its_name() -> None:
    assert (FOLDER / "custom.yaml").read_text().rstrip().endswith("name: ???")


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (replace(LLAMA, heads=7, kv_heads=None), "model.heads=7: does not divide model.hidden=48; "),
        (replace(LLAMA, kv_heads=4), "model.kv_heads=4: does not divide model.heads=6; "),
        (replace(LLAMA, kv_heads=12), "model.kv_heads=12: does not divide model.heads=6; "),
        (replace(LLAMA, head_dim=7), "model.head_dim=7: must be even"),
        (replace(LATENT, kv_heads=2), "model.kv_heads=2: latent attention expands keys and values for each of "),
        (
            replace(LATENT, latent=replace(LATENT.latent, value_head_dim=21)),
            "model.latent.value_head_dim=21: is wider ",
        ),
        (replace(LATENT, latent=replace(LATENT.latent, rope_head_dim=7)), "model.latent.rope_head_dim=7: must be even"),
        (replace(LATENT, dropout=0.1), "model.dropout=0.1: model.latent.kv_rank=20 goes only with model.dropout=0.0"),
        (replace(LATENT, head_dim=8), "model.head_dim=8: model.latent.kv_rank=20 goes only with model.head_dim=null"),
        (replace(LLAMA, latent=LatentConfig(q_rank=4)), "model.latent: has settings, but model.latent.kv_rank=0 "),
        (replace(VIT, heads=5), "model.heads=5: does not divide model.hidden=48; "),
        (replace(VIT, patch_size=3), "model.patch_size=3: does not divide model.image_size=8; "),
    ],
)
def test_a_shape_that_does_not_fit_is_one_line(config: ModelConfig, line: str) -> None:
    for attempt in (check_shape, build_model):
        with pytest.raises(UserError) as error:
            attempt(config)
        assert str(error.value).startswith(line)
        assert "\n" not in str(error.value)


def test_shapes_and_the_registry_need_no_torch() -> None:
    code = "import sys, hpc_train.models, hpc_train.models.shape; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope": RopeConfig(low=2.0)}, "model.rope.low=2.0: has no effect with model.rope_scaling=none"),
        ({"rope_scaling": "llama3", "rope": RopeConfig(mscale=1.0)}, "it is of yarn"),
        ({"rope_scaling": "yarn", "rope": RopeConfig(beta_fast=1.0)}, "must be less than model.rope.beta_fast=1"),
        ({"rope_scaling": "yarn", "rope_theta": 1.0}, "yarn needs a base above 1"),
        ({"rope": RopeConfig(local_theta=5.0)}, "set model.sliding_window"),
    ],
)
def test_settings_of_rotary_positions_that_do_nothing_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_shape(replace(LLAMA, **changes))  # type: ignore[arg-type]
