"""Folders of transformers that cannot be trained are refused in one line, before anything is built."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # read once, when the library is imported
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from hpc_train.checkpoint.convert.pretrained_weights import PretrainedWeights
from hpc_train.config.compose import compose
from hpc_train.config.model import HfModelConfig
from hpc_train.errors import UserError
from hpc_train.launch.checks.files import check_files
from hpc_train.launch.checks.run_checks import check_run
from hpc_train.models.hf.build import build_hf_model
from hpc_train.models.hf.config_file import ConfigFile, read_config_file
from hpc_train.models.hf.families import FAMILIES
from hpc_train.parallel.rules.check import check_support
from hpc_train.training.assemble import find_random_base_problem
from hpc_train.training.factory import make_pretrained_model
from hpc_train.training.rank import advise_learning_rate
from hpc_train.training.run_directory import RunDirectory

MARIAN_SIDE = {"layers": 1, "attention_heads": 2, "ffn_dim": 24}


def _save_llama(folder: Path, **how: Any) -> Path:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, **how)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return _save_llama(tmp_path / "model")


def refuse(folder: Path, *overrides: str) -> str:
    """The one line that this folder is refused with."""
    with pytest.raises(UserError) as raised:
        check_run(compose(["model=hf", f"model.path={folder}", "train.sequence_length=32", *overrides]), 1)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def _edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = folder / "config.json"
    body = json.loads(file.read_text())
    change(body)
    file.write_text(json.dumps(body))


def _rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file)


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    assert refuse(tmp_path / "none").startswith(f"model.path={tmp_path / 'none'}: no such folder")
    assert refuse(Path("org/name-7B")).endswith("is downloaded first: hf download org/name-7B --local-dir FOLDER")
    assert refuse(tmp_path).startswith(f"model.path={tmp_path}: has no config.json; give a folder that")
    (tmp_path / "config.json").write_text("{")
    assert "is not a configuration of transformers (" in refuse(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "has no model_type" in refuse(tmp_path)
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    assert "it is a named pipe" in refuse(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("auto_map", {"AutoModelForCausalLM": "modeling_mine.Mine"}, "brings its own Python code (auto_map)"),
        ("quantization_config", {"quant_method": "fp8"}, "its weights are quantized"),
        ("output_router_logits", True, "adds a loss of the router"),
        ("model_type", "lama", "model_type 'lama' is not one that transformers"),
        ("num_attention_heads", "four", "is not a configuration of a llama model"),
        ("num_hidden_layers", 10**7, "num_hidden_layers=10000000: a model of at most 10,000 layers"),
        ("architectures", ["GemmaForConditionalGeneration"], "reads images or sound beside text, which is not trained"),
        ("vocab_size", 100, "its vocabulary of 100 is smaller than the 256 of data=stdlib"),
        ("max_position_embeddings", 8, "train.sequence_length=32: longer than the 8 positions"),
    ],
)
def test_a_config_that_cannot_be_trained(folder: Path, key: str, value: object, said: str) -> None:
    _edit(folder, lambda body: body.update({key: value}))
    assert said in refuse(folder)


def test_an_encoder_that_sees_the_next_token_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4}
    for is_decoder in (False, True):
        config = transformers.BertConfig(vocab_size=48, **sizes, is_decoder=is_decoder)
        config.architectures = ["BertLMHeadModel"]
        config.save_pretrained(tmp_path)
        if is_decoder:
            build_hf_model(HfModelConfig(path=str(tmp_path)))
            continue
        with pytest.raises(UserError, match=r"is_decoder=false in its config\.json, so each token sees the one"):
            build_hf_model(HfModelConfig(path=str(tmp_path)))


def test_a_model_of_sound_is_one_line(tmp_path: Path) -> None:
    transformers.WhisperConfig(architectures=["WhisperForConditionalGeneration"]).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"no seq2seq_lm model of type whisper, .* one for model\.task=causal_lm$"):
        build_hf_model(HfModelConfig(path=str(tmp_path)))


def test_blocks_are_modules_with_a_forward(tmp_path: Path) -> None:
    transformers.FunnelForMaskedLM(
        transformers.FunnelConfig(
            vocab_size=48, block_sizes=[1, 2], num_decoder_layers=1, d_model=32, n_head=4, d_head=8, d_inner=40
        )
    ).save_pretrained(tmp_path)
    layers = ("encoder.blocks.0.0", "encoder.blocks.1.0", "encoder.blocks.1.1", "decoder.layers.0")
    names = list(build_hf_model(HfModelConfig(path=str(tmp_path))).blocks())
    assert names == [f"funnel.{layer}" for layer in layers]


def test_a_translator_has_a_task_and_positions_that_no_file_has(tmp_path: Path) -> None:
    sides = {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in MARIAN_SIDE.items()}
    config = transformers.MarianConfig(vocab_size=48, d_model=16, pad_token_id=0, **sides)
    saved = transformers.MarianMTModel(config)
    saved.save_pretrained(tmp_path)
    said: list[str] = []
    model, values = make_pretrained_model(HfModelConfig(path=str(tmp_path)), 0, said.append)
    assert said == []
    assert model.task == "seq2seq_lm"
    wanted = saved.get_parameter("model.encoder.embed_positions.weight")
    assert values["model.encoder.embed_positions.weight"].equal(wanted)


def test_a_tokenizer_with_more_tokens_than_its_own_model(folder: Path) -> None:
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{index}": index for index in range(260)}, "w0"))
    model.save(str(folder / "tokenizer.json"))
    (folder / "a.txt").write_text("w1 w2")
    data = ("data=text", f"data.sources=[{folder / 'a.txt'}]", f"data.tokenizer={folder}", "data.end_of_document=w0")
    with pytest.raises(UserError, match=r"smaller than the 260 of data.tokenizer=.*resize_token_embeddings\(260\)$"):
        check_files(
            compose(["model=hf", f"model.path={folder}", *data]),
            RunDirectory(folder / "run", folder / "run" / "checkpoints"),
        )


def test_weights_that_do_not_fit(folder: Path) -> None:
    _edit(folder, lambda body: body.update(intermediate_size=32))
    said = refuse(folder)
    assert said.count(" not (") == 3
    assert "model.layers.0.mlp.down_proj.weight is (16, 24), not (16, 32); " in said
    assert "; and 3 more: the weights are of another shape" in said
    _edit(folder, lambda body: body.update(intermediate_size=24, num_hidden_layers=3))
    assert "model.layers.2.self_attn.q_proj.weight; " in refuse(folder)
    assert "and 6 more: missing in its weights, and LlamaForCausalLM needs them; use model.weights=draw" in refuse(
        folder
    )
    check_run(compose(["model=hf", f"model.path={folder}", "train.sequence_length=32", "model.weights=draw"]), 1)


def test_weights_of_other_types(folder: Path) -> None:
    _rewrite(folder, lambda state: state.update({"model.norm.weight": state["model.norm.weight"].bfloat16()}))
    said = refuse(folder)
    assert "its weights have several types: F32 (lm_head.weight), BF16 (model.norm.weight)" in said
    mixed = ("train.sequence_length=32", "model.mixed_dtypes=true")
    check_run(compose(["model=hf", f"model.path={folder}", *mixed]), 1)
    _rewrite(folder, lambda state: state.update({"model.norm.weight": state["model.norm.weight"].to(torch.int8)}))
    assert "model.norm.weight is I8: only floating-point weights" in refuse(folder, "model.mixed_dtypes=true")


@pytest.mark.parametrize("name", ["../model.safetensors", "", "..", "a\0b", "\ud800", "/etc/passwd", 5])
def test_an_index_names_files_of_its_folder(folder: Path, name: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert "which is not the name of a file in its folder" in refuse(folder)


@pytest.mark.parametrize("damage", ["empty", "huge", "cut", "text", "pipe"])
def test_files_that_are_no_safetensors_files(folder: Path, damage: str) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.unlink()
    if damage == "pipe":
        os.mkfifo(file)
        assert refuse(folder).endswith("is not a regular file")
        return
    broken = {
        "empty": b"",
        "huge": struct.pack("<Q", 1 << 60) + data[8:],
        "cut": data[: len(data) // 2],
        "text": struct.pack("<Q", 40) + b"x" * 64,
    }
    file.write_bytes(broken[damage])
    assert refuse(folder).startswith(f"{file}: cannot be read as safetensors (")


def test_weights_in_a_pickle_are_named_and_not_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "there is no .safetensors file; save with save_pretrained" in refuse(folder)


def test_numbered_files_are_read_by_their_index(tmp_path: Path) -> None:
    folder = _save_llama(tmp_path / "model", max_shard_size="4KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    model, values = make_pretrained_model(HfModelConfig(path=str(folder)), 0)
    wanted = AutoModelForCausalLM.from_pretrained(folder)
    for name, parameter in wanted.named_parameters():
        assert torch.equal(values[name], parameter), name
    buffers = dict(model.named_buffers())
    assert torch.equal(buffers["model.rotary_emb.inv_freq"], wanted.model.rotary_emb.inv_freq)


def test_an_index_without_its_files_is_not_a_model_from_scratch(tmp_path: Path) -> None:
    folder = _save_llama(tmp_path / "model", max_shard_size="4KB")
    files = sorted(folder.glob("model-*.safetensors"))
    for file in files:
        file.unlink()
    assert files[0].name in refuse(folder)


def test_adapters_on_random_weights_are_noticed(folder: Path) -> None:
    def doubt(*overrides: str) -> str:
        return find_random_base_problem(compose(["model=hf", f"model.path={folder}", *overrides])) or ""

    assert doubt("adapter=lora") == ""
    (folder / "model.safetensors").unlink()
    assert "has no weights, so adapters are trained on random ones" in doubt("adapter=lora")
    assert doubt("adapter=lora", "model.weights=draw") == doubt() == ""


def test_from_scratch_has_the_values_that_transformers_draws(folder: Path) -> None:
    model, values = make_pretrained_model(HfModelConfig(path=str(folder), weights="draw"), 7)
    torch.manual_seed(7)
    wanted = AutoModelForCausalLM.from_config(AutoModelForCausalLM.from_pretrained(folder).config)
    for name, parameter in wanted.named_parameters():
        assert torch.equal(values[name], parameter), name
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in wanted.named_parameters()}


def test_what_is_left_out_or_drawn_is_said(folder: Path) -> None:
    _rewrite(folder, lambda state: state.update({"cls.extra": torch.zeros(2)}))
    lines: list[str] = []
    make_pretrained_model(HfModelConfig(path=str(folder)), 0, lines.append)
    assert lines == [f"model.path={folder}: the weights have cls.extra, for which this model has no place: left out"]


@pytest.mark.parametrize("name", ["model.layers.7.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"])
def test_weights_of_another_config_are_refused(folder: Path, name: str) -> None:
    _rewrite(folder, lambda state: state.update({name: torch.zeros(2)}))
    assert f"its weights have {name}, for which its config.json has no place" in refuse(folder)


def test_constants_of_older_releases_are_no_layers(folder: Path) -> None:
    _rewrite(folder, lambda state: state.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}))
    make_pretrained_model(HfModelConfig(path=str(folder)), 0)


def test_a_from_scratch_learning_rate_is_noticed(folder: Path) -> None:
    def advise(*overrides: str) -> str | None:
        return advise_learning_rate(compose(["model=hf", f"model.path={folder}", *overrides]))

    assert (advise() or "").startswith("warning: optim.lr=0.003 is the default for random weights")
    assert advise("optim.lr=2e-5") is None
    assert advise("model.weights=draw") is None


def test_only_headers_are_read_before_ranks_start(folder: Path) -> None:
    """The file's data may be gone: nothing of it is looked at."""
    file = folder / "model.safetensors"
    header = 8 + struct.unpack("<Q", file.read_bytes()[:8])[0]
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.truncate(header)
        opened.truncate(size)  # a hole
    config = HfModelConfig(path=str(folder))
    with torch.device("meta"):
        PretrainedWeights(config).plan(build_hf_model(config))


