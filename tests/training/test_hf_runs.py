"""Runs of model=hf, from a folder to a folder: each task on its data, and what transformers loads from the export."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from drawn import draw
from torch import Tensor

os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # read once, when the library is imported
import transformers

from hpc_train.cli.main import main
from hpc_train.config.compose import compose
from hpc_train.config.run import RunConfig
from hpc_train.data.datasets import open_dataset
from hpc_train.errors import EXIT_DONE
from hpc_train.interfaces import IGNORED_TARGET, World
from hpc_train.runtime.stop_request import StopRequest
from hpc_train.testing import run_ranks
from hpc_train.training.assemble import assemble_run
from hpc_train.training.factory import make_deferred_model, make_engine, make_task_samples, open_data
from hpc_train.training.loop import run_training
from hpc_train.training.run_directory import locate_run_directory, make_attempt, prepare_run_directory

State = dict[str, npt.NDArray[Any]]
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
TOKENS = {**SIZES, "vocab_size": 257, "max_position_embeddings": 64}
TEXT = torch.arange(32).view(2, 16)
IMAGES = torch.linspace(-1, 1, 128).view(2, 1, 8, 8)


@dataclass(frozen=True)
class Kind:
    """A model, the overrides that train it, and inputs to compare its logits with."""

    auto: Any
    config: Callable[[], Any]
    inputs: dict[str, Tensor]
    overrides: tuple[str, ...] = ()


KINDS = {
    "tied": Kind(
        transformers.AutoModelForCausalLM,
        lambda: transformers.LlamaConfig(**TOKENS, num_key_value_heads=1, tie_word_embeddings=True),
        {"input_ids": TEXT},
    ),
    "mixtral": Kind(
        transformers.AutoModelForCausalLM,
        lambda: transformers.MixtralConfig(**TOKENS, num_key_value_heads=1, num_local_experts=4),
        {"input_ids": TEXT},
    ),
    "bert": Kind(
        transformers.AutoModelForMaskedLM,
        lambda: transformers.BertConfig(**TOKENS),
        {"input_ids": TEXT},
        ("model.mask_token=256",),
    ),
    "t5": Kind(
        transformers.AutoModelForSeq2SeqLM,
        lambda: transformers.T5Config(
            vocab_size=257, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=256
        ),
        {"input_ids": TEXT, "decoder_input_ids": TEXT},
    ),
    "vit": Kind(
        transformers.AutoModelForImageClassification,
        lambda: transformers.ViTConfig(**SIZES, image_size=8, patch_size=4, num_channels=1, num_labels=10),
        {"pixel_values": IMAGES},
        ("data=digits",),
    ),
}
COMMON = (
    "parallel=fsdp",
    "train.sequence_length=32",
    "train.global_batch=8",
    "train.micro_batch=2",
    "train.steps=4",
    "train.eval_every=2",
    "train.eval_batches=2",
    "train.tensorboard=false",
    "optim.lr=1e-3",
)


def _save(kind: Kind, folder: Path) -> Path:
    torch.manual_seed(0)
    kind.auto.from_config(kind.config()).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"model": {}}')
    (folder / "generation_config.json").write_text('{"max_new_tokens": 7}')
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    return folder


def _train(world: World, config: RunConfig) -> tuple[int, State]:
    directory = locate_run_directory(config)
    data = open_data(config, world)
    model, values = make_deferred_model(config, world)
    engine = make_engine(config, world, model, values=values)
    run = assemble_run(config, world, directory, make_attempt(directory), StopRequest(), data, engine)
    code = run_training(run)
    run.close()
    whole: State = {}
    for name, tensor in engine.parts[0].named_parameters():
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[operator]
        whole[name] = full.detach().numpy()
    return code, whole


def _compose(kind: Kind, folder: Path, store: Path, run_dir: Path) -> RunConfig:
    data = () if "data=digits" in kind.overrides else ("data=text", f"data.path={store}")
    return compose(["model=hf", f"model.path={folder}", f"run_dir={run_dir}", *COMMON, *data, *kind.overrides])


@pytest.mark.parametrize("name", draw(KINDS, ("mixtral", "t5")))
def test_a_run_exports_what_transformers_loads(name: str, store: Path, tmp_path: Path) -> None:
    kind = KINDS[name]
    folder = _save(kind, tmp_path / "model")
    config = _compose(kind, folder, store, tmp_path / "run")
    prepare_run_directory(locate_run_directory(config), config)
    (code, trained), _ = run_ranks(_train, 2, config, parallel=config.parallel)
    assert code == EXIT_DONE
    out = tmp_path / "out"
    main(["checkpoint", "export", str(tmp_path / "run"), str(out), "--format", "hf"])
    for file in ("tokenizer.json", "generation_config.json", "additional_chat_templates/tool_use.jinja"):
        assert (out / file).read_bytes() == (folder / file).read_bytes()
    exported = kind.auto.from_pretrained(out).eval()
    wanted = kind.auto.from_pretrained(folder).eval()
    before = wanted(**kind.inputs).logits
    missing = wanted.load_state_dict({key: torch.from_numpy(value) for key, value in trained.items()}, strict=False)
    assert not missing.unexpected_keys
    wanted.tie_weights()
    with torch.no_grad():
        logits = wanted(**kind.inputs).logits
        assert torch.equal(exported(**kind.inputs).logits, logits)
    assert not torch.allclose(before, logits)
    assert json.loads((out / "config.json").read_text())["model_type"] == exported.config.model_type


def test_samples_of_a_task_depend_on_seed_and_index_alone(store: Path, tmp_path: Path) -> None:
    for name in ("bert", "t5"):
        kind = KINDS[name]
        config = _compose(kind, _save(kind, tmp_path / name), store, tmp_path / "run")
        base = open_dataset(config.data, 32, "train")
        data = make_task_samples(config, base)
        tokens, _ = base.get(np.array([5, 3]))
        both, targets = data.get(np.array([5, 3]))
        one, target = data.get(np.array([3]))
        assert isinstance(tokens, Tensor)
        assert torch.equal(targets[1:], target)
        if isinstance(both, dict):
            assert isinstance(one, dict)
            assert all(torch.equal(both[key][1:], one[key]) for key in both)
            assert torch.equal(both["input_ids"], tokens[:, :16])
            assert torch.equal(targets, tokens[:, 16:])
            assert torch.equal(both["decoder_input_ids"][:, 1:], tokens[:, 16:-1])
            assert (both["decoder_input_ids"][:, 0] == 256).all()
            continue
        hidden = targets != IGNORED_TARGET
        assert isinstance(one, Tensor)
        assert torch.equal(both[1:], one)
        assert hidden.any(1).all()
        assert torch.equal(targets[hidden], tokens[hidden])
        assert torch.equal(both[~hidden], tokens[~hidden])


def test_masks_have_the_shares_of_the_paper(store: Path, tmp_path: Path) -> None:
    kind = KINDS["bert"]
    config = _compose(kind, _save(kind, tmp_path / "bert"), store, tmp_path / "run")
    base = open_dataset(config.data, 32, "train")
    indices = np.arange(len(base))
    inputs, targets = make_task_samples(config, base).get(indices)
    tokens, _ = base.get(indices)
    assert isinstance(inputs, Tensor)
    assert isinstance(tokens, Tensor)
    hidden = targets != IGNORED_TARGET
    count = int(hidden.sum())
    assert abs(count / hidden.numel() - 0.15) < 0.01
    assert abs(int((inputs[hidden] == 256).sum()) / count - 0.8) < 0.03
    assert abs(int((inputs[hidden] == tokens[hidden]).sum()) / count - 0.1) < 0.03
