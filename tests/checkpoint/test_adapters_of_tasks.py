"""Adapters on models of transformers that are no decoders: PEFT chooses its class by the task, and has equal logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from adapted_runs import save_adapted_run
from checkpoint_commands import Terminal
from drawn import draw

from hpc_train.checkpoint.convert.adapted_base import explain_lost_layers
from hpc_train.config.compose import compose
from hpc_train.config.model import HfModelConfig

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
TOKENS = torch.arange(24).view(2, 12) % 61
KINDS: dict[str, tuple[Any, Any, dict[str, torch.Tensor], str | None]] = {
    "bert": (
        transformers.AutoModelForMaskedLM,
        transformers.BertConfig(vocab_size=61, **SIZES),
        {"input_ids": TOKENS},
        None,
    ),
    "t5": (
        transformers.AutoModelForSeq2SeqLM,
        transformers.T5Config(vocab_size=61, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2),
        {"input_ids": TOKENS, "decoder_input_ids": TOKENS},
        "SEQ_2_SEQ_LM",
    ),
    "vit": (
        transformers.AutoModelForImageClassification,
        transformers.ViTConfig(**SIZES, image_size=8, patch_size=4, num_channels=1, num_labels=3),
        {"pixel_values": torch.linspace(-1, 1, 128, dtype=torch.float64).view(2, 1, 8, 8)},
        None,
    ),
}


@pytest.mark.parametrize("kind", draw(KINDS, ["t5", "vit"]))
@torch.no_grad()
def test_peft_loads_the_adapter_of_any_task(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    auto, settings, inputs, task = KINDS[kind]
    torch.manual_seed(0)
    auto.from_config(settings).double().save_pretrained(tmp_path / "base")

    def load() -> Any:
        return auto.from_pretrained(tmp_path / "base", dtype=torch.float64).eval()

    words = ["model=hf", f"model.path={tmp_path / 'base'}", "precision=fp64", "adapter=lora", "adapter.rank=3"]
    config = compose([*words, "data=digits"] if kind == "vit" else [*words, "model.mask_token=1"])
    ours = save_adapted_run(tmp_path / "run", load(), config).eval()(**inputs).logits
    assert not torch.allclose(load()(**inputs).logits, ours, atol=1e-2)
    Terminal(capsys).ok("export", tmp_path / "run", tmp_path / "adapter", "--adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["task_type"] == task
    theirs = peft.PeftModel.from_pretrained(load(), tmp_path / "adapter").double().eval()
    torch.testing.assert_close(theirs(**inputs).logits, ours, rtol=1e-10, atol=1e-10)


def test_layers_that_peft_takes_for_experts_are_said_to_be_lost(tmp_path: Path) -> None:
    model = HfModelConfig(path=str(tmp_path))
    layers = ["model.layers.0.self_attn.o_proj", "model.layers.0.mlp.gate_proj"]
    transformers.DeepseekV3Config().save_pretrained(tmp_path)
    assert "takes model.layers.0.mlp.gate_proj for parts of the experts" in (explain_lost_layers(layers, model) or "")
    assert explain_lost_layers(layers[:1], model) is None
    transformers.LlamaConfig().save_pretrained(tmp_path)
    assert explain_lost_layers(layers, model) is None
