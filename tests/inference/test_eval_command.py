"""`hpc-train eval`: the loss that the run wrote for the same data, and that of a plain loop of transformers."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from drawn import draw
from labelled_images import make_folder
from token_stores import build_store
from torch import Tensor, nn

from hpc_train.cli.main import main
from hpc_train.components import register_metric
from hpc_train.config.compose import compose
from hpc_train.config.model import ImageFilesDataConfig
from hpc_train.config.run import RunConfig
from hpc_train.data.images.build_images import build_image_store
from hpc_train.data.images.image_samples import ImageSamples
from hpc_train.data.images.image_store import ImageStore
from hpc_train.data.token_store import TokenStore
from hpc_train.errors import EXIT_DONE
from hpc_train.inference.load_model import load_model
from hpc_train.interfaces import IGNORED_TARGET, World
from hpc_train.models.registry import register
from hpc_train.runtime.stop_request import StopRequest
from hpc_train.testing import run_ranks
from hpc_train.training.assemble import assemble_run
from hpc_train.training.factory import make_deferred_model, make_engine, open_data
from hpc_train.training.loop import run_training
from hpc_train.training.records.run_records import read_metrics
from hpc_train.training.run_directory import locate_run_directory, make_attempt, prepare_run_directory

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
OWN = ("model=llama_tiny", "model.layers=2", "model.hidden=32", "model.heads=2", "model.feed_forward=48")
COMMON = (
    "data=text",
    "data.validation_fraction=0.2",
    "train.sequence_length=32",
    "train.global_batch=8",
    "train.micro_batch=2",
    "train.steps=2",
    "train.eval_every=1",
    "train.eval_batches=3",
    "train.metrics=[accuracy]",
    "train.tensorboard=false",
    "checkpoint.every=1",
    "precision=fp64",
    "parallel=fsdp",
)
SIZES = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 260}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "json.h5"
    build_store([str(Path(json.__file__).parent)], [".py"], "byte", 256, path)
    return path


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of random weights: GPT-2, whose code in transformers casts nothing to float32."""
    folder = tmp_path_factory.mktemp("hf") / "gpt2"
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, initializer_range=0.3)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "llama"
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=260, max_position_embeddings=64, initializer_range=0.3)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def train(config: RunConfig) -> list[dict[str, Any]]:
    """Train on two ranks, and return the lines of metrics.jsonl."""

    def rank(world: World) -> int:
        model, values = make_deferred_model(config, world)
        engine = make_engine(config, world, model, values=values)
        directory = locate_run_directory(config)
        run = assemble_run(
            config, world, directory, make_attempt(directory), StopRequest(), open_data(config, world), engine
        )
        code = run_training(run)
        run.close()
        return code

    prepare_run_directory(locate_run_directory(config), config)
    assert run_ranks(rank, 2, parallel=config.parallel) == [EXIT_DONE] * 2
    return list(read_metrics(locate_run_directory(config).metrics))


