"""`hpc-train checkpoint export|import`: transformers, safetensors, torch.distributed.checkpoint and torch.save."""

from __future__ import annotations

import json
import os
import pickle
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_commands import Terminal
from checkpoint_helpers import State, alone, names, random_bits, same_bits, save_alone
from drawn import draw
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoTokenizer

from hpc_train.checkpoint import load_step
from hpc_train.checkpoint.convert.formats import safetensors_files
from hpc_train.checkpoint.convert.model_config import parse_hf_config
from hpc_train.checkpoint.convert.tensor_sources import StateDictTensors, make_blank_shard
from hpc_train.checkpoint.format.shard_layout import SavedTensor
from hpc_train.checkpoint.storage.step_directory import try_read_manifest
from hpc_train.config.compose import compose
from hpc_train.config.model import ModelConfig
from hpc_train.config.plain_config import config_to_yaml
from hpc_train.data.corpus.build import StoreRecipe, build_from_recipe
from hpc_train.data.tokenizers.tokenizer import load_tokenizer
from hpc_train.models.huggingface import from_huggingface
from hpc_train.models.initial_values import initialise_parameters
from hpc_train.models.registry import build_model

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # what torch says of one process
SMALL = ("model.layers=2", "model.hidden=32", "model.heads=4", "model.feed_forward=48")
EXPERTS = ("model=llama_moe_tiny", *SMALL, "model.experts.balance_loss=0")
"""Without the auxiliary loss, which is another one there."""
GEMMA = ("model=gemma_tiny", *SMALL, "model.sliding_window=5", "model.vocab_size=61")
FAMILIES = {
    "llama": ["model=llama_tiny", *SMALL, "model.kv_heads=2", "model.vocab_size=61"],
    "llama_tied_3": [
        "model=llama_tiny",
        *SMALL,
        "model.kv_heads=1",
        "model.tied_embeddings=true",
        "model.rope_scaling=llama3",
        "model.rope_theta=500000.0",
        "model.max_positions=16384",
        "model.vocab_size=61",
    ],
    "gemma2": [*GEMMA, "model.query_key_norm=none", "model.rope.local_theta=null", "model.logit_softcap=3"],
    "gemma3": [*GEMMA, "model.rope_scaling=linear", "model.attention_scale=0.25"],
    "gpt2": ["model=gpt2_tiny", *SMALL, "model.max_positions=256", "model.vocab_size=61"],
    "vit": ["model=vit_tiny", *SMALL],
    "mixtral": [*EXPERTS, "model.experts.feed_forward=null"],
    "deepseek_v3": ["model=deepseek_tiny", *SMALL, "model.experts.balance_loss=0"],
    "qwen3_moe": [*EXPERTS, "model.query_key_norm=head", "model.tied_embeddings=false"],
    "olmoe": [
        *EXPERTS,
        "model.query_key_norm=full",
        "model.experts.normalise=false",
        "model.experts.feed_forward=null",
    ],
}


