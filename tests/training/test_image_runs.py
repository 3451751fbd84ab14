"""Runs on images from files: the vision transformer and those of transformers; two ranks give one process's numbers."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn import draw
from PIL import Image

os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # read once, when the library is imported
import transformers

from hpc_train.cli.main import main
from hpc_train.config.compose import compose
from hpc_train.config.run import RunConfig
from hpc_train.data.images.build_images import build_image_store
from hpc_train.errors import EXIT_DONE, EXIT_USER_ERROR
from hpc_train.interfaces import World
from hpc_train.runtime.stop_request import StopRequest
from hpc_train.testing import run_ranks
from hpc_train.training.assemble import assemble_run
from hpc_train.training.factory import make_deferred_model, make_engine, open_data
from hpc_train.training.loop import run_training
from hpc_train.training.records.run_records import read_metrics
from hpc_train.training.run_directory import locate_run_directory, make_attempt, prepare_run_directory

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION = {**SIZES, "image_size": 8, "patch_size": 4, "num_channels": 3}
MODELS: dict[str, Callable[[], Any]] = {
    "vit": lambda: transformers.ViTConfig(**VISION, num_labels=2),
    "dinov2": lambda: transformers.Dinov2Config(**VISION, num_labels=2),
    "clip": lambda: transformers.CLIPConfig(vision_config=VISION, text_config=SIZES, num_labels=2),
}
RUN = (
    "data=images",
    "data.image_size=8",
    "data.decode_threads=1",
    "data.validation_fraction=0.2",
    "train.global_batch=8",
    "train.micro_batch=2",
    "train.eval_every=4",
    "train.eval_batches=1",
    "train.tensorboard=false",
    "checkpoint.every=0",
    "precision=fp64",
)
TINY = ("model=vit_tiny", "model.channels=3", "model.patch_size=4", "model.layers=2", "model.classes=2")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes that a model tells apart by their brightness, as PNG and JPEG."""
    folder = tmp_path_factory.mktemp("images")
    for number in range(40):
        path = folder / "photos" / ("dark", "light")[number % 2] / f"{number}.{('png', 'jpeg')[number // 2 % 2]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 100, (12, 14, 3)) + 150 * (number % 2)
        out = io.BytesIO()
        Image.fromarray(pixels.astype(np.uint8)).save(out, path.suffix[1:])
        path.write_bytes(out.getvalue())
    build_image_store([str(folder / "photos")], folder / "a.h5")
    return folder


def _rank(world: World, config: RunConfig) -> int:
    directory = locate_run_directory(config)
    data = open_data(config, world)
    model, values = make_deferred_model(config, world)
    engine = make_engine(config, world, model, values=values)
    run = assemble_run(config, world, directory, make_attempt(directory), StopRequest(), data, engine)
    code = run_training(run)
    run.close()
    return code


def train(config: RunConfig, ranks: int) -> list[dict[str, Any]]:
    prepare_run_directory(locate_run_directory(config), config)
    assert set(run_ranks(partial(_rank, config=config), ranks, parallel=config.parallel)) == {EXIT_DONE}
    return read_metrics(locate_run_directory(config).metrics)


def compare(images: Path, tmp_path: Path, *words: str) -> list[dict[str, Any]]:
    """Train alone and on two ranks with FSDP; return the records of the first."""
    configs = [
        compose([*RUN, f"data.path={images}/a.h5", f"run_dir={tmp_path}/{name}", *words, *parallel])
        for name, parallel in (("one", ()), ("two", ("parallel=fsdp",)))
    ]
    alone, both = train(configs[0], 1), train(configs[1], 2)
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in both] == pytest.approx([row[key] for row in alone], rel=1e-10)
    assert both[-1]["validation_loss"] == pytest.approx(alone[-1]["validation_loss"], rel=1e-10)
    return alone


def test_a_vision_transformer_learns_from_files_and_two_ranks_give_the_same(images: Path, tmp_path: Path) -> None:
    rows = compare(images, tmp_path, *TINY, "train.steps=24", "optim.lr=3e-3", "train.eval_every=24")
    assert rows[-1]["validation_loss"] < 0.3 < rows[0]["loss"]


@pytest.mark.parametrize("name", draw(MODELS, ("dinov2",)))
def test_models_of_transformers_train_on_files(images: Path, tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    auto = transformers.AutoModelForImageClassification
    auto.from_config(MODELS[name]()).save_pretrained(tmp_path / "model")
    compare(images, tmp_path, "model=hf", f"model.path={tmp_path}/model", "model.mixed_dtypes=true", "train.steps=4")


def test_folders_are_built_at_first_use_and_wrong_sizes_are_one_line(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPC_TRAIN_CACHE", str(tmp_path / "cache"))
    source = compose([*RUN, *TINY, f"data.sources=[{images}/photos]", f"run_dir={tmp_path}/run", "train.steps=1"])
    assert len(train(source, 1)) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1
    words = ["train", *RUN, *TINY, f"data.path={images}/a.h5", "train.steps=1", f"run_dir={tmp_path}/none"]
    bad = {
        "data.image_size=16": "data.image_size=16 data.channels=3: model=vit_tiny takes images of 8 and 3",
        "data.path=nowhere.h5": "data.path=nowhere.h5: no such file; make it with `hpc-train data build nowhere.h5",
        "data.path=nowhere.h5 data.image_size=16": "data.path=nowhere.h5: no such file",
        "model=llama_tiny": "reads tokens",
    }
    for word, said in bad.items():
        kept = [one for one in words if one not in TINY] if word.startswith("model") else words
        assert main([*kept, *word.split()]) == EXIT_USER_ERROR
        error = capsys.readouterr().err
        assert (error.count("\n"), said in error) == (1, True), error
        assert not (tmp_path / "none").exists()
