"""MFU: a number where the model's FLOPs and the device's peak are known, else nothing."""

import json
from pathlib import Path

import pytest

from hpc_train.config.compose import compose
from hpc_train.config.model import HfModelConfig
from hpc_train.training.records.mfu import compute_mfu, find_peak_flops, find_token_flops

H100 = "NVIDIA H100 80GB HBM3"


def test_an_unknown_or_another_device_has_no_peak() -> None:
    assert find_peak_flops(compose(["cluster=dgx_h100", "precision=bf16"]), None) is None
    assert find_peak_flops(compose(["cluster=dgx_h100", "precision=bf16"]), "NVIDIA A100-SXM4-80GB") is None
    assert find_peak_flops(compose(["cluster=local", "precision=bf16"]), H100) is None


def test_the_device_of_the_cluster_has_the_peak_of_the_precision() -> None:
    config = compose(["cluster=dgx_h100", "precision=bf16"])
    assert config.cluster.gpu.name is not None
    assert find_peak_flops(config, config.cluster.gpu.name) == config.cluster.gpu.peak_tflops["bf16"] * 1e12
    assert config.cluster.gpu.peak_tflops["bf16"] == pytest.approx(989, rel=0.01), (
        "dense, as the vendor's data sheet says"
    )


def test_without_a_peak_there_is_no_utilisation() -> None:
    assert compute_mfu(1e6, None, 1000, 1.0, 1) is None


def test_the_formula_by_hand() -> None:
    """llama_tiny: 4 blocks of q, o 128x128, k, v 128x64, three 128x384 branches; a head 128x256."""
    config = compose(["model=llama_tiny", "train.sequence_length=256"])
    weights = 4 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384) + 128 * 256
    flops_per_token = 6 * weights + 6 * 4 * 128 * 256
    assert find_token_flops(config.model, 256) == flops_per_token
    assert find_token_flops(config.model, 256, frozen=True) == flops_per_token - 2 * weights
    value = compute_mfu(flops_per_token, peak=1e12, tokens=4096, seconds=0.5, ranks=2)
    assert value == pytest.approx(4096 * flops_per_token / (0.5 * 2 * 1e12), rel=1e-12)


def test_a_model_of_unknown_flops_has_no_utilisation() -> None:
    assert find_token_flops(compose(["model=custom", "model.name=mine"]).model, 64) is None
    assert compute_mfu(None, 1e12, 1000, 1.0, 1) is None


def test_a_decoder_of_transformers_has_the_flops_of_its_shape(tmp_path: Path) -> None:
    sizes = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    body = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], **sizes, "intermediate_size": 80}
    (tmp_path / "config.json").write_text(json.dumps(body | {"sliding_window": 32, "num_key_value_heads": 2}))
    weights = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 80) + 64 * 96
    keys = 64 / 2 + (32 - 32**2 / 128)  # of the layer without and of the one with a window
    assert find_token_flops(HfModelConfig(path=str(tmp_path)), 64) == 6 * weights + 12 * 64 * keys
    (tmp_path / "config.json").write_text(json.dumps(body | {"model_type": "stablelm"}))
    assert find_token_flops(HfModelConfig(path=str(tmp_path)), 64) is None
