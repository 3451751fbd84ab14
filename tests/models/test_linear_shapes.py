"""The list of linear layers, made without torch, is that of the modules that are built; so is what adapters choose."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from hpc_train.config.compose import compose
from hpc_train.config.model import HfModelConfig, TransformerConfig, VisionTransformerConfig
from hpc_train.errors import UserError
from hpc_train.models.adapters.adapted_linear import is_conv1d, list_nf4_layers
from hpc_train.models.hf.decoder_shape import describe_decoder
from hpc_train.models.linear_shapes import list_adapted_layers, list_linear_layers, takes_four_bits
from hpc_train.models.registry import build_model
from hpc_train.parallel.adapters import find_target_layers
from hpc_train.parallel.user_model import get_named_blocks

OURS = {
    "gpt": ("model=gpt2_tiny",),
    "llama": ("model=llama_tiny",),
    "experts": ("model=llama_moe_tiny",),
    "latent": ("model=deepseek_tiny",),
    "images": ("model=vit_tiny", "data=digits"),
}
SIZES = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}
FEW = {**SIZES, "intermediate_size": 80, "num_key_value_heads": 2}
MIXED = {**FEW, "num_experts_per_tok": 2}
THEIRS: dict[str, transformers.PretrainedConfig] = {
    "llama": transformers.LlamaConfig(**FEW),
    "gemma2": transformers.Gemma2Config(**FEW, head_dim=16),
    "phi": transformers.PhiConfig(**SIZES, intermediate_size=80),
    "gpt2": transformers.GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=8, resid_pdrop=0, attn_pdrop=0),
    "gpt_neox": transformers.GPTNeoXConfig(**SIZES, intermediate_size=80),
    "mixtral": transformers.MixtralConfig(**MIXED, num_local_experts=4),
    "qwen2_moe": transformers.Qwen2MoeConfig(
        **MIXED, num_experts=4, moe_intermediate_size=24, shared_expert_intermediate_size=128
    ),
    "qwen3_moe": transformers.Qwen3MoeConfig(**MIXED, num_experts=4, moe_intermediate_size=24, head_dim=16),
}


def build_both(name: str, folder: Path) -> tuple[TransformerConfig | VisionTransformerConfig, nn.Module]:
    """Return the shape of a model and its modules on the meta device."""
    if name in OURS:
        config = compose(list(OURS[name])).model
        assert isinstance(config, (TransformerConfig, VisionTransformerConfig))
        with torch.device("meta"):
            return config, build_model(config, 0)
    name = name.removeprefix("hf ")
    THEIRS[name].architectures = [type(transformers.AutoModelForCausalLM.from_config(THEIRS[name])).__name__]
    THEIRS[name].save_pretrained(folder)
    model = HfModelConfig(path=str(folder))
    with torch.device("meta"):
        return describe_decoder(model), build_model(model, 0)


@pytest.mark.parametrize("name", [*OURS, *(f"hf {name}" for name in THEIRS)])
def test_layers_are_those_that_are_built(tmp_path: Path, name: str) -> None:
    shape, built = build_both(name, tmp_path)
    listed = list_linear_layers(shape)
    linear = {
        path: module for path, module in built.named_modules() if isinstance(module, nn.Linear) or is_conv1d(module)
    }
    sizes = {path: tuple(module.weight.shape) for path, module in linear.items()}  # type: ignore[arg-type]
    expected = {path: (layer.inputs, layer.outputs) for path, layer in listed.items()}
    assert expected == {path: size if is_conv1d(linear[path]) else size[::-1] for path, size in sizes.items()}
    blocks = get_named_blocks(built)
    narrow = list_nf4_layers(built, blocks)
    assert [path for path, layer in listed.items() if takes_four_bits(layer)] == [
        path for path in listed if path in narrow
    ]
    for globs in ([], ["*q*", "o"], ["*down*", "*fc2", "*c_proj", "*4h_to_h", "*.o", "*o_proj"]):
        assert choose(list_adapted_layers, shape, globs) == choose(find_target_layers, built, globs)


def choose(function: Callable[..., Iterable[str]], *given: object) -> list[str] | str:
    """Return the names that a function returns, or the text of its UserError."""
    try:
        return list(function(*given))
    except UserError as error:
        return str(error)
