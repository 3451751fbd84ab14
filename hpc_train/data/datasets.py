"""Open datasets: samples by index, with the validation split cut off the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpc_train.config.model import (
    CustomDataConfig,
    DataConfig,
    HfModelConfig,
    ImageDataConfig,
    ImageFilesDataConfig,
    MixtureDataConfig,
    ModelConfig,
    TokenDataConfig,
    TransformerConfig,
    VisionTransformerConfig,
)
from hpc_train.data.images.image_samples import ImageSamples, open_image_files
from hpc_train.data.own_dataset import OwnStream, StreamPart, open_own_dataset
from hpc_train.data.samples.document_samples import open_padded_documents
from hpc_train.data.samples.mixture import MixtureDataset, MixtureSource
from hpc_train.data.samples.mixture_order import list_sources, make_config_order
from hpc_train.data.samples.packed_samples import open_packed_documents
from hpc_train.data.samples.token_samples import TokenDataset
from hpc_train.data.token_files import open_tokens
from hpc_train.data.token_store import TokenStore
from hpc_train.errors import UserError

if TYPE_CHECKING:
    from hpc_train.interfaces import ModelInputs
    from hpc_train.models.hf.config_file import ConfigFile

Split = Literal["train", "validation"]
Indices = npt.NDArray[np.int64]


class Dataset(Protocol):
    """Samples addressed by index; reading has no side effects."""

    @property
    def name(self) -> str: ...

    @property
    def tokens_per_sample(self) -> int:
        """Number of targets in one sample: the tokens of a sequence, 1 for a labelled image."""

    @property
    def vocab_size(self) -> int | None:
        """Size of the vocabulary; None for images."""

    @property
    def classes(self) -> int | None:
        """Number of labels; None for tokens."""

    @property
    def unigram_entropy(self) -> float | None:
        """Loss of a unigram model of the training split on that split, in nats per token; None for images."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def get(self, indices: Indices) -> tuple[ModelInputs, Tensor]:
        """Return inputs and targets of some samples, in contiguous tensors. indices: any order, repeats allowed."""


def open_dataset(config: DataConfig, sequence_length: int, split: Split) -> Dataset:
    """Open one split of a dataset; the store of a token dataset is built first if it is not there yet.

    sequence_length: in tokens; no effect on images. Raises UserError if the split has no sample.
    """
    if split == "validation" and config.validation_fraction == 0:
        raise UserError("data.validation_fraction=0 leaves nothing to evaluate on: raise it, or set train.eval_every=0")
    if isinstance(config, TokenDataConfig):
        return open_token_dataset(config, sequence_length, split)
    if isinstance(config, MixtureDataConfig):
        return open_mixture(config, sequence_length, split)
    if isinstance(config, ImageFilesDataConfig):
        return open_image_files(config, split)
    if isinstance(config, ImageDataConfig):
        return open_image_dataset(config, split)
    if isinstance(config, CustomDataConfig):
        return require_indexed(open_own_dataset(config, split))
    raise UserError(f"data.kind={config.kind} is not known: tokens, images or custom")


def open_samples(
    config: DataConfig, sequence_length: int, split: Split, part: StreamPart | None = None
) -> Dataset | OwnStream:
    """Open one split as open_dataset does, or a user's iterable data set. part: of a stream, this rank's."""
    if isinstance(config, CustomDataConfig) and not (split == "validation" and config.validation_fraction == 0):
        return open_own_dataset(config, split, part)
    return open_dataset(config, sequence_length, split)


def require_indexed(data: Dataset | OwnStream) -> Dataset:
    """Return a data set whose samples have an index. Raises UserError for a stream."""
    if isinstance(data, OwnStream):
        raise UserError(f"data.name={data.name}: is an iterable data set; this needs one with __len__ and __getitem__")
    return data


def open_token_dataset(config: TokenDataConfig, sequence_length: int, split: Split) -> MixtureSource:
    """Open one split of a token dataset: its tokens, and where the split begins and ends in them."""
    store = open_tokens(config)
    if config.samples == "packed":
        return open_packed_documents(config, store, sequence_length, split)
    samples = config.samples or ("stream" if store.counted is None else "padded")
    if samples == "padded":
        return open_padded_documents(config, store, sequence_length, split)
    boundary = _find_boundary(len(store.tokens), config.validation_fraction)
    begin, end = (0, boundary) if split == "train" else (boundary, len(store.tokens))
    if end - begin <= sequence_length:
        raise UserError(
            f"{store.path}: {end - begin:,} tokens for {split} do not make one sequence of train.sequence_length="
            f"{sequence_length} and its targets: shorten it, give more text, or change data.validation_fraction"
        )
    return TokenDataset(config.name, store, sequence_length, begin, end, boundary)


def open_mixture(config: MixtureDataConfig, sequence_length: int, split: Split) -> MixtureDataset:
    """Open one split of every source of a mixture. Raises UserError if their tokens do not mean the same."""
    sources = [open_token_dataset(source, sequence_length, split) for source in list_sources(config)]
    digests = {one.store.tokenizer_digest: one.name for one in sources if isinstance(one.store, TokenStore)}
    if len(digests) > 1:
        first, second, *_ = digests.values()
        raise UserError(f"data.paths: {first} and {second} have different tokenizers: build them with the same one")
    sizes = [len(source) for source in sources]
    order = make_config_order(config, sizes, sequence_length) if split == "train" else None
    return MixtureDataset(config.name, tuple(sources), order)