def evaluate(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["eval", *map(str, words), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("kind", draw(("own", "hf"), ("own",)))
def test_the_numbers_are_those_that_the_run_wrote(
    kind: str, store: Path, gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = (*OWN, "optim.ema.decay=0.5") if kind == "own" else ("model=hf", f"model.path={gpt2}", "optim.lr=0.01")
    run_dir = tmp_path / "run"
    lines = train(compose([*COMMON, *model, f"data.path={store}", f"run_dir={run_dir}"]))
    assert lines[0]["validation_loss"] != lines[1]["validation_loss"]
    for step, line in enumerate(lines, 1):
        found = evaluate(capsys, run_dir / "checkpoints" / f"step-{step}", "--batches", 3)
        assert (found["step"], found["split"], found["sequences"], found["targets"]) == (step, "validation", 24, 768)
        assert found["loss"] == pytest.approx(line["validation_loss"], rel=1e-12)
        assert found["accuracy"] == line["validation_accuracy"]
        assert found["perplexity"] == pytest.approx(math.exp(line["validation_loss"]), rel=1e-12)
        assert found["weights"] == ("average" if kind == "own" else "trained")
    whole = evaluate(capsys, run_dir)
    assert whole == evaluate(capsys, run_dir)
    other = evaluate(capsys, run_dir, "--batch", 7)
    assert other["loss"] == pytest.approx(whole["loss"], rel=1e-12)
    assert (other["accuracy"], other["targets"]) == (whole["accuracy"], whole["targets"])
    assert whole["targets"] == whole["sequences"] * 32 > 768
    single = evaluate(capsys, run_dir, "--precision", "fp32")["loss"]  # saved in float64
    assert single == pytest.approx(whole["loss"], rel=1e-5)
    assert single != whole["loss"]
    if kind == "own":
        check_choice_of_weights(run_dir, whole["loss"], capsys)


def check_choice_of_weights(run_dir: Path, averaged: float, capsys: pytest.CaptureFixture[str]) -> None:
    """The average by default, as in the run's own evaluations; the trained weights on request."""
    assert evaluate(capsys, run_dir, "--weights", "average")["loss"] == averaged
    trained = evaluate(capsys, run_dir, "--weights", "trained")
    assert trained["weights"] == "trained"
    assert trained["loss"] != averaged
    usual, average, own = (
        load_model(str(run_dir), None, torch.device("cpu"), None, weights).model.lm_head.weight
        for weights in (None, "average", "trained")
    )
    assert torch.equal(usual, average)
    assert not torch.equal(usual, own)


class Bigrams(nn.Module):
    """A user's own model."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token."""
        return cast(Tensor, self.table(tokens))


register("bigrams_of_eval")(Bigrams)


@register_metric("top_five")
def top_five(out: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A user's own metric: how often the target is among the five likeliest."""
    counts = target != IGNORED_TARGET
    found = (out.topk(5).indices == target.clamp(min=0)[..., None]).any(-1) & counts
    return found.sum().double(), counts.sum().double()


def save_hf(kind: str, folder: Path) -> list[str]:
    """Make a folder of random weights, and return the overrides that train it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    text = {"vocab_size": 260, "max_position_embeddings": 64, "initializer_range": 0.3}
    if kind == "bert":
        transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **text)).save_pretrained(folder)
        return ["model.mask_token=259"]
    if kind == "t5":
        config = transformers.T5Config(
            vocab_size=260, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0
        )
        transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
        return []
    image = transformers.ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=3, initializer_range=0.3)
    transformers.ViTForImageClassification(image).save_pretrained(folder)
    return ["data=images", "data.image_size=8", "data.validation_fraction=0.5"]


@pytest.mark.parametrize("kind", draw(("dora", "custom", "bert", "t5", "vit"), ("dora", "custom", "vit")))
def test_every_kind_of_run_can_be_measured(
    kind: str, store: Path, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, folder = tmp_path / "run", tmp_path / "model"
    words = [*COMMON, f"data.path={store}", f"run_dir={run_dir}", "train.steps=1", "optim.lr=0.01"]
    if kind == "dora":
        words += ["model=hf", f"model.path={llama}", "adapter=dora"]
    elif kind == "custom":
        words += ["model=custom", "model.name=bigrams_of_eval", "train.metrics=[accuracy,top_five]", "parallel=ddp"]
    else:
        words += ["model=hf", f"model.path={folder}", *save_hf(kind, folder)]
    if kind == "vit":
        images = build_image_store([str(make_folder(tmp_path / "photos"))], tmp_path / "images.h5")
        words = [word for word in words if word != "data=text"] + [f"data.path={images.path}"]
    (line,) = train(compose(words))
    found = evaluate(capsys, run_dir, "--batches", 3)
    assert found["loss"] == pytest.approx(
        line["validation_loss"], rel=1e-12 if kind in ("custom", "bert", "vit") else 1e-7
    )
    own = [name for name in line if name.startswith("validation_") and name != "validation_loss"]
    assert own
    assert all(found[name.removeprefix("validation_")] == line[name] for name in own)
    if kind == "vit":
        assert (found["images"], found["targets"]) == (24, 24)
        compare_images(folder, run_dir, images, capsys)


def compare_images(folder: Path, run_dir: Path, images: ImageStore, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder's loss on a store and on the folder of its images, prepared as the model's files say."""
    scale = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": scale}))  # as of CLIP, for two inputs
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1] * 3}))
    model = transformers.AutoModelForImageClassification.from_pretrained(folder, dtype=torch.float64).eval()
    settings = ImageFilesDataConfig(image_size=8, mean=[0.5] * 3, std=[0.25] * 3)
    pixels, labels = ImageSamples(images, settings, np.arange(len(images))).get(np.arange(len(images)))
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(pixels.double()).logits, labels).item()
    for data in (images.path, images.path.parent / "photos"):
        found = evaluate(capsys, folder, "--data", data, "--precision", "fp64")
        assert (found["images"], found["targets"], "perplexity" in found) == (len(images), len(images), False)
        assert found["loss"] == pytest.approx(loss, rel=1e-12)
    assert evaluate(capsys, run_dir, "--data", images.path)["images"] == len(images)
    for words, said in (
        (["--data", images.path, "--chat"], "--chat: no effect on images"),
        (["--data", __file__, "--tokenizer", "byte"], "tokens, but model.path"),
    ):
        assert main(["eval", str(run_dir), *map(str, words)]) == 2
        assert said in capsys.readouterr().err