def _read_body(folder: Path, body: dict[str, Any]) -> ConfigFile:
    (folder / "config.json").write_text(json.dumps(body))
    return read_config_file(HfModelConfig(path=str(folder)))


@pytest.mark.parametrize("model_type", [family.model_type for family in FAMILIES])
def test_dropouts_and_windows_that_a_config_leaves_out_are_the_librarys(tmp_path: Path, model_type: str) -> None:
    whole = transformers.AutoConfig.for_model(model_type).to_dict()
    of_training = {key: value for key, value in whole.items() if not key.startswith(("classifier_", "summary_"))}
    dropped = [key for key, value in of_training.items() if "drop" in key and isinstance(value, float) and value > 0]
    left_out = _read_body(tmp_path, {"model_type": model_type})
    found = left_out.find_dropout()
    assert (found is None) == (not dropped)
    assert found is None or found.split("=")[0] in dropped
    assert left_out.window == (whole.get("sliding_window") or None)
    given = dict.fromkeys(dropped, 0.0) | {"sliding_window": None}
    set_otherwise = _read_body(tmp_path, {"model_type": model_type, **given})
    assert (set_otherwise.find_dropout(), set_otherwise.window) == (None, None)


def test_a_split_refuses_a_dropout_that_config_json_leaves_out(tmp_path: Path) -> None:
    sizes = {"vocab_size": 48, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64}
    body = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "intermediate_size": 40, **sizes}
    _read_body(tmp_path, body)
    words = ("model=hf", f"model.path={tmp_path}", "train.sequence_length=16", "parallel.tp=2")
    with pytest.raises(UserError, match=r"^parallel\.tp=2: .*config\.json has hidden_dropout_prob=0\.1, and"):
        check_support(compose(words), 2)
    _read_body(tmp_path, body | {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0})
    check_support(compose(words), 2)
