"""Weights of gpt-oss in MXFP4 are read as transformers expands them, and one line says what does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hpc_train.checkpoint.convert.formats.mxfp4 import expand_mxfp4
from hpc_train.checkpoint.convert.pretrained_weights import PretrainedWeights
from hpc_train.config.model import HfModelConfig
from hpc_train.errors import UserError
from hpc_train.models.hf.build import build_hf_model
from hpc_train.models.hf.config_file import read_config_file


def draw_packed(*shape: int) -> tuple[Tensor, Tensor]:
    """Random blocks and scales, (..., groups, 16) and (..., groups)."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 140, shape, generator=generator, dtype=torch.uint8)
    return blocks, scales


def test_two_bytes_by_hand() -> None:
    blocks = torch.zeros(1, 1, 1, 16, dtype=torch.uint8)
    blocks[..., 0] = 0x72  # first 2, then 7
    blocks[..., 1] = 0x9F  # first 15, then 9
    weight = expand_mxfp4(blocks, torch.full((1, 1, 1), 128, dtype=torch.uint8))
    assert weight.shape == (1, 32, 1)
    assert weight[0, :5, 0].tolist() == [2.0, 12.0, -12.0, -1.0, 0.0]


def test_values_are_those_of_transformers() -> None:
    blocks, scales = draw_packed(3, 5, 2)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float64)
    assert torch.equal(expand_mxfp4(blocks, scales).double(), theirs)


def save_mxfp4(folder: Path) -> dict[str, Tensor]:
    """Write a tiny gpt-oss with experts in MXFP4; returns its weights as transformers expands them."""
    config = transformers.GptOssConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        rope_scaling=None,
    )
    transformers.GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    expanded = dict(state)
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = state.pop(name).shape
        blocks, scales = draw_packed(experts, outputs, inputs // 32)
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expanded[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    body = json.loads((folder / "config.json").read_text())
    body["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(body))
    return expanded


def test_a_published_folder_is_expanded_when_it_is_read(tmp_path: Path) -> None:
    expanded = save_mxfp4(tmp_path)
    config = HfModelConfig(path=str(tmp_path))
    with torch.device("meta"):
        plan = PretrainedWeights(config).plan(build_hf_model(config))
    assert not plan.missing
    assert not plan.unused
    assert {name: read().tolist() for name, read in plan.parameters.items()} == {
        name: tensor.tolist() for name, tensor in expanded.items()
    }
    assert "quantization_config" not in read_config_file(config).body  # nor in what an export writes


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("scales", r"gate_up_proj_blocks has no .*gate_up_proj_scales, or they are not uint8 \(MXFP4\)"),
        ("shape", r"gate_up_proj_blocks: is \(2, 64, 1, 16\), and .*gate_up_proj_scales is \(2, 64\); weights in"),
    ],
)
def test_what_does_not_fit_is_one_line(change: str, line: str, tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj_scales"
    scales = state.pop(name)
    if change == "shape":
        state[name] = scales[..., 0].contiguous()
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=line):
        PretrainedWeights(HfModelConfig(path=str(tmp_path)))


def test_other_models_in_mxfp4_are_refused(tmp_path: Path) -> None:
    body = {"model_type": "llama", "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(body))
    with pytest.raises(UserError, match="its weights are quantized"):
        read_config_file(HfModelConfig(path=str(tmp_path)))
