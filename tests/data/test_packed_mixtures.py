"""Mixtures of packed documents: the samples of the sources alone, in an order that no number of ranks changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hpc_train.cli.main import main
from hpc_train.config.model import MixtureDataConfig
from hpc_train.data.datasets import open_dataset, open_token_dataset
from hpc_train.data.loader import Loader
from hpc_train.data.samples.mixture import MixtureDataset
from hpc_train.data.samples.mixture_order import list_sources
from hpc_train.errors import EXIT_USER_ERROR

LENGTH = 16


@pytest.fixture
def config(tmp_path: Path) -> MixtureDataConfig:
    """Two token files of documents of 1 to 40 tokens, each with the separator 0; weights change after 32 samples."""
    generator = np.random.default_rng(0)
    for number, count in enumerate((150, 60)):
        lengths = generator.integers(1, 40, count)
        documents = [[*generator.integers(1 + 100 * number, 100 + 100 * number, length), 0] for length in lengths]
        np.save(tmp_path / f"{number}.npy", np.concatenate(documents).astype("<u2"))
    return MixtureDataConfig(
        name="m",
        paths=[str(tmp_path / f"{number}.npy") for number in (0, 1)],
        weights=[0.75, 0.25],
        later_tokens=[32 * LENGTH],
        later_weights=[0.25, 0.75],
        samples="packed",
        separator=0,
        validation_fraction=0.1,
    )


def load(data: MixtureDataset, ranks: int, first: int) -> list[list[list[int]]]:
    """What `ranks` ranks see from a position on: tokens, document starts and targets of each sample, in order."""
    seen = []
    loaders = [Loader(data, 3, 8, 2, index, ranks) for index in range(ranks)]
    for start in range(first, 96, 8):
        for loader in loaders:
            for micro in loader.batch(start).micro:
                assert isinstance(micro.inputs, dict)
                seen += torch.stack([*micro.inputs.values(), micro.targets], 1).tolist()
    for loader in loaders:
        loader.close()
    return seen


def test_every_number_of_ranks_and_a_resume_on_another_see_the_same_samples(config: MixtureDataConfig) -> None:
    data = open_dataset(config, LENGTH, "train")
    assert isinstance(data, MixtureDataset)
    whole = load(data, 1, 0)
    assert load(data, 4, 0) == whole
    assert load(data, 2, 40) == whole[40:]
    second = [max(tokens) > 100 for tokens, _, _ in whole]
    assert (sum(second[:32]), sum(second[32:])) == (8, 48)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_sample_is_the_one_of_its_source_alone(config: MixtureDataConfig, split: str) -> None:
    data = open_dataset(config, LENGTH, split)  # type: ignore[arg-type]
    first, second = (open_token_dataset(source, LENGTH, split) for source in list_sources(config))  # type: ignore[arg-type]
    rows = np.random.default_rng(1).permutation(len(data))
    inputs, targets = data.get(rows)
    for row, index in enumerate(rows):
        source, own = (first, index) if index < len(first) else (second, index - len(first))
        wanted, aims = source.get(np.array([own]))
        assert inputs.keys() == wanted.keys()  # type: ignore[union-attr]
        assert all(torch.equal(inputs[name][row], wanted[name][0]) for name in wanted)  # type: ignore[index]
        assert torch.equal(targets[row], aims[0])


def test_what_packing_refuses_a_packed_mixture_refuses(
    config: MixtureDataConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["data=mixture", f"data.paths=[{','.join(config.paths)}]", "data.samples=packed", "data.separator=0"]
    run = ["train.steps=1", "launch.ranks=2", f"run_dir={tmp_path}/run", "model.vocab_size=300", "parallel.cp=2"]
    assert main(["train", *words, *run]) == EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "data.samples=packed: not with parallel.cp=2" in error
    assert not (tmp_path / "run").exists()