@pytest.fixture
def terminal(capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(capsys)


def drawn(config: ModelConfig) -> nn.Module:
    """Our model, with values that no initialisation gives."""
    module = build_model(config)
    initialise_parameters(module, 3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return module.eval()


def saved_run(run: Path, overrides: list[str]) -> nn.Module:
    """A run directory with a step 8, optimizer state included; returns the model."""
    config = compose([*overrides, f"run_dir={run}"])
    module = drawn(config.model)
    weights = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    optimizer = {f"optim.exp_avg.{name}": torch.ones_like(tensor) for name, tensor in weights.items()}
    save_alone(run / "checkpoints", 8, {**weights, **optimizer}, {"consumed_samples": 64})
    (run / "config.yaml").write_text(config_to_yaml(config))
    return module


def stored(directory: Path, step: int) -> State:
    """All tensors of a step."""
    manifest = try_read_manifest(directory / f"step-{step}", step)
    assert manifest is not None
    pieces = [make_blank_shard(tensor, tensor.rectangle) for tensor in manifest.step_layout.tensors]
    load_step(directory, step, pieces, alone())
    return {piece.name: piece.local for piece in pieces}


def assert_same(a: State, b: State) -> None:
    """The same names and bits."""
    assert a.keys() == b.keys()
    assert all(same_bits(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", draw(FAMILIES, ["llama_tied_3", "gemma3", "gpt2", "vit", "deepseek_v3", "qwen3_moe"]))
def test_transformers_computes_the_same_from_an_export(tmp_path: Path, terminal: Terminal, kind: str) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    ours = saved_run(run, FAMILIES[kind])
    told = terminal.ok("export", run, out, "--format", "hf", "--json").json
    assert told["files"] == ["model.safetensors", "config.json"]
    assert names(out) == ["config.json", "model.safetensors"]
    loader = AutoModelForImageClassification if kind == "vit" else AutoModelForCausalLM
    theirs, report = loader.from_pretrained(out, attn_implementation="eager", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    generator = torch.Generator().manual_seed(0)
    inputs = (
        torch.randn(2, 1, 8, 8, generator=generator)
        if kind == "vit"
        else torch.randint(0, 61, (2, 33), generator=generator)
    )
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(inputs).logits, ours(inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", draw(FAMILIES, ["llama_tied_3", "vit", "deepseek_v3"]))
def test_what_transformers_saves_is_imported_bit_for_bit(tmp_path: Path, terminal: Terminal, kind: str) -> None:
    ours = saved_run(tmp_path / "run", FAMILIES[kind])
    terminal.ok("export", tmp_path / "run", tmp_path / "out", "--format", "hf")
    loader = AutoModelForImageClassification if kind == "vit" else AutoModelForCausalLM
    loader.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs/model.safetensors.index.json").exists()
    words = ("import", tmp_path / "theirs", tmp_path / "new", "--format", "hf", "--ranks", 2, "--json")
    told = terminal.ok(*words).json
    assert told["path"] == str(tmp_path / "new/checkpoints/step-0")
    assert_same(stored(tmp_path / "new/checkpoints", 0), dict(ours.state_dict()))
    imported = compose(told["overrides"])
    original = compose(FAMILIES[kind]).model
    unknown = {"name": "theirs", "init_std": original.init_std}  # type: ignore[attr-defined]
    assert replace(imported.model, **unknown, source=[]) == replace(original, **unknown, source=[])


def test_the_command_that_an_import_prints_is_one_for_a_shell(tmp_path: Path, terminal: Terminal) -> None:
    saved_run(tmp_path / "run", FAMILIES["vit"])
    terminal.ok("export", tmp_path / "run", tmp_path / "out", "--format", "hf")
    run = tmp_path / "a new, 'better' run"
    printed = terminal.ok("import", tmp_path / "out", run, "--format", "hf").out
    *_, command = printed.splitlines()[-1].partition("hpc-train train ")
    assert compose(shlex.split(command)).run_dir == str(run)


def test_an_export_has_the_tokenizer_of_the_data(tmp_path: Path, terminal: Terminal) -> None:
    (tmp_path / "a.txt").write_text("some words, again and again " * 50)
    recipe = StoreRecipe((str(tmp_path / "a.txt"),), (".txt",), "bpe", 270)
    store = build_from_recipe(recipe, tmp_path / "a.h5")
    saved_run(tmp_path / "run", [*FAMILIES["llama"], "data=text", f"data.path={store.path}"])
    told = terminal.ok("export", tmp_path / "run", tmp_path / "out", "--format", "hf", "--json").json
    assert told["files"] == ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"]
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path / "out"), load_tokenizer(store)
    assert theirs("again, words")["input_ids"] == ours.encode([b"again, words"])[0].tolist()
    assert (theirs.eos_token_id,) == ours.end
    store.path.unlink()
    told = terminal.ok("export", tmp_path / "run", tmp_path / "without", "--format", "hf", "--json").json
    assert told["files"] == ["model.safetensors", "config.json"]


def test_an_export_in_another_type(tmp_path: Path, terminal: Terminal) -> None:
    ours = saved_run(tmp_path / "run", FAMILIES["llama"])
    terminal.ok("export", tmp_path / "run", tmp_path / "out", "--format", "hf", "--dtype", "bfloat16")
    state = load_file(tmp_path / "out/model.safetensors")
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "bfloat16"
    terminal.ok("import", tmp_path / "out", tmp_path / "new", "--format", "hf")
    rounded = {name: tensor.bfloat16().float() for name, tensor in ours.state_dict().items()}
    assert_same(stored(tmp_path / "new/checkpoints", 0), rounded)


def test_large_exports_are_several_files_with_an_index(tmp_path: Path) -> None:
    state = {f"w{index}": torch.full((100,), float(index)) for index in range(5)}
    source = StateDictTensors(state, dict.fromkeys(state, torch.float32))
    groups = [[SavedTensor(name, "float32", (100,))] for name in state]
    files = safetensors_files.write_safetensors(tmp_path, source, groups, dict, lambda done: None, max_file_bytes=900)
    assert files == [f"model-0000{index}-of-00003.safetensors" for index in (1, 2, 3)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 2000}
    assert index["weight_map"]["w2"] == files[1]
    assert_same(safetensors_files.read_safetensors(tmp_path), state)


EVERYTHING: State = {
    "layers.0.weight": random_bits((40, 30), torch.float32),
    "half": random_bits((5,), torch.bfloat16),
    "mask": torch.tensor([True, False]),
    "optim.exp_avg.layers.0.weight": random_bits((40, 30), torch.float32, 1),
    "optim.step.layers.0.weight": torch.tensor(3),
}
WEIGHTS = {name: tensor for name, tensor in EVERYTHING.items() if not name.startswith("optim.")}


@pytest.mark.parametrize("weights", [False, True])
def test_safetensors_under_our_names(tmp_path: Path, terminal: Terminal, weights: bool) -> None:
    save_alone(tmp_path / "in", 1, EVERYTHING)
    words = ["--weights"] if weights else []
    terminal.ok("export", tmp_path / "in", tmp_path / "out", "--format", "safetensors", *words)
    assert_same(load_file(tmp_path / "out/model.safetensors"), WEIGHTS if weights else EVERYTHING)


@pytest.mark.parametrize("weights", [False, True])
def test_torch_reads_its_own_distributed_format(tmp_path: Path, terminal: Terminal, weights: bool) -> None:
    save_alone(tmp_path / "in", 1, EVERYTHING)
    words = ["--weights"] if weights else []
    terminal.ok("export", tmp_path / "in", tmp_path / "out", "--format", "dcp", *words)
    expected = WEIGHTS if weights else EVERYTHING
    known = dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    assert known.keys() == expected.keys()
    state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "out"), no_dist=True)
    assert_same(state, expected)


WIDENED = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in WEIGHTS.items()}


@pytest.mark.parametrize("form", ["safetensors", "dcp", "torch"])
def test_imports_take_the_weights_and_widen_them(tmp_path: Path, terminal: Terminal, form: str) -> None:
    nested = {"model": WEIGHTS, "epoch": 3, "optimizer": {"state": torch.ones(2)}}
    path = tmp_path / "theirs"
    if form == "torch":
        torch.save(nested, path)
    elif form == "dcp":
        dcp.save(nested, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    else:
        path.mkdir()
        save_file(
            {**{f"model.{name}": tensor for name, tensor in WEIGHTS.items()}, "other": torch.ones(1)},
            path / "x.safetensors",
        )
    words = ("import", path, tmp_path / "run", "--format", form, "--prefix", "model.", "--ranks", 2, "--json")
    told = terminal.ok(*words).json
    assert (told["tensors"], told["left_out"]) == (3, 1)
    assert_same(stored(tmp_path / "run/checkpoints", 0), WIDENED)
    listed = terminal.ok("ls", tmp_path / "run", "--json").json
    assert [(it["step"], it["weights_only"]) for it in listed] == [(0, True)]
    assert terminal.ok("verify", tmp_path / "run", "--json").json["ok"]


def test_an_export_comes_back_without_its_optimizer_state(tmp_path: Path, terminal: Terminal) -> None:
    save_alone(tmp_path / "in", 1, EVERYTHING)
    for form in ("safetensors", "dcp"):
        terminal.ok("export", tmp_path / "in", tmp_path / form, "--format", form)
        told = terminal.ok("import", tmp_path / form, tmp_path / f"run-{form}", "--format", form, "--json").json
        assert told["left_out"] == 2
        assert_same(stored(tmp_path / f"run-{form}/checkpoints", 0), WIDENED)


class Harmful:
    """Pickles as a call."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return Path.touch, (self.path,)


def test_pickles_that_run_code_are_refused_and_do_not_run(tmp_path: Path, terminal: Terminal) -> None:
    trace = tmp_path / "it ran"
    torch.save({"w": torch.ones(2), "x": Harmful(trace)}, tmp_path / "a.pt")
    assert "could run code" in terminal.refused("import", tmp_path / "a.pt", tmp_path / "run", "--format", "torch")
    dcp.save({"w": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    (tmp_path / "dcp/.metadata").write_bytes(pickle.dumps(Harmful(trace)))
    refusal = terminal.refused("import", tmp_path / "dcp", tmp_path / "run", "--format", "dcp")
    assert "which no metadata of torch has" in refusal
    assert not trace.exists()
    assert not (tmp_path / "run").exists()


def test_models_that_do_not_fit_are_refused(tmp_path: Path, terminal: Terminal) -> None:
    run = tmp_path / "run"
    saved_run(run, FAMILIES["llama"])
    (run / "config.yaml").write_text(config_to_yaml(compose([*FAMILIES["llama"], "model.feed_forward=50"])))
    assert "is of shape" in terminal.refused("export", run, tmp_path / "out", "--format", "hf")
    (run / "config.yaml").write_text(config_to_yaml(compose(FAMILIES["gpt2"])))
    assert "not one of model=" in terminal.refused("export", run, tmp_path / "out", "--format", "hf")
    (run / "config.yaml").unlink()
    assert "--config FILE" in terminal.refused("export", run, tmp_path / "out", "--format", "hf")
    assert names(tmp_path) == ["run"]
    new = tmp_path / "new"
    new.mkdir()
    (new / "config.yaml").write_text(config_to_yaml(compose(FAMILIES["llama"])))
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    assert "the tensor 'w' is not one of" in terminal.refused("import", tmp_path / "w.pt", new, "--format", "torch")


def test_deepseek_is_read_as_it_is_published(tmp_path: Path, terminal: Terminal) -> None:
    """In float8 with the scales of blocks, YaRN, and a module for a second next token behind the last layer."""
    run, out = tmp_path / "run", tmp_path / "out"
    yarn = ["model.rope_scaling=yarn", "model.rope_factor=40", "model.rope.mscale=1", "model.rope.mscale_all_dim=1"]
    saved_run(run, [*FAMILIES["deepseek_v3"], *yarn, "model.rope.original_positions=64"])
    terminal.ok("export", run, out, "--format", "hf")
    body = json.loads((out / "config.json").read_text())
    body["num_nextn_predict_layers"] = 1
    body["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 24]}
    # The published file calls the scaling so, and has no number for what is the default.
    body["rope_scaling"]["type"] = body["rope_scaling"].pop("rope_type")
    (out / "config.json").write_text(json.dumps(body))
    plain = load_file(out / "model.safetensors")
    files: State = {}
    wanted: State = {}
    for name, tensor in plain.items():
        if tensor.ndim == 2 and "proj" in name:
            scales = torch.rand(-(-len(tensor) // 16), -(-tensor.shape[1] // 24)) + 0.5
            spread = scales.repeat_interleave(16, 0)[: len(tensor)].repeat_interleave(24, 1)[:, : tensor.shape[1]]
            files[name] = (tensor / spread).to(torch.float8_e4m3fn)
            files[f"{name}_scale_inv"] = scales
            wanted[name] = files[name].float() * spread
        else:
            files[name] = wanted[name] = tensor
    files["model.layers.2.eh_proj.weight"] = torch.ones(32, 64)
    files["model.layers.2.shared_head.norm.weight"] = torch.ones(32)
    save_file(files, out / "model.safetensors")
    told = terminal.ok("import", out, tmp_path / "back", "--format", "hf", "--json").json
    assert told["left_out"] == 2
    assert "model.rope_scaling=yarn" in told["overrides"]
    config = parse_hf_config(body, "x")
    assert_same(stored(tmp_path / "back/checkpoints", 0), from_huggingface(wanted, config))
    del files["model.layers.0.self_attn.o_proj.weight_scale_inv"]
    save_file(files, out / "model.safetensors")
    assert "o_proj.weight_scale_inv is not there" in terminal.refused("import", out, tmp_path / "b", "--format", "hf")
    (out / "config.json").write_text(json.dumps({**body, "quantization_config": {"quant_method": "awq"}}))
    assert "only float8 in blocks is read" in terminal.refused("import", out, tmp_path / "b", "--format", "hf")


def test_config_json_of_what_we_cannot_compute(tmp_path: Path, terminal: Terminal) -> None:
    words = ("import", tmp_path, tmp_path / "run", "--format", "hf")
    assert "give a folder of save_pretrained" in terminal.refused(*words)
    llama = {"model_type": "llama", "vocab_size": 9, "hidden_size": 8, "intermediate_size": 8}
    llama |= {"num_hidden_layers": 1, "num_attention_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 8}
    wrong = {
        "model_type 'mamba'": {"model_type": "mamba"},
        "is it of a llama model": {"model_type": "llama"},
        "hidden_act is 'relu'": {**llama, "hidden_act": "relu"},
        "rotary positions (longrope)": {**llama, "rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
        "there is no .safetensors file": llama,
    }
    for message, body in wrong.items():
        (tmp_path / "config.json").write_text(json.dumps(body))
        assert message in terminal.refused(*words)


def test_bad_requests(tmp_path: Path, terminal: Terminal) -> None:
    save_alone(tmp_path / "in", 1, EVERYTHING)
    (tmp_path / "there").mkdir()
    assert "exists" in terminal.refused("export", tmp_path / "in", tmp_path / "there", "--format", "dcp")
    assert "invalid choice" in terminal.refused("export", tmp_path / "in", tmp_path / "out", "--format", "onnx")
    for form in ("hf", "safetensors", "dcp", "torch"):
        assert "no such file" in terminal.refused("import", tmp_path / "none", tmp_path / "run", "--format", form)
    (tmp_path / "text").write_text("no tensors")
    assert "is not a file of torch.save" in terminal.refused(
        "import", tmp_path / "text", tmp_path / "run", "--format", "torch"
    )
    assert "cannot be read as safetensors" in terminal.refused(
        "import", tmp_path / "text", tmp_path / "run", "--format", "safetensors"
    )
    assert "give the folder of a torch.distributed" in terminal.refused(
        "import", tmp_path / "there", tmp_path / "run", "--format", "dcp"
    )
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    assert "there is no tensor in it below 'v.'" in terminal.refused(
        "import", tmp_path / "w.pt", tmp_path / "run", "--format", "torch", "--prefix", "v."
    )
    terminal.ok("import", tmp_path / "w.pt", tmp_path / "run", "--format", "torch")
    assert "has steps already (0)" in terminal.refused(
        "import", tmp_path / "w.pt", tmp_path / "run", "--format", "torch"
    )


@pytest.mark.parametrize("form", ["safetensors", "dcp", "hf"])
def test_an_export_is_on_the_disk_before_it_appears(
    tmp_path: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    run, out, done = tmp_path / "run", tmp_path / "out", []
    saved_run(run, FAMILIES["llama"])
    sync, rename = os.fsync, os.rename

    def record_sync(descriptor: int) -> None:
        sync(descriptor)
        done.append(Path(f"/proc/self/fd/{descriptor}").readlink())

    def record_rename(old: Path, new: Path) -> None:
        if Path(new) == out:
            assert not out.exists()
            here = [Path(old), *Path(old).rglob("*")]
            assert set(here) <= set(done), "renamed before it was synchronised"
            assert max(map(done.index, here)) == done.index(Path(old)), "the folder's names come last"
        rename(old, new)
        done.append(Path(new))

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "rename", record_rename)
    terminal.ok("export", run, out, "--format", form)
    assert done[-2:] == [out, tmp_path]


def test_a_damaged_step_is_not_exported(tmp_path: Path, terminal: Terminal) -> None:
    save_alone(tmp_path / "in", 1, {"w": torch.randn(1 << 16)})
    shard = tmp_path / "in/step-1/shards/000/000000.h5"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    for form in ("safetensors", "dcp"):
        printed = terminal.call("export", tmp_path / "in", tmp_path / "out", "--format", form)
        assert (printed.code, printed.out, printed.err.count("\n")) == (1, "", 1), printed
        assert "is damaged" in printed.err
    assert names(tmp_path) == ["in"]
