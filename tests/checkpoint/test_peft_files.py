"""Adapters to and from PEFT, and merged exports: equal logits on both sides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from checkpoint_commands import Terminal
from checkpoint_helpers import save_alone
from drawn import draw
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from hpc_train.config.compose import compose
from hpc_train.config.model import ModelConfig
from hpc_train.config.plain_config import config_to_yaml
from hpc_train.config.run import RunConfig
from hpc_train.interfaces import World
from hpc_train.models.adapters.names import is_adapter_parameter
from hpc_train.models.initial_values import initialise_parameters
from hpc_train.models.registry import build_model
from hpc_train.parallel.adapters import attach_adapters
from hpc_train.parallel.apply import build
from hpc_train.testing import RankFailure, run_ranks
from hpc_train.training.adapter_start import load_adapter
from hpc_train.training.optimizer import make_optimizer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:fan_in_fan_out is set")
SMALL = [
    "model.layers=2",
    "model.hidden=32",
    "model.heads=4",
    "model.feed_forward=48",
    "precision=fp64",
    "train.sequence_length=32",
]
LLAMA = ["model=llama_tiny", *SMALL, "model.kv_heads=2", "model.vocab_size=61", "model.tied_embeddings=false"]
GPT2 = ["model=gpt2_tiny", *SMALL, "model.max_positions=64", "model.vocab_size=61"]
CASES = {
    "llama-lora": [*LLAMA, "adapter=lora", "adapter.rank=3", "adapter.alpha=5"],
    "llama-dora-head": [*LLAMA, "adapter=dora", "adapter.targets=[head,q,v]"],
    "gpt2-lora": [*GPT2, "adapter=lora", "adapter.rank=2"],
    "gpt2-lora-qv": [*GPT2, "adapter=lora", "adapter.rank=2", "adapter.targets=[q,v]"],
    "gpt2-dora": [*GPT2, "adapter=dora", "adapter.rank=2"],
}


@pytest.fixture
def terminal(capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(capsys)


def draw_model(config: RunConfig, adapted: bool) -> nn.Module:
    """Our model in float64 with drawn values, and adapters that change what it computes."""
    module = build_model(config.model).double()
    initialise_parameters(module, 3)
    if adapted:
        attach_adapters(module, config.adapter)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if is_adapter_parameter(name):
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module.eval()


def save_run(run: Path, config: RunConfig, adapted: bool) -> nn.Module:
    """A run directory with a step 8 of the model; optimizer state included."""
    module = draw_model(config, adapted)
    state = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    state |= {f"optim.exp_avg.{name}": tensor for name, tensor in state.items() if is_adapter_parameter(name)}
    save_alone(run / "checkpoints", 8, state, {"consumed_samples": 64})
    (run / "config.yaml").write_text(config_to_yaml(config))
    return module


def load_theirs(folder: Path, model: ModelConfig) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float64).eval()


def make_inputs(model: ModelConfig) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 61, (2, 32), generator=generator)


@torch.no_grad()
def assert_equal_logits(theirs: Any, ours: nn.Module, model: ModelConfig) -> None:
    inputs = make_inputs(model)
    # transformers computes rotary tables and some norms in float32
    torch.testing.assert_close(theirs(inputs).logits.double(), ours(inputs), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", draw(CASES, ["llama-dora-head", "gpt2-lora-qv"]))
def test_peft_computes_the_same_from_an_export(tmp_path: Path, terminal: Terminal, name: str) -> None:
    config = compose(CASES[name])
    base, run, hf, out, merged = (tmp_path / part for part in ("base", "run", "hf", "adapter", "merged"))
    plain, ours = save_run(base, config, adapted=False), save_run(run, config, adapted=True)
    terminal.ok("export", base, hf, "--format", "hf")
    printed = terminal.ok("export", run, out, "--adapter", "--json").json
    assert printed["files"] == ["adapter_model.safetensors", "adapter_config.json"]
    assert sum(file.stat().st_size for file in out.iterdir()) < 0.7 * (hf / "model.safetensors").stat().st_size
    model = load_theirs(hf, config.model)
    with torch.no_grad():
        assert not torch.allclose(plain(make_inputs(config.model)), ours(make_inputs(config.model)), atol=1e-2)
    assert_equal_logits(peft.PeftModel.from_pretrained(model, out).eval(), ours, config.model)
    terminal.ok("export", run, merged, "--merged")
    assert_equal_logits(load_theirs(merged, config.model), ours, config.model)


def save_with_peft(folder: Path, config: RunConfig, base: Path, **settings: Any) -> Any:
    """An adapter that PEFT made on the exported base, with values that change it."""
    theirs = peft.get_peft_model(load_theirs(base, config.model), peft.LoraConfig(**settings)).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=generator))
            elif "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    theirs.save_pretrained(folder)
    return theirs.eval()


@torch.no_grad()
def compute_logits(world: World, config: RunConfig) -> Any:
    """Logits of the run's model after it has started from adapter.path, on this rank's whole model."""
    model = draw_model(config, adapted=False)
    engine = build(model, lambda split: make_optimizer(split, config.optim), config, world)
    assert load_adapter(config, engine, world)
    engine.parts[0].eval()
    out = engine.parts[0](make_inputs(config.model))
    return (out.full_tensor() if hasattr(out, "full_tensor") else out).numpy()


ALPHAS = {"^model.layers.0.self_attn.q_proj": 9, "q_proj": 3}
LAYOUTS = {"alone": (1, []), "fsdp": (2, ["parallel=fsdp"]), "tp": (2, ["parallel.tp=2"])}


@pytest.mark.parametrize(
    ("layout", "family", "targets", "settings"),
    [
        ("fsdp", LLAMA, "q,up", {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"]}),
        ("tp", LLAMA, "q,down", {"r": 4, "target_modules": ["q_proj", "down_proj"], "use_dora": True}),
        ("alone", GPT2, "q,k,v", {"r": 2, "target_modules": ["c_attn"], "use_dora": True, "fan_in_fan_out": True}),
        ("alone", LLAMA, "q,o", {"r": 4, "target_modules": ["q_proj", "o_proj"], "use_rslora": True}),
        ("alone", LLAMA, "q,o", {"r": 4, "target_modules": ["q_proj"], "alpha_pattern": ALPHAS}),
    ],
)
def test_a_run_starts_from_what_peft_saved(
    tmp_path: Path, terminal: Terminal, layout: str, family: list[str], targets: str, settings: dict[str, Any]
) -> None:
    base, hf, adapter = tmp_path / "base", tmp_path / "hf", tmp_path / "adapter"
    save_run(base, compose(family), adapted=False)
    terminal.ok("export", base, hf, "--format", "hf")
    theirs = save_with_peft(adapter, compose(family), hf, **settings)
    ranks, parallel = LAYOUTS[layout]
    kind = "dora" if settings.get("use_dora") else "lora"
    overrides = [*family, *parallel, f"adapter={kind}", "adapter.rank=4", f"adapter.targets=[{targets}]"]
    config = compose([*overrides, f"adapter.path={adapter}"])
    (logits, *_) = run_ranks(compute_logits, ranks, config, parallel=config.parallel)
    with torch.no_grad():
        torch.testing.assert_close(
            torch.from_numpy(logits), theirs(make_inputs(config.model)).logits.double(), rtol=2e-5, atol=2e-5
        )


def refuse(tmp_path: Path, *overrides: str) -> str:
    config = compose([*LLAMA, "adapter=lora", f"adapter.path={tmp_path}", *overrides])
    with pytest.raises(RankFailure) as raised:
        run_ranks(compute_logits, 1, config)
    (line,) = [line for line in str(raised.value).splitlines() if line.startswith("hpc_train.errors.UserError")]
    return line


def test_adapters_that_do_not_fit(tmp_path: Path) -> None:
    prefix, module = "base_model.model.model.layers.0.self_attn", "q_proj"

    def write(a: tuple[int, int], b: tuple[int, int], which: str = module, **settings: object) -> None:
        state = {f"{prefix}.{which}.lora_A.weight": torch.ones(a), f"{prefix}.{which}.lora_B.weight": torch.ones(b)}
        save_file(state, tmp_path / "adapter_model.safetensors")
        body = {"peft_type": "LORA", "r": a[0], "lora_alpha": 8, **settings}
        (tmp_path / "adapter_config.json").write_text(json.dumps(body))

    assert f"adapter.path={tmp_path}: has no adapter_config.json; give a folder that PEFT saved" in refuse(tmp_path)
    assert "no such folder; give a folder that PEFT saved" in refuse(tmp_path, f"adapter.path={tmp_path}/no")
    write((8, 32), (32, 8), peft_type="IA3")
    assert "peft_type is 'IA3'; only LORA" in refuse(tmp_path)
    write((8, 32), (32, 8), modules_to_save=["lm_head"])
    assert "modules_to_save is set" in refuse(tmp_path)
    write((8, 32), (32, 8), alpha_pattern={"layers.(0|1).self_attn.q_proj": 4})
    assert "alpha_pattern has the expression 'layers.(0|1).self_attn.q_proj', and only names of" in refuse(tmp_path)
    write((8, 32), (32, 8), "conv_proj")
    assert "has adapters of model.layers.0.self_attn.conv_proj, which this run has not" in refuse(tmp_path)
    write((8, 64), (64, 8))
    assert "layers.0.attention.q is for 64 inputs and 64 outputs, and this model's layer has 32" in refuse(tmp_path)
    write((8, 32), (32, 7))
    assert "lacks lora_A or lora_B, or they do not fit together" in refuse(tmp_path)
    write((8, 32), (32, 8))
    assert "has rank 8; give adapter.rank=8 (now 2)" in refuse(tmp_path, "adapter.rank=2")
    assert "has lora, not dora" in refuse(tmp_path, "adapter=dora")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\xff" * 64)
    assert "cannot be read as safetensors" in refuse(tmp_path)


def test_exports_that_do_not_fit(tmp_path: Path, terminal: Terminal) -> None:
    config, run, base, out = compose(CASES["llama-lora"]), tmp_path / "run", tmp_path / "base", tmp_path / "out"
    save_run(run, config, adapted=True)
    save_run(base, config, adapted=False)
    assert "has adapters; add --merged" in terminal.refused("export", run, out, "--format", "hf")
    assert "has no adapters" in terminal.refused("export", base, out, "--adapter")
    assert "has no adapters" in terminal.refused("export", base, out, "--merged", "--format", "dcp")
    assert terminal.call("export", run, out).code == 2
    assert "--merged the weights with them; give one" in terminal.refused("export", run, out, "--adapter", "--merged")
    inside = run / "config.yaml" / "out"
    assert "cannot be made there (Not a directory)" in terminal.refused("export", run, inside, "--adapter")
    vit = tmp_path / "vit"
    save_run(vit, compose(["model=vit_tiny", "adapter=lora"]), adapted=True)
    assert "transformers names ViT's layers differently in each release; use --merged" in terminal.refused(
        "export", vit, out, "--adapter"
    )
    assert not out.exists()
    terminal.ok("export", run, out, "--format", "safetensors", "--merged")
    assert not any(is_adapter_parameter(name) for name in load_file(out / "model.safetensors"))
