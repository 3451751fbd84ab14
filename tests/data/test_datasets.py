"""Data sets: a sample is what its index says, the splits share nothing, and a model that cannot take them is told."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_train.config.model import (
    CustomModelConfig,
    ImageDataConfig,
    TokenDataConfig,
    TransformerConfig,
    VisionTransformerConfig,
)
from hpc_train.data.datasets import check_model_fits_data, open_dataset
from hpc_train.data.token_store import StoreHeader, TokenBlock, TokenStore, compute_unigram_entropy, write_store
from hpc_train.errors import UserError

TOKENS = 1003


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """Tokens 0, 1, 2, ..., so that a token is its own position."""
    path = tmp_path_factory.mktemp("store") / "a.h5"
    tokens = np.arange(TOKENS, dtype=np.uint32)
    write_store(path, [TokenBlock(tokens, np.zeros(1, np.int64))], StoreHeader(70_000, "bpe", "{}", "{}"))
    return path


def tokens_of(path: Path, fraction: float = 0.1) -> TokenDataConfig:
    return TokenDataConfig(name="test", path=str(path), validation_fraction=fraction)


def digits(fraction: float = 0.2) -> ImageDataConfig:
    return ImageDataConfig(validation_fraction=fraction)


@settings(max_examples=100)
@given(st.integers(1, 99), st.sampled_from(["train", "validation"]), st.data())
def test_a_sample_is_the_tokens_at_its_index_and_its_targets_are_one_on(path, length, split, data):
    dataset = open_dataset(tokens_of(path), length, split)
    begin, tokens = {"train": (0, 903), "validation": (903, 100)}[split]
    assert len(dataset) == (tokens - 1) // length
    indices = np.array(data.draw(st.lists(st.integers(0, len(dataset) - 1), min_size=1, max_size=9)), np.int64)
    inputs, targets = dataset.get(indices)
    expected = begin + torch.from_numpy(indices)[:, None] * length + torch.arange(length)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(inputs, expected)
    assert torch.equal(targets, expected + 1)


@pytest.mark.parametrize("fraction", [0.02, 0.1, 0.3333, 0.5])
def test_the_splits_share_no_token(path, fraction):
    seen = []
    for split in ("train", "validation"):
        dataset = open_dataset(tokens_of(path, fraction), 4, split)
        inputs, targets = dataset.get(np.arange(len(dataset)))
        seen.append(set(inputs.flatten().tolist()) | set(targets.flatten().tolist()))
    assert max(seen[0]) < min(seen[1])
    assert max(seen[1]) >= TOKENS - 4


def test_without_validation_the_training_part_is_everything(path):
    assert len(open_dataset(tokens_of(path, 0.0), 1002, "train")) == 1
    with pytest.raises(UserError, match=r"train\.eval_every=0"):
        open_dataset(tokens_of(path, 0.0), 4, "validation")


@pytest.mark.parametrize(("split", "length"), [("train", 903), ("validation", 100), ("validation", 10**9)])
def test_a_sequence_longer_than_the_split_is_one_line(path, split, length):
    with pytest.raises(UserError, match=rf"train\.sequence_length={length}") as error:
        open_dataset(tokens_of(path), length, split)
    assert "\n" not in str(error.value)
    assert split in str(error.value)


def test_both_splits_know_the_unigram_entropy_of_the_training_part(path):
    expected = compute_unigram_entropy(TokenStore.open(path), 903)
    assert expected == pytest.approx(np.log(903))
    for split in ("train", "validation"):
        dataset = open_dataset(tokens_of(path), 8, split)
        assert dataset.unigram_entropy == expected
        assert (dataset.vocab_size, dataset.classes, dataset.tokens_per_sample) == (70_000, None, 8)


def test_digits_are_normalised_images_split_at_the_same_place_each_time():
    train, validation = open_dataset(digits(), 1, "train"), open_dataset(digits(), 1, "validation")
    assert (len(train), len(validation)) == (1438, 359)
    images, labels = train.get(np.arange(1438))
    assert (images.shape, images.dtype) == ((1438, 1, 8, 8), torch.float32)
    assert (labels.shape, labels.dtype) == ((1438,), torch.int64)
    assert set(labels.tolist()) == set(range(10))
    assert images.mean().item() == pytest.approx(0, abs=1e-5)
    assert images.std().item() == pytest.approx(1, abs=1e-3)
    again = open_dataset(digits(), 1, "train").get(np.array([5, 3]))
    assert torch.equal(again[0], images[[5, 3]])
    assert (train.tokens_per_sample, train.classes, train.vocab_size, train.unigram_entropy) == (1, 10, None, None)


def test_digits_are_the_package_s_own():
    from sklearn.datasets import load_digits

    whole = load_digits()
    images, labels = open_dataset(digits(), 1, "validation").get(np.arange(359))
    assert labels.tolist() == whole.target[-359:].tolist()
    assert np.corrcoef(images.flatten().numpy(), whole.images[-359:].flatten())[0, 1] == pytest.approx(1)


@pytest.mark.parametrize("fraction", [0.0001, 0.9999])
def test_a_split_of_digits_without_an_image_is_one_line(fraction):
    with pytest.raises(UserError, match="leaves no image"):
        open_dataset(digits(fraction), 1, "validation" if fraction < 0.5 else "train")


def test_an_unknown_image_set_is_one_line():
    with pytest.raises(UserError, match="cifar"):
        open_dataset(ImageDataConfig(name="cifar"), 1, "train")


def test_without_scikit_learn_one_line_says_how_to_get_it():
    program = (
        "import sys; sys.modules['sklearn'] = sys.modules['sklearn.datasets'] = None\n"
        "from hpc_train.config.model import ImageDataConfig\n"
        "from hpc_train.data.datasets import open_dataset\n"
        "from hpc_train.errors import UserError\n"
        "try: open_dataset(ImageDataConfig(), 1, 'train')\n"
        "except UserError as error: print(error)\n"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout
    assert "pip install 'hpc_train[images]'" in out
    assert len(out.splitlines()) == 1


def test_a_model_that_fits_the_data_passes(path):
    tokens, images = open_dataset(tokens_of(path), 8, "train"), open_dataset(digits(), 1, "train")
    check_model_fits_data(TransformerConfig(name="t", vocab_size=70_000), tokens)
    check_model_fits_data(VisionTransformerConfig(name="v"), images)
    check_model_fits_data(CustomModelConfig(name="c"), tokens)
    check_model_fits_data(CustomModelConfig(name="c"), images)


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        (TransformerConfig(name="t", vocab_size=69_999), "tokens", r"set model\.vocab_size=70000"),
        (TransformerConfig(name="t"), "images", "choose a vision transformer"),
        (VisionTransformerConfig(name="v"), "tokens", "choose data=digits"),
        (VisionTransformerConfig(name="v", classes=9), "images", r"model\.classes=9"),
        (VisionTransformerConfig(name="v", image_size=16), "images", r"model\.image_size=8"),
        (VisionTransformerConfig(name="v", channels=3), "images", r"model\.channels=1"),
    ],
)
def test_a_model_that_does_not_fit_is_one_line(path, model, kind, message):
    config = tokens_of(path) if kind == "tokens" else digits()
    with pytest.raises(UserError, match=message) as error:
        check_model_fits_data(model, open_dataset(config, 8, "train"))
    assert "\n" not in str(error.value)
