"""Samples of images: crops are a pure function of seed and position, and every number of ranks sees the same."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from labelled_images import make_folder

from hpc_train.config.model import ImageFilesDataConfig
from hpc_train.data.datasets import open_dataset
from hpc_train.data.images.build_images import build_image_store
from hpc_train.data.images.decoding import centre_crop, draw_crop
from hpc_train.data.images.image_samples import ImageSamples
from hpc_train.data.images.image_store import ImageStore
from hpc_train.data.loader import Loader
from hpc_train.errors import UserError


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ImageStore:
    folder = tmp_path_factory.mktemp("images")
    return build_image_store([str(make_folder(folder / "photos", each=8))], folder / "a.h5")


def open_split(store: ImageStore, split: str = "train", **changes: object) -> ImageSamples:
    facts = {"path": str(store.path), "image_size": 8, "validation_fraction": 0.25, "decode_threads": 2}
    data = open_dataset(ImageFilesDataConfig(**(facts | changes)), 0, split)  # type: ignore[arg-type]
    assert isinstance(data, ImageSamples)
    return data


def load(data: ImageSamples, ranks: int, first: int, seed: int = 3, augment: bool = True) -> torch.Tensor:
    """What `ranks` ranks see from a position to the end of the second epoch, in order."""
    seen = []
    loaders = [Loader(data, seed, 6, 2, index, ranks, augment) for index in range(ranks)]
    for start in range(first, 2 * len(data), 6):
        for loader in loaders:
            seen += [micro.inputs for micro in loader.batch(start).micro]
    for loader in loaders:
        loader.close()
    return torch.cat(seen)  # type: ignore[arg-type]


def test_every_number_of_ranks_and_a_resume_see_the_same_crops(store: ImageStore) -> None:
    data = open_split(store)
    whole = load(data, 1, 0)
    assert whole.shape == (36, 3, 8, 8)
    assert torch.equal(load(data, 3, 0), whole)
    assert torch.equal(load(data, 2, 12), whole[12:])
    assert not torch.equal(load(data, 1, 0, seed=4), whole)


def test_an_image_looks_another_way_in_the_next_epoch_and_the_same_without_augmentation(store: ImageStore) -> None:
    data = open_split(store)
    one, two = (data.get_augmented(np.array([5]), 3, first)[0] for first in (0, len(data)))
    assert not torch.equal(one, two)
    plain = open_split(store, augment="none")
    assert torch.equal(plain.get_augmented(np.array([5]), 3, 0)[0], data.get(np.array([5]))[0])
    assert torch.equal(load(data, 1, 0, augment=False)[:1], load(plain, 1, 0)[:1])


def test_the_splits_share_no_image_and_have_every_class(store: ImageStore) -> None:
    train, validation = open_split(store), open_split(store, "validation")
    assert sorted([*train.rows, *validation.rows]) == list(range(24))
    assert (len(train), len(validation)) == (18, 6)
    assert set(store.labels[train.rows]) == {0, 1, 2}
    assert len(set(store.labels[validation.rows])) > 1, "the end of the store would be one class"


def test_another_store_may_be_the_validation(store: ImageStore, tmp_path: Path) -> None:
    other = build_image_store([str(make_folder(tmp_path / "val", each=2))], tmp_path / "val.h5")
    data = open_split(store, "validation", validation_path=str(other.path))
    assert (len(data), data.store.path) == (6, other.path)
    assert len(open_split(store, validation_path=str(other.path))) == 24
    (tmp_path / "val" / "ant").rename(tmp_path / "val" / "ape")
    renamed = build_image_store([str(tmp_path / "val")], tmp_path / "renamed.h5")
    with pytest.raises(UserError, match="its 3 classes are not the 3 of"):
        open_split(store, validation_path=str(renamed.path))


def test_drawn_crops_stay_inside_and_have_the_areas_and_ratios_that_are_said() -> None:
    crops = [draw_crop(7, position, 640, 480, 0.08) for position in range(4000)]
    for crop in crops:
        assert 0 <= crop.left <= crop.left + crop.width <= 1 + 1e-12
        assert 0 <= crop.top <= crop.top + crop.height <= 1 + 1e-12
        assert 0.08 * 3 / 4 < crop.width * crop.height <= 1
    free = [crop for crop in crops if crop.width < 1 and crop.height < 1]
    ratios = [crop.width * 640 / (crop.height * 480) for crop in free]
    assert 0.75 <= min(ratios) < 0.76
    assert 1.32 < max(ratios) <= 4 / 3 + 1e-12
    assert sum(crop.flipped for crop in crops) == pytest.approx(2000, abs=4 * math.sqrt(1000))
    areas = [crop.width * crop.height for crop in free]
    assert min(areas) == pytest.approx(0.08, abs=0.01)
    assert centre_crop(640, 480, 0.875).width * 640 == pytest.approx(420)


def test_draws_never_change_between_releases() -> None:
    """A resumed run must see the crops of the run that it continues."""
    crop = draw_crop(7, 123, 640, 480, 0.08)
    assert (crop.left, crop.top, crop.width, crop.height, crop.flipped) == pytest.approx(EXPECTED)


EXPECTED = (0.6030779657587405, 0.2583057224499938, 0.3487457446953272, 0.46498033504220937, True)


def test_a_mean_of_another_number_of_channels_is_refused(store: ImageStore) -> None:
    with pytest.raises(UserError, match=r"data.mean=\[0.5\]: give one number for each of data.channels=3"):
        open_split(store, mean=[0.5])
    with pytest.raises(UserError, match=r"data.channels=2: 3 are colours, and 1 is grey"):
        open_split(store, channels=2)
    grey = open_split(store, channels=1, mean=[0.0], std=[1.0])
    images, labels = grey.get(np.arange(4))
    assert (images.shape, images.dtype, labels.dtype) == ((4, 1, 8, 8), torch.float32, torch.int64)
    assert 0 <= images.min() < images.max() <= 1
