"""transformers' own Llama, GPT-2 and ViT as the reference: same weights, same outputs, same gradients."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from model_shapes import GPT2, LLAMA, VIT, drawn, tokens
from safetensors.torch import load_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)

from hpc_train.config.model import ModelConfig, TransformerConfig, VisionTransformerConfig
from hpc_train.models.huggingface import State, from_huggingface, to_huggingface

TOLERANCE = 1e-5
LLAMA_CASES = {
    "multi_head": replace(LLAMA, kv_heads=None),
    "grouped_query": LLAMA,
    "one_kv_head": replace(LLAMA, kv_heads=1),
    "tied": replace(LLAMA, tied_embeddings=True),
    "llama_3_1_rope": replace(LLAMA, rope_scaling="llama3", rope_theta=500000.0, heads=2, kv_heads=1),
    "llama_3_2_rope": replace(LLAMA, rope_scaling="llama3", rope_factor=32.0, heads=2, tied_embeddings=True),
    "wide_heads": replace(LLAMA, head_dim=16, norm_eps=1e-6),
    "biases": replace(LLAMA, bias=True),
}
GPT2_CASES = {
    "gpt2": GPT2,
    "exact_gelu": replace(GPT2, activation="gelu"),
    "untied": replace(GPT2, tied_embeddings=False),
}


def llama(config: TransformerConfig) -> PreTrainedModel:
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling == "llama3":
        rope |= {"rope_type": "llama3", "factor": config.rope_factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope["original_max_position_embeddings"] = 8192
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden,
            intermediate_size=config.feed_forward,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads or config.heads,
            head_dim=config.head_dim or config.hidden // config.heads,
            max_position_embeddings=131072,
            rms_norm_eps=config.norm_eps,
            rope_parameters=rope,
            attention_bias=config.bias,
            mlp_bias=config.bias,
            tie_word_embeddings=config.tied_embeddings,
            initializer_range=0.2,
            pad_token_id=None,
        )
    )


def gpt2(config: TransformerConfig) -> PreTrainedModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.max_positions,
            n_embd=config.hidden,
            n_layer=config.layers,
            n_head=config.heads,
            activation_function={"gelu": "gelu", "gelu_tanh": "gelu_new"}[config.activation],
            layer_norm_epsilon=config.norm_eps,
            tie_word_embeddings=config.tied_embeddings,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            initializer_range=0.2,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def vit(config: VisionTransformerConfig) -> PreTrainedModel:
    return ViTForImageClassification(
        ViTConfig(
            image_size=config.image_size,
            patch_size=config.patch_size,
            num_channels=config.channels,
            num_labels=config.classes,
            hidden_size=config.hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            intermediate_size=config.feed_forward,
            layer_norm_eps=config.norm_eps,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.2,
        )
    )


def reference(config: ModelConfig) -> PreTrainedModel:
    """Their model, with values that no initialisation gives: norms and biases off ones and zeros."""
    torch.manual_seed(0)
    makers = {"llama": llama, "gpt2": gpt2, "vit": vit}
    theirs = makers[config.name](config).train()  # type: ignore[operator, arg-type]
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return theirs


def files_of(theirs: PreTrainedModel, folder: Path) -> State:
    """The state dict as their checkpoint file has it."""
    theirs.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def gradients_of(theirs: PreTrainedModel, folder: Path) -> State:
    """Their gradients under the names of their checkpoint file."""
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad)
    return files_of(theirs, folder)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert error < TOLERANCE, f"{what}: {error:.2e}"


def assert_same_model(config: ModelConfig, inputs: torch.Tensor, targets: torch.Tensor, folder: Path) -> None:
    """Forward and all gradients of one and the same loss agree to TOLERANCE of the largest value of each tensor."""
    theirs, ours = reference(config), drawn(config, torch.float32)
    ours.load_state_dict(from_huggingface(files_of(theirs, folder / "weights"), config))
    out, expected = ours(inputs), theirs(inputs).logits
    assert_close(out, expected, "logits")
    ours.loss_sum(out, targets).backward()
    F.cross_entropy(expected.flatten(0, -2), targets.flatten(), reduction="sum").backward()
    gradients = from_huggingface(gradients_of(theirs, folder / "gradients"), config)
    assert gradients.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        if name.endswith("k.bias") and config.name != "llama":  # only rotary makes softmax see it: rounding about zero
            assert parameter.grad.abs().max() < 1e-3 * gradients[name.replace("k.bias", "q.bias")].abs().max()
        else:
            assert_close(parameter.grad, gradients[name], name)


@pytest.mark.parametrize("case", LLAMA_CASES)
def test_llama_equals_that_of_transformers(case: str, tmp_path: Path) -> None:
    config = LLAMA_CASES[case]
    assert_same_model(config, tokens(config), tokens(config).roll(-1), tmp_path)


@pytest.mark.parametrize("case", GPT2_CASES)
def test_gpt2_equals_that_of_transformers(case: str, tmp_path: Path) -> None:
    config = GPT2_CASES[case]
    assert_same_model(config, tokens(config), tokens(config).roll(-1), tmp_path)


def test_vit_equals_that_of_transformers(tmp_path: Path) -> None:
    images = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    assert_same_model(VIT, images, torch.arange(5), tmp_path)


@pytest.mark.parametrize("config", [*LLAMA_CASES.values(), *GPT2_CASES.values(), VIT], ids=str)
def test_weights_come_back_as_they_were_in_the_file(config: ModelConfig, tmp_path: Path) -> None:
    file = files_of(reference(config), tmp_path)
    back = to_huggingface(from_huggingface(file, config), config)
    assert back.keys() == file.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in file.items())


@pytest.mark.parametrize("config", [LLAMA, LLAMA_CASES["tied"], GPT2, VIT], ids=str)
def test_transformers_loads_what_is_exported(config: ModelConfig, tmp_path: Path) -> None:
    ours, theirs = drawn(config, torch.float32), reference(config)
    loaded, report = type(theirs).from_pretrained(
        None, config=theirs.config, state_dict=to_huggingface(ours.state_dict(), config), output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    inputs = torch.randn(2, 1, 8, 8) if isinstance(config, VisionTransformerConfig) else torch.arange(12).reshape(2, 6)
    assert_close(ours(inputs), loaded(inputs).logits, "logits")
