"""Wrap what a user's registered function returns as a Dataset (samples by index) or as a stream.

A sample is (inputs, targets), or a dictionary with `targets`; its other entries are the inputs by name. With `labels`
in place of `targets` both get them, as a model of transformers that computes its loss itself wants it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from types import GeneratorType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from hpc_train.components import DATASETS, accepts_argument, explain_user_code
from hpc_train.config.model import CustomDataConfig
from hpc_train.errors import UserError

if TYPE_CHECKING:
    from hpc_train.interfaces import ModelInputs

Indices = npt.NDArray[np.int64]
_SAMPLE = "return (inputs, targets), or a dictionary with the entry targets or labels"


@dataclass(frozen=True)
class StreamPart:
    """The part of a stream that a rank reads: samples `index`, `index + count`, ... of it."""

    index: int = 0
    count: int = 1


class OwnDataset:
    """A user's map-style data set, or one split of it; implements datasets.Dataset."""

    vocab_size: int | None = None
    classes: int | None = None
    unigram_entropy: float | None = None

    def __init__(self, name: str, source: Any, begin: int, end: int) -> None:
        """source: has __getitem__. begin, end: the samples of this split."""
        self.name, self._source, self._begin, self._end = name, source, begin, end

    def __len__(self) -> int:
        return self._end - self._begin

    def get(self, indices: Indices) -> tuple[ModelInputs, Tensor]:
        """Return inputs and targets of some samples, collated along a new first dimension."""
        numbers = [int(index) + self._begin for index in indices]
        with explain_user_code(f"reading samples of data.name={self.name}, such as {numbers[0]}"):
            return collate_samples(self.name, self._source, self._read(numbers))

    def _read(self, numbers: list[int]) -> Sequence[Any]:
        several = getattr(self._source, "__getitems__", None)
        return several(numbers) if several is not None else [self._source[number] for number in numbers]

    @cached_property
    def tokens_per_sample(self) -> int:
        """Targets of the first sample."""
        return int(self.get(np.zeros(1, np.int64))[1].numel())


class OwnStream:
    """A user's iterable data set: no length, no order of ours; see stream_loader."""

    def __init__(self, name: str, source: Iterable[Any], part: StreamPart) -> None:
        """part: what is left to take here of what `source` yields."""
        self.name, self.source, self.part = name, source, part

    @property
    def saves_position(self) -> bool:
        """Whether the data set can save and load where it is."""
        return all(callable(getattr(self.source, name, None)) for name in ("state_dict", "load_state_dict"))


def open_own_dataset(
    config: CustomDataConfig, split: Literal["train", "validation"], part: StreamPart | None = None
) -> OwnDataset | OwnStream:
    """Call the registered function and check what it returns.

    It gets config.args, and `split` if it has such a parameter: then it returns that split; otherwise the validation
    split is cut off the end. A function of a stream may take `dp_index` and `dp_size` to choose this rank's samples
    itself; otherwise each rank takes every dp_size-th sample. part: the stream's part for this rank.
    """
    part = part or StreamPart()
    factory = DATASETS.find(config.name, config.module)
    given: dict[str, Any] = {"split": split} if accepts_argument(factory, "split") else {}
    if accepts_argument(factory, "dp_index") and accepts_argument(factory, "dp_size"):
        given |= {"dp_index": part.index, "dp_size": part.count}
        # The function deals the samples itself, so this rank takes all that it yields.
        part = StreamPart()
    source = DATASETS.call(config.name, factory, config.args, **given)
    # torch's IterableDataset inherits a __getitem__ that only raises, and may have a length.
    if hasattr(source, "__getitem__") and isinstance(source, Sized) and not isinstance(source, IterableDataset):
        if "dp_index" in given:
            raise UserError(
                f"data.name={config.name}: takes dp_index and dp_size, and returned a data set with an index, whose "
                "samples are dealt to the ranks here; leave the two out, or return one with __iter__"
            )
        return _cut_split(config, source, split, takes_split="split" in given)
    _check_stream(config, source, split, takes_split="split" in given)
    return OwnStream(config.name, source, part)


