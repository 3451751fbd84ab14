"""A run with its base in 4 bits: small checkpoints, resumed, measured, exported for PEFT and merged; a changed base."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from bitsandbytes.functional import dequantize_4bit
from safetensors.torch import load_file, save_file

from hpc_train.cli.main import main
from hpc_train.config.compose import compose
from hpc_train.interfaces import World
from hpc_train.models.adapters.nf4 import expand, quantize
from hpc_train.parallel.apply import build
from hpc_train.testing import run_ranks
from hpc_train.training.factory import make_deferred_model

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def save_base(folder: Path, **changes: int) -> Path:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**{**SIZES, "vocab_size": 256, **changes}, initializer_range=0.1)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def run(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert main(list(map(str, words))) == 0
    return capsys.readouterr().out


def refuse(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert main(list(map(str, words))) == 2
    return capsys.readouterr().err


def round_weights(model: Any) -> Any:
    """Put the numbers that NF4 keeps in the place of the weights of linear layers."""
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            layer.weight.data = expand(*quantize(layer.weight.data), torch.float32)
    return model


@pytest.mark.long
@pytest.mark.timeout(900)
@torch.no_grad()
def test_a_run_from_its_start_to_peft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, tuned = save_base(tmp_path / "base"), tmp_path / "tuned"
    words = [
        "train",
        "model=hf",
        f"model.path={base}",
        "adapter=qlora",
        "data=stdlib",
        "launch.ranks=2",
        "parallel=fsdp",
    ]
    words += ["train.sequence_length=32", "train.global_batch=4", "train.micro_batch=2", "train.eval_batches=2"]
    words += ["adapter.rank=2", "optim.lr=1e-2", "checkpoint.every=2", f"run_dir={tuned}"]
    printed = run(capsys, *words, "train.steps=2")
    assert "base: nf4, 14 linear layers with 81,920 numbers of 4.5 bits" in printed
    printed = run(capsys, *words, "train.steps=4")
    assert "resume" in printed
    listed = json.loads(run(capsys, "checkpoint", "ls", tuned, "--json"))
    assert max(step["bytes"] for step in listed) < 0.7 * (base / "model.safetensors").stat().st_size
    last = json.loads((tuned / "metrics.jsonl").read_text().splitlines()[-1])
    measured = json.loads(run(capsys, "eval", tuned, "--batches", 2, "--json"))
    assert measured["loss"] == pytest.approx(last["validation_loss"], rel=1e-5)

    run(capsys, "checkpoint", "export", tuned, tmp_path / "adapter", "--adapter")
    run(capsys, "checkpoint", "export", tuned, tmp_path / "merged", "--merged")
    answer = run(capsys, "generate", tuned, "--prompt", "def ", "--tokens", 8)
    tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(1))
    plain = round_weights(transformers.LlamaForCausalLM.from_pretrained(base))
    before = plain(tokens).logits
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    merged = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    wanted = theirs(tokens).logits
    assert (wanted - before).abs().max() > 1e-2
    torch.testing.assert_close(merged(tokens).logits, wanted, rtol=1e-4, atol=1e-4)
    begin = torch.tensor([list(b"def ")])
    out = theirs.generate(input_ids=begin, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert bytes(out[0].tolist()).decode(errors="replace") == answer.removesuffix("\n")

    four_bits = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    small = transformers.LlamaForCausalLM.from_pretrained(base, quantization_config=four_bits, dtype=torch.float32)
    of_library = peft.PeftModel.from_pretrained(small, tmp_path / "adapter").eval()
    weight = small.get_submodule("model.layers.1.mlp.down_proj").base_layer.weight
    rounded = plain.get_submodule("model.layers.1.mlp.down_proj").base_layer.weight
    assert torch.equal(dequantize_4bit(weight.data, weight.quant_state), rounded)
    # On a CPU bitsandbytes multiplies in bfloat16.
    torch.testing.assert_close(of_library(tokens).logits, wanted, rtol=0, atol=0.1)

    # another adapter of PEFT to begin with
    words[-1] = f"run_dir={tmp_path / 'next'}"
    printed = run(capsys, *words, "train.steps=2", f"adapter.path={tmp_path / 'adapter'}")
    assert "adapter: 14 layers start from" in printed
    again = json.loads((tmp_path / "next" / "metrics.jsonl").read_text().splitlines()[0])
    assert again["loss"] < json.loads((tuned / "metrics.jsonl").read_text().splitlines()[0])["loss"]

    shutil.copytree(base, tmp_path / "kept")
    state = load_file(base / "model.safetensors")
    state["model.layers.0.mlp.up_proj.weight"].add_(1e-3)
    save_file(state, base / "model.safetensors", metadata={"format": "pt"})
    changed = "its adapters were trained on other weights than those in model.path="
    words[-1] = f"run_dir={tuned}"
    for command in (["eval", tuned], ["generate", tuned, "--prompt", "a"], [*words, "train.steps=6"]):
        assert changed in refuse(capsys, *command)
    assert changed in refuse(capsys, "checkpoint", "export", tuned, tmp_path / "no", "--merged")
    run(capsys, "checkpoint", "export", tuned, tmp_path / "yes", "--merged", "--base", tmp_path / "kept")


def read_peak(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def test_a_rank_needs_its_shards_and_one_tensor(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", hidden_size=1024, intermediate_size=4096, num_hidden_layers=8)
    config = compose(["model=hf", f"model.path={base}", "adapter=qlora", "parallel=fsdp", "train.sequence_length=32"])

    def measure(world: World) -> tuple[int, int, int, int]:
        model, values = make_deferred_model(config, world)
        whole, largest = (how(4 * one.numel() for one in model.parameters()) for how in (sum, max))
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
        before = read_peak("VmRSS")
        engine = build(model, lambda _: torch.optim.SGD([{"params": []}], lr=0.0), config, world, values=values)
        shards = sum(p.to_local().nbytes for part in engine.parts for p in part.parameters())  # type: ignore[attr-defined]
        return whole, largest, shards, read_peak("VmHWM") - before

    for whole, largest, shards, peak in run_ranks(measure, 2, parallel=config.parallel):
        assert shards < 0.09 * whole  # 4.5 of 32 bits, on two ranks, and adapters
        assert peak < shards + largest + (64 << 20) < 0.3 * whole