def test_a_merged_export_has_the_loss_of_its_run(
    store: Path, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In float64, but for the parts that transformers' Llama computes in float32."""
    lora = ("model=hf", f"model.path={llama}", "adapter=lora", "optim.lr=0.05")
    run_dir, merged = tmp_path / "run", tmp_path / "merged"
    (*_, last) = train(compose([*COMMON, *lora, f"data.path={store}", f"run_dir={run_dir}"]))
    found = evaluate(capsys, run_dir, "--batches", 3)
    assert found["loss"] == pytest.approx(last["validation_loss"], rel=1e-7)
    assert main(["checkpoint", "export", str(run_dir), str(merged), "--merged"]) == 0
    words = ("--data", store, "--precision", "fp64", "--sequence-length", 32)
    of_run, of_merged, of_base = (evaluate(capsys, where, *words)["loss"] for where in (run_dir, merged, llama))
    assert of_merged == pytest.approx(of_run, rel=1e-7)
    assert abs(of_base - of_run) > 1e-3


@torch.no_grad()
def measure_plainly(model: Any, rows: list[tuple[Tensor, Tensor]]) -> tuple[float, float, int]:
    """(mean loss, accuracy, targets) over (inputs, targets) with -100 where nothing counts."""
    total, right, count = 0.0, 0, 0
    for inputs, targets in rows:
        logits = model(inputs[None]).logits[0]
        counted = targets != -100
        total += float(torch.nn.functional.cross_entropy(logits[counted], targets[counted], reduction="sum"))
        right += int((logits.argmax(-1) == targets)[counted].sum())
        count += int(counted.sum())
    return total / count, right / count, count


def test_a_folder_has_the_loss_of_transformers(store: Path, gpt2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluate(capsys, gpt2, "--data", store, "--precision", "fp64", "--sequence-length", 48)
    tokens = torch.from_numpy(TokenStore.open(store).tokens[:].astype("int64"))
    rows = [(tokens[at : at + 48], tokens[at + 1 : at + 49]) for at in range(0, len(tokens) - 48, 48)]
    model = transformers.GPT2LMHeadModel.from_pretrained(gpt2, dtype=torch.float64).eval()
    loss, accuracy, count = measure_plainly(model, rows)
    assert (found["step"], found["split"], found["targets"]) == (None, "all", count)
    assert found["loss"] == pytest.approx(loss, rel=1e-12)
    assert found["accuracy"] == accuracy


def test_a_folder_is_measured_in_sequences_that_it_can_read(
    store: Path, gpt2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = evaluate(capsys, gpt2, "--data", store, "--batches", 1, "--batch", 1)
    longest = json.loads((gpt2 / "config.json").read_text())["n_positions"]
    assert (found["targets"] // found["sequences"], longest) == (64, 64)


def save_chat_tokenizer(folder: Path) -> Any:
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    model.train_from_iterator(
        [], tokenizers.trainers.BpeTrainer(vocab_size=259, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|end|>")
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def test_of_conversations_the_assistant_counts(
    gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HPC_TRAIN_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "chat"
    transformers.GPT2LMHeadModel.from_pretrained(gpt2).save_pretrained(folder)
    tokenizer = save_chat_tokenizer(folder)
    talks = [
        [{"role": "user", "content": f"{a}+{a}"}, {"role": "assistant", "content": "=" * (a % 4) + str(2 * a)}]
        for a in range(9)
    ]
    file = tmp_path / "talks.jsonl"
    file.write_text("\n".join(json.dumps({"messages": talk}) for talk in talks))
    words = (folder, "--data", file, "--chat", "--precision", "fp64", "--sequence-length", 32)
    found = evaluate(capsys, *words)
    rows = []
    for talk in talks:
        made = tokenizer.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = torch.tensor(made["input_ids"]), torch.tensor(made["assistant_masks"])
        rows.append((ids[:-1], torch.where(mask[1:] == 1, ids[1:], -100)))
    model = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float64).eval()
    loss, accuracy, count = measure_plainly(model, rows)
    assert (found["sequences"], found["targets"]) == (9, count)
    assert found["loss"] == pytest.approx(loss, rel=1e-12)
    assert found["accuracy"] == accuracy
    other = tmp_path / "other.jsonl"
    other.write_text(file.read_text().replace('"messages"', '"turns"'))
    assert main(["eval", *map(str, (folder, "--data", other, *words[3:]))]) == 2
    assert "no column 'messages'; its columns are turns (choose with --column" in capsys.readouterr().err
    assert evaluate(capsys, folder, "--data", other, *words[3:], "--column", "turns")["loss"] == found["loss"]


def test_bad_input_of_eval(
    store: Path, gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: object) -> str:
        capsys.readouterr()
        assert main(["eval", *map(str, words)]) == 2
        printed = capsys.readouterr()
        assert printed.err.count("\n") == 1
        return printed.err

    assert "no such directory" in refused(tmp_path / "nothing")
    assert "has no data of its own; give --data" in refused(gpt2)
    assert "is not there; give a store" in refused(gpt2, "--data", tmp_path / "nothing")
    (tmp_path / "text.txt").write_text("some text " * 100)
    assert "its tokenizer is not known here" in refused(gpt2, "--data", tmp_path / "text.txt")
    assert "needs --tasks" in refused(gpt2, "--data", store, "--limit", 3)
    for option in (["--chat"], ["--column", "a"], ["--tokenizer", "byte"]):
        assert f"{option[0]}: no effect on tokens" in refused(gpt2, "--data", store, *option)
        assert f"{option[0]}: says how --data is read, which is not given" in refused(gpt2, *option)
    assert "has no effect with --tasks" in refused(gpt2, "--tasks", "a", "--split", "all")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert "pip install 'hpc_train[lm-eval]'" in refused(gpt2, "--tasks", "a")