def _check_stream(config: CustomDataConfig, source: Any, split: str, takes_split: bool) -> None:
    """Raise UserError for what cannot be read as a stream, again and again, of this split."""
    if not isinstance(source, Iterable):
        raise UserError(
            f"data.name={config.name}: returned a {type(source).__name__}; return a data set with __len__ and "
            "__getitem__, or one with __iter__"
        )
    if isinstance(source, (GeneratorType, map, zip, filter, enumerate)):
        raise UserError(
            f"data.name={config.name}: returned a {type(source).__name__}, which can be read only once; return an "
            "object whose __iter__ begins anew"
        )
    if split == "validation" and not takes_split:
        raise UserError(
            f"data.name={config.name}: nothing can be cut off an iterable data set for validation; give the function "
            "an argument `split` (train or validation), or set train.eval_every=0"
        )


def _cut_split(config: CustomDataConfig, source: Any, split: str, takes_split: bool) -> OwnDataset:
    with explain_user_code(f"the length of data.name={config.name}"):
        length = len(source)
    boundary = length if takes_split else length - round(length * config.validation_fraction)
    begin, end = (boundary, length) if split == "validation" and not takes_split else (0, boundary)
    if end <= begin:
        raise UserError(
            f"data.name={config.name}: no sample of {length:,} is left for {split}; give more, or change "
            "data.validation_fraction"
        )
    return OwnDataset(config.name, source, begin, end)


def collate_samples(name: str, source: Any, samples: Sequence[Any]) -> tuple[ModelInputs, Tensor]:
    """Stack samples into inputs and targets. A method `collate` of the data set goes first; it may pad."""
    collate = getattr(source, "collate", None)
    if collate is not None:
        inputs, targets = split_sample(name, collate(samples))
    else:
        pairs = [split_sample(name, sample) for sample in samples]
        inputs, targets = _stack(name, [pair[0] for pair in pairs]), _stack(name, [pair[1] for pair in pairs])
    _check_tensors(name, inputs, targets, len(samples))
    return inputs, targets


def split_sample(name: str, sample: Any) -> tuple[Any, Any]:
    """Split a sample into its inputs and its targets. Raises UserError for another form."""
    if isinstance(sample, Mapping):
        if "targets" in sample:
            return {key: value for key, value in sample.items() if key != "targets"}, sample["targets"]
        if "labels" in sample:
            return dict(sample), sample["labels"]
        raise UserError(f"data.name={name}: a sample has the entries {', '.join(map(str, sample))}; {_SAMPLE}")
    if isinstance(sample, (tuple, list)) and len(sample) == 2:
        return sample[0], sample[1]
    raise UserError(f"data.name={name}: a sample is a {type(sample).__name__}; {_SAMPLE}")


def _stack(name: str, values: list[Any]) -> Any:
    """Stack what the samples of a batch have: one tensor, or one for each entry. Raises UserError if they differ."""
    first = values[0]
    if isinstance(first, Mapping):
        if any(not isinstance(value, Mapping) or value.keys() != first.keys() for value in values):
            raise UserError(f"data.name={name}: samples of one batch have different entries; give each the same")
        return {key: _stack(name, [value[key] for value in values]) for key in first}
    tensors = [_make_tensor(name, value) for value in values]
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        one, other = sorted(shapes)[:2]
        raise UserError(
            f"data.name={name}: samples of one batch have the shapes {one} and {other}; give them one shape, or give "
            "the data set a method collate(samples) that pads them"
        )
    return torch.stack(tensors)


def _make_tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    try:
        return torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"data.name={name}: a sample holds a {type(value).__name__}, which is not a tensor, an array or a number"
        ) from error


def _check_tensors(name: str, inputs: Any, targets: Any, samples: int) -> None:
    entries = inputs if isinstance(inputs, dict) else {"inputs": inputs}
    for key, value in {**entries, "targets": targets}.items():
        if not isinstance(value, Tensor) or value.ndim == 0 or len(value) != samples:
            actual = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise UserError(
                f"data.name={name}: {key} of a batch of {samples} samples is {actual}; its first dimension must be the "
                "batch"
            )