def check_model_fits_data(model: ModelConfig, data: Dataset) -> None:
    """Raise UserError if a built-in model cannot take this data; a user's own model is not checked."""
    if isinstance(model, TransformerConfig):
        _check_transformer(model, data)
    elif isinstance(model, VisionTransformerConfig):
        _check_vision_transformer(model, data)
    elif isinstance(model, HfModelConfig):
        _check_hf_model(model, data)


@dataclass(frozen=True)
class ImageDataset:
    """Labelled images in memory."""

    name: str
    images: Tensor
    """(images, channels, height, width) float32, mean 0 and variance 1 over the training part."""
    labels: Tensor
    """(images,) int64"""
    classes: int

    def __len__(self) -> int:
        return len(self.labels)

    def get(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return images, (indices, channels, height, width) float32, and labels, (indices,) int64."""
        chosen = torch.from_numpy(indices)
        return self.images[chosen], self.labels[chosen]

    @property
    def tokens_per_sample(self) -> int:
        return 1

    @property
    def vocab_size(self) -> None:
        return None

    @property
    def unigram_entropy(self) -> None:
        return None


def open_image_dataset(config: ImageDataConfig, split: Split) -> ImageDataset:
    """Open the handwritten digits that ship with scikit-learn (Alpaydin and Kaynak 1998, UCI optdigits, test part)."""
    if config.name != "digits":
        raise UserError(f"data.name={config.name} is not an image data set here: digits")
    pixels, labels = _load_digits()
    boundary = _find_boundary(len(pixels), config.validation_fraction)
    part = slice(boundary) if split == "train" else slice(boundary, None)
    if not len(labels[part]):
        raise UserError(
            f"data.validation_fraction={config.validation_fraction} leaves no image of {len(labels):,} for {split}: "
            "choose it nearer to 0.2"
        )
    images = (pixels - pixels[:boundary].mean()) / pixels[:boundary].std()
    tensor = torch.from_numpy(images[part, None].astype(np.float32))
    return ImageDataset(config.name, tensor, torch.from_numpy(labels[part].astype(np.int64)), classes=10)


def _find_boundary(length: int, validation_fraction: float) -> int:
    return length - round(length * validation_fraction)


def _load_digits() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError("data=digits needs the package scikit-learn: pip install 'hpc_train[images]'") from error
    digits = load_digits()
    return digits.images, digits.target


def _check_transformer(model: TransformerConfig, data: Dataset) -> None:
    if data.vocab_size is None:
        raise UserError(f"model {model.name} reads tokens but data {data.name} are images: choose a vision transformer")
    if model.vocab_size < data.vocab_size:
        raise UserError(
            f"model.vocab_size={model.vocab_size} is smaller than the vocabulary of data {data.name}, "
            f"{data.vocab_size}: set model.vocab_size={data.vocab_size}"
        )


def _check_hf_model(model: HfModelConfig, data: Dataset) -> None:
    from hpc_train.models.hf.config_file import read_config_file

    file = read_config_file(model)
    if isinstance(data, ImageSamples):
        _check_hf_images(model, file, data)
    tokens = file.vocab_size
    if tokens is not None and data.vocab_size is not None and tokens < data.vocab_size:
        raise UserError(
            f"model.path={model.path}: its vocabulary of {tokens} is smaller than that of data {data.name}, "
            f"{data.vocab_size}: use the tokenizer of the model, or a model with more tokens"
        )


def _check_hf_images(model: HfModelConfig, file: ConfigFile, data: ImageSamples) -> None:
    if file.classes < data.classes:
        raise UserError(
            f"model.path={model.path}: its head has {file.classes} classes but data {data.name} have {data.classes}: "
            "give the model that many labels (num_labels) when transformers saves it"
        )
    for name, wanted, value in zip(
        ("channels", "image_size"), file.image_shape, (data.config.channels, data.config.image_size), strict=True
    ):
        if wanted is not None and wanted != value:
            raise UserError(f"data.{name}={value}: model.path={model.path} takes {wanted}; set data.{name}={wanted}")


def _check_vision_transformer(model: VisionTransformerConfig, data: Dataset) -> None:
    if data.classes is None:
        raise UserError(f"model {model.name} reads images but data {data.name} are tokens: choose data=digits")
    if model.classes < data.classes:
        raise UserError(f"model.classes={model.classes} but data {data.name} have {data.classes}: set model.classes")
    images, _ = data.get(np.zeros(1, np.int64))
    if not isinstance(images, Tensor):
        raise UserError(f"model {model.name} takes images alone but data {data.name} give {', '.join(images)}")
    shape = tuple(images.shape[1:])
    expected = (model.channels, model.image_size, model.image_size)
    if shape != expected:
        raise UserError(
            f"model {model.name} takes images of (channels, height, width) {expected} but those of data {data.name} "
            f"are {shape}: set model.channels={shape[0]} model.image_size={shape[1]}"
        )
