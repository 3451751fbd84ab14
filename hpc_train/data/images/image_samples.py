"""Samples cut out of the images of a store: decoded, cropped, perhaps flipped, and normalised."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpc_train.config.model import ImageFilesDataConfig
from hpc_train.data.images.build_images import ensure_image_store
from hpc_train.data.images.decoding import (
    Crop,
    ImageError,
    centre_crop,
    decode_image,
    draw_crop,
    import_pillow,
)
from hpc_train.data.images.image_store import ImageStore
from hpc_train.data.sample_order import order_samples
from hpc_train.errors import UserError

Indices = npt.NDArray[np.int64]
ChooseCrop = Callable[[int, int, int], Crop]
"""(number in the batch, width, height) -> crop"""
_SPLIT_SEED = 0
_COLOUR = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
"""Mean and standard deviation of ImageNet's images."""
_GREY = ([0.449], [0.226])


@dataclass(frozen=True)
class ImageSamples:
    """Labelled images of a store that belong to one split."""

    store: ImageStore
    config: ImageFilesDataConfig
    rows: Indices
    """(images,): their indices in the store."""

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return the middle of each image, (indices, channels, size, size) float32, and labels, (indices,) int64."""
        share = self.config.centre_crop
        return self._read(indices, lambda _, width, height: centre_crop(width, height, share))

    def get_augmented(self, indices: Indices, seed: int, first: int) -> tuple[Tensor, Tensor]:
        """Return a drawn crop of each image and labels, as `get`.

        first: the position in the run of the first one. The crops depend on the seed and the position alone, so that an
        image looks another way in each epoch, and the same way at any number of ranks.
        """
        if self.config.augment == "none":
            return self.get(indices)
        least = self.config.crop_area
        return self._read(indices, lambda number, width, height: draw_crop(seed, first + number, width, height, least))

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def classes(self) -> int:
        return len(self.store.classes)

    @property
    def tokens_per_sample(self) -> int:
        return 1

    @property
    def vocab_size(self) -> None:
        return None

    @property
    def unigram_entropy(self) -> None:
        return None

    def _read(self, indices: Indices, choose_crop: ChooseCrop) -> tuple[Tensor, Tensor]:
        rows, config = self.rows[indices], self.config

        def decode(number: int) -> npt.NDArray[np.uint8]:
            data = self.store.read(int(rows[number]))
            try:
                return decode_image(data, config.channels, config.image_size, partial(choose_crop, number))
            except ImageError as error:
                raise UserError(
                    f"{self.store.path}: image {rows[number]} {error}; `hpc-train data inspect --verify` says whether "
                    "the store is damaged"
                ) from error

        with ThreadPoolExecutor(config.decode_threads, thread_name_prefix="images") as pool:
            pixels = np.stack(list(pool.map(decode, range(len(rows)))))
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float()
        mean, deviation = _get_scale(config)
        images = images.div_(255).sub_(mean).div_(deviation).contiguous()
        return images, torch.from_numpy(np.asarray(self.store.labels[rows]))


def open_image_files(config: ImageFilesDataConfig, split: Literal["train", "validation"]) -> ImageSamples:
    """Open one split of a store of images; the store is built first if the config names sources and it is missing.

    A validation split without a store of its own is drawn from all images, because stores are sorted by class. Raises
    UserError if the split has no image.
    """
    import_pillow()
    _get_scale(config)
    store = ImageStore.open(ensure_image_store(config))
    if config.validation_path is not None:
        return _open_split_store(store, config, split)
    order = order_samples(_SPLIT_SEED, len(store), 0, len(store))
    boundary = len(store) - round(len(store) * config.validation_fraction)
    rows = np.sort(order[:boundary] if split == "train" else order[boundary:])
    if not len(rows):
        raise UserError(
            f"data.validation_fraction={config.validation_fraction} leaves no image of {len(store):,} for {split}: "
            "choose it nearer to 0.2"
        )
    return ImageSamples(store, config, rows)


def _open_split_store(
    store: ImageStore, config: ImageFilesDataConfig, split: Literal["train", "validation"]
) -> ImageSamples:
    assert config.validation_path is not None
    other = ImageStore.open(config.validation_path)
    if other.classes != store.classes:
        raise UserError(
            f"data.validation_path={config.validation_path}: its {len(other.classes)} classes are not the "
            f"{len(store.classes)} of {store.path}; build both from folders or labels of the same names"
        )
    chosen = store if split == "train" else other
    return ImageSamples(chosen, config, np.arange(len(chosen)))


def _get_scale(config: ImageFilesDataConfig) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each channel, (channels, 1, 1). Raises UserError for another number."""
    if config.channels == 2:
        raise UserError("data.channels=2: 3 are colours, and 1 is grey")
    mean, deviation = _COLOUR if config.channels == 3 else _GREY
    pairs = (("mean", config.mean or mean), ("std", config.std or deviation))
    for name, values in pairs:
        if len(values) != config.channels or (name == "std" and min(values) <= 0):
            raise UserError(f"data.{name}={list(values)}: give one number for each of data.channels={config.channels}")
    scale = [torch.tensor(values, dtype=torch.float32).view(-1, 1, 1) for _, values in pairs]
    return scale[0], scale[1]
