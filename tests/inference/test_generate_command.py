"""`hpc-train generate`: greedy text equals transformers' own, alone and in a batch; bad input is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hpc_train.checkpoint import save_step
from hpc_train.cli.main import main
from hpc_train.config.compose import compose
from hpc_train.config.plain_config import config_to_yaml
from hpc_train.config.run import RunConfig
from hpc_train.data.tokenizers.tokenizer import ByteTokenizer
from hpc_train.inference.generate import GenerateOptions, TextStreamer, generate_texts
from hpc_train.inference.load_model import load_model
from hpc_train.interfaces import TensorShard
from hpc_train.models.adapters.names import is_adapter_parameter
from hpc_train.models.initial_values import initialise_parameters
from hpc_train.models.registry import build_model
from hpc_train.parallel.adapters import attach_adapters

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SMALL = ["model.layers=2", "model.hidden=32", "model.heads=4", "model.feed_forward=48", "train.sequence_length=64"]
FAMILIES = {
    "llama": ["model=llama_tiny", *SMALL, "adapter=lora"],
    "gpt2": ["model=gpt2_tiny", *SMALL, "model.max_positions=64"],
    "mixtral": ["model=llama_moe_tiny", *SMALL, "precision=fp64"],
    "deepseek_v3": ["model=deepseek_tiny", *SMALL],
}
PROMPTS = ["def main(", "x", "a longer line of text"]


def save_run(run: Path, kind: str) -> None:
    """A run of random weights, far enough from zero that the likeliest token depends on the text."""
    config = compose([*FAMILIES[kind], f"run_dir={run}"])
    module = build_model(config.model)
    if config.adapter.kind != "none":
        attach_adapters(module, config.adapter)
    initialise_parameters(module, 3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim > 1:
                scale = 0.1 if is_adapter_parameter(name) else 0.3
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    save_state(run, module.state_dict(), config)


def save_state(run: Path, state: dict[str, torch.Tensor], config: RunConfig) -> None:
    """Write a run whose step 8 has these weights."""
    pieces = [
        TensorShard(name, tuple(value.shape), value.dtype, (0,) * value.ndim, value.detach())
        for name, value in state.items()
    ]
    run.mkdir()
    save_step(run / "checkpoints", 8, pieces, {}, None).wait()
    (run / "config.yaml").write_text(config_to_yaml(config))


@pytest.mark.parametrize("kind", FAMILIES)
def test_greedy_text_is_that_of_transformers(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    run, hf = tmp_path / "run", tmp_path / "hf"
    save_run(run, kind)
    assert (
        main(["checkpoint", "export", str(run), str(hf), *(["--merged"] if kind == "llama" else ["--format", "hf"])])
        == 0
    )
    theirs = AutoModelForCausalLM.from_pretrained(hf).eval()
    wanted = []
    for prompt in PROMPTS:
        ids = torch.tensor([list(prompt.encode())])
        out = theirs.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=0, pad_token_id=0)[0, len(prompt) :]
        tokens = out.tolist()
        wanted.append(bytes(tokens[: tokens.index(0)] if 0 in tokens else tokens).decode(errors="replace"))
    assert len({*wanted}) == len(wanted)
    capsys.readouterr()
    words = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    assert main(["generate", str(run), *words, "--tokens", "20", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"prompt": prompt, "text": text} for prompt, text in zip(PROMPTS, wanted, strict=True)]
    assert main(["generate", str(run), "--prompt", PROMPTS[0], "--tokens", "20"]) == 0
    assert capsys.readouterr().out == f"{PROMPTS[0]}{wanted[0]}\n"
    (tmp_path / "prompts").write_bytes(b"\xef\xbb\xbf" + "\r\n\n".join([*PROMPTS, "a\x0cb"]).encode())
    assert main(["generate", str(run), "--file", str(tmp_path / "prompts"), "--tokens", "20", "--json"]) == 0
    again = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert again[:3] == lines
    assert [line["prompt"] for line in again[3:]] == ["a\x0cb"]


def save_encoder_decoder(folder: Path) -> transformers.T5ForConditionalGeneration:
    """A small T5 with the bytes of text as tokens, and a tokenizer that ends a text."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(
        vocab_size=40, **sizes, decoder_start_token_id=0, eos_token_id=1, initializer_factor=20.0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    model.save_pretrained(folder)
    words = {word: number for number, word in enumerate(["<pad>", "</s>", *"abcdefghijklmnopqrstuvwxyz"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", pad_token="<pad>")
    tokenizer.save_pretrained(folder)
    return model


def test_an_encoder_decoder_answers_as_in_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, prompts = save_encoder_decoder(tmp_path), ["a b c d", "z", "m n"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    wanted = []
    for prompt in prompts:
        out = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=8, do_sample=False)
        wanted.append(tokenizer.decode(out[0], skip_special_tokens=True))
    assert len({*wanted}) == len(wanted)
    words = [word for prompt in prompts for word in ("--prompt", prompt)]
    assert main(["generate", str(tmp_path), *words, "--tokens", "8", "--json"]) == 0
    assert [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()] == wanted
    assert main(["generate", str(tmp_path), "--prompt", prompts[0], "--tokens", "8"]) == 0
    assert capsys.readouterr().out == f"{wanted[0]}\n"


def test_sampling_follows_its_seed(tmp_path: Path) -> None:
    save_run(tmp_path / "run", "llama")
    loaded = load_model(str(tmp_path / "run"), None, torch.device("cpu"))

    def sample(**changes: float) -> list[str]:
        options = GenerateOptions(tokens=24, temperature=1.5, **changes)  # type: ignore[arg-type]
        return list(generate_texts(loaded, PROMPTS, options))

    state = torch.get_rng_state()
    assert sample(seed=1) == sample(seed=1) != sample(seed=2)
    assert torch.equal(state, torch.get_rng_state())
    greedy = list(generate_texts(loaded, PROMPTS, GenerateOptions(tokens=24)))
    assert sample(top_k=1) == greedy
    assert sample(top_p=1e-6) == greedy


def test_a_stream_shows_whole_characters() -> None:
    pieces: list[str] = []
    streamer = TextStreamer(ByteTokenizer(), pieces.append, {0})
    streamer.put(torch.tensor([[65, 66]]))
    for token in [*"é€x".encode(), 0]:
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert pieces == ["é", "€", "x"]


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    save_run(run, "gpt2")

    def refused(*words: str) -> str:
        capsys.readouterr()
        assert main(["generate", *words]) == 2
        printed = capsys.readouterr()
        assert (printed.out, printed.err.count("\n")) == ("", 1)
        return printed.err

    assert "no such directory" in refused(str(tmp_path / "nothing"), "--prompt", "a")
    assert "are more than the 64 positions" in refused(str(run), "--prompt", "a", "--tokens", "64")
    assert "the prompt is empty" in refused(str(run), "--prompt", "")
    assert "--prompt: is not text in UTF-8" in refused(str(run), "--prompt", "a\udcff")  # as Python has foreign bytes
    assert "has no chat template" in refused(str(run), "--prompt", "a", "--chat")
    assert "cannot be read" in refused(str(run), "--file", str(tmp_path))
    assert "--tokenizer byte: is not there; give a folder" in refused(str(run), "--prompt", "a", "--tokenizer", "byte")
    (tmp_path / "empty").write_text("\n\n")
    assert "has no prompt" in refused(str(run), "--file", str(tmp_path / "empty"))
    (tmp_path / "config.json").write_text("{")
    assert "is not a configuration of transformers" in refused(str(tmp_path), "--prompt", "a")


def save_folder(folder: Path, template: str = "{{ messages[0].content }}") -> dict[str, torch.Tensor]:
    """A small Llama with a tokenizer and a chat template; returns its weights."""
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, max_position_embeddings=32)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="b")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def save_chat_model(folder: Path) -> tuple[transformers.LlamaForCausalLM, Any]:
    """A Llama that says w8 after w7, w9 after w8, and so on; returns it with a tokenizer of these words."""
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, max_position_embeddings=64)
    model = transformers.LlamaForCausalLM(config).eval()
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    state |= {"model.embed_tokens.weight": torch.eye(32), "lm_head.weight": torch.eye(32).roll(1, 0)}
    model.load_state_dict(state | {"model.norm.weight": torch.ones(32)})
    model.save_pretrained(folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{number}": number for number in range(32)}))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return model, words


@pytest.mark.parametrize("of_run", [False, True], ids=["folder", "run"])
def test_a_chat_model_ends_where_its_generation_settings_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], of_run: bool
) -> None:
    """The end of a turn may be another token than the end of a document, and only the settings name it."""
    folder = tmp_path / "folder"
    model, words = save_chat_model(folder)
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="w0", additional_special_tokens=["w11"]
    )
    made.save_pretrained(folder)
    # 9 is no special token of this tokenizer: settings that were never adapted to it name such tokens.
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 9, 11]}))
    where = folder
    if of_run:
        (tmp_path / "a.txt").write_text("w1 w2")
        data = ["data=text", f"data.sources=[{tmp_path / 'a.txt'}]", f"data.tokenizer={folder}"]
        config = compose(["model=hf", f"model.path={folder}", *data])
        where = tmp_path / "run"
        save_state(where, model.state_dict(), config)
    capsys.readouterr()
    assert main(["generate", str(where), "--prompt", "w5 w6", "--tokens", "12", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"].split() == ["w7", "w8", "w9", "w10"]


def test_files_that_are_no_whole_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "folder"
    weights = save_folder(folder)
    name = "model.layers.0.mlp.up_proj.weight"

    def run(*words: str) -> tuple[int, str]:
        capsys.readouterr()
        code = main(["generate", str(folder), "--prompt", "a", "--tokens", "2", *words])
        printed = capsys.readouterr().err
        assert printed.count("\n") == (code != 0)
        return code, printed

    def save(state: dict[str, torch.Tensor]) -> None:
        save_file(state, folder / "model.safetensors", {"format": "pt"})

    assert run()[0] == 0
    save({key: value for key, value in weights.items() if key != name})
    assert f"its files do not have the weight {name} of LlamaForCausalLM" in run()[1]
    save({**weights, name: torch.ones(4, 8)})
    assert f"its files have in another shape the weight {name} of" in run()[1]
    save({**weights, "model.layers.1.mlp.up_proj.weight": torch.ones(8, 8)})
    assert "its config.json has no place for the weight model.layers.1.mlp.up_proj.weight of" in run()[1]
    (folder / "config.json").rename(folder / "before.json")
    assert run() == (
        2,
        f"hpc-train: {folder}: has weights and no config.json; give a folder that save_pretrained made\n",
    )
    (folder / "model.safetensors").unlink()
    (folder / "adapter_config.json").write_text("{}")
    assert "is an adapter of PEFT without its model; give the run that it was exported from" in run()[1]


@pytest.mark.parametrize("template", ["{% for m in messages", "{{ raise_exception('only systems') }}"])
def test_a_chat_template_that_fails_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str
) -> None:
    save_folder(tmp_path / "folder", template)
    capsys.readouterr()
    assert main(["generate", str(tmp_path / "folder"), "--prompt", "a", "--chat"]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert "--chat: the chat template refuses the prompt (" in printed


def test_a_damaged_step_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_run(tmp_path / "run", "gpt2")
    shard = next((tmp_path / "run/checkpoints/step-8/shards").rglob("*.h5"))
    shard.write_bytes(shard.read_bytes()[:-100])
    capsys.readouterr()
    assert main(["generate", str(tmp_path / "run"), "--prompt", "a", "--tokens", "2"]) == 1
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert "checkpoint step 8 in" in printed
    assert "is damaged" in printed
