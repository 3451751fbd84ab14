"""Check that a manifest describes a shard file as the file describes itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.format.block_digests import DigestTable
from hpc_train.checkpoint.format.compressed_chunks import PartTable, iterate_chunk_spans
from hpc_train.checkpoint.format.hdf5_layout import dataset_name, name_datasets
from hpc_train.checkpoint.format.hdf5_parser import ParsedDataset, parse_datasets
from hpc_train.checkpoint.format.layout_bounds import choose_minimum_itemsize, list_kind_cut_pairs
from hpc_train.checkpoint.format.manifest import ShardFile
from hpc_train.checkpoint.format.shard_layout import (
    Integers,
    SharedLayout,
    StepLayout,
    compute_seal,
    hash_row_form,
    seal_table,
)

ReadBytes = Callable[[int, int], bytes]
"""Reads bytes [begin, end) of a file."""
_UNMASKED, _MASKED = 0, 0b11
"""Filter masks of HDF5 chunks: both filters (shuffle, deflate) were applied, or both left out."""


class ExpectedDataset(NamedTuple):
    """A dataset as the manifest describes it."""

    tensor: str
    dtype: str
    global_shape: tuple[int, ...]
    """Shape of the logical tensor."""
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    place: int | None
    """Byte of the image; None for a dataset without elements, which has no place."""


def check_shard_file(
    step_layout: StepLayout, index: int, file: ShardFile, table: DigestTable, read: ReadBytes, thorough: bool
) -> None:
    """Raise CheckpointError unless the manifest describes a file as its writer did.

    index: of the file in the step. thorough: compare with the HDF5 structure of the file even if the seal matches,
    which takes about 50 microseconds a dataset.
    """
    rows_by_layout = ((layout, np.flatnonzero(layout.files == index)) for layout in step_layout.layouts)
    layout, members = next(((layout, members) for layout, members in rows_by_layout if len(members)), (None, None))
    if layout is None or members is None:
        return  # no tensor is read from it
    member = int(members[0])
    sealed = layout.within is None  # a file shared with an earlier step has the seal of all that that step wrote
    if sealed and table.seal != seal_table(compute_layout_seal(step_layout, layout, member), table.parts):
        raise CheckpointError("the manifest does not describe what was written (seal)")
    if thorough or not sealed:
        datasets = parse_datasets(read, file.bytes)
        _compare(_list_expected(step_layout, layout, member), datasets, table.parts, layout.within is None)


def compute_layout_seal(step_layout: StepLayout, layout: SharedLayout, member: int) -> bytes:
    """Return the seal of a file as a manifest describes it. member: index of the file among those of the layout."""
    pairs = list_kind_cut_pairs(step_layout, layout)
    codes = np.zeros(len(pairs), dtype=np.uint64)
    for index, (kind, cut) in enumerate(pairs):
        tensor, rectangle = step_layout.kinds[kind], layout.cuts[cut]
        codes[index] = hash_row_form(
            (tensor.dtype, tensor.shape, tuple(rectangle.offsets[member].tolist()), rectangle.shape)
        )
    numbers = np.array([kind * len(layout.cuts) + cut for kind, cut in pairs], dtype=np.int64)
    both = step_layout.kind[layout.tensors] * len(layout.cuts) + layout.cut
    column = np.repeat(codes, len(both)) if len(codes) == 1 else codes[np.searchsorted(numbers, both)]
    return compute_seal(_list_names(step_layout, layout.tensors), column, layout.places)


def _list_names(step_layout: StepLayout, tensors: Integers) -> Sequence[str]:
    names = step_layout.names
    if len(tensors) == len(names) and bool((tensors == np.arange(len(names))).all()):
        return names
    return list(map(names.__getitem__, tensors.tolist()))


def _list_expected(step_layout: StepLayout, layout: SharedLayout, member: int) -> dict[str, list[ExpectedDataset]]:
    """Return the expected properties of each dataset, by name; several entries if its parts are rows of their own."""
    tensors = [step_layout.tensors[index] for index in layout.tensors.tolist()]
    rows = zip(tensors, layout.shapes, layout.offsets, layout.places.tolist(), strict=True)
    expected: dict[str, list[ExpectedDataset]] = {}
    if layout.within is None:
        names = name_datasets(tensor.name for tensor in tensors)
        for name, (tensor, shape, offsets, place) in zip(names, rows, strict=True):
            at = place if prod(shape) else None
            row = ExpectedDataset(tensor.name, tensor.dtype, tensor.shape, tuple(offsets[member].tolist()), shape, at)
            expected.setdefault(name, []).append(row)
        return expected
    for within, (tensor, shape, offsets, place) in zip(layout.within, rows, strict=True):
        start, dataset_shape = within.start, within.shape
        strides = [prod(dataset_shape[dim + 1 :]) for dim in range(len(dataset_shape))]
        first = sum(at * stride for at, stride in zip(start, strides, strict=True))
        if not _is_contiguous(shape, dataset_shape):
            raise CheckpointError(f"tensor {tensor.name!r}: a piece of it is not in one row of bytes of its dataset")
        offset = tuple(at - by for at, by in zip(offsets[member].tolist(), start, strict=True))
        begin = place - first * choose_minimum_itemsize(tensor.dtype) if prod(shape) else None
        row = ExpectedDataset(tensor.name, tensor.dtype, tensor.shape, offset, dataset_shape, begin)
        expected.setdefault(dataset_name(tensor.name, within.number), []).append(row)
    return expected


def _is_contiguous(part: tuple[int, ...], full_shape: tuple[int, ...]) -> bool:
    """Return whether a rectangle of a row-major array is one contiguous run of its bytes."""
    dim = next((dim for dim, size in enumerate(part) if size > 1), len(part))
    return part[dim + 1 :] == full_shape[dim + 1 :]


def _compare(
    expected: dict[str, list[ExpectedDataset]],
    datasets: dict[str, ParsedDataset],
    parts: PartTable | None,
    complete: bool,
) -> None:
    """Raise CheckpointError if datasets differ from the expected ones.

    complete: the file must have no other datasets.
    """
    if complete and len(datasets) != len(expected):
        raise CheckpointError(f"it has {len(datasets)} datasets, the manifest says {len(expected)}")
    for name, rows in expected.items():
        dataset = datasets.get(_as_stored(name))
        for row in rows:
            if dataset is None:
                raise CheckpointError(f"tensor {row.tensor!r}: it has no such dataset")
            if (row.dtype, row.global_shape, row.offset, row.shape) != (
                dataset.dtype,
                dataset.global_shape,
                dataset.offset,
                dataset.shape,
            ):
                raise CheckpointError(f"tensor {row.tensor!r}: its dataset is of another type, shape or offset")
            if choose_minimum_itemsize(row.dtype) != dataset.itemsize and choose_minimum_itemsize(row.dtype) != 1:
                raise CheckpointError(f"tensor {row.tensor!r}: its dataset has elements of another size")
            if row.place is not None:
                _check_place(row, dataset, parts)


def _as_stored(name: str) -> str:
    return name.encode().decode("utf-8", "surrogateescape")


def _check_place(row: ExpectedDataset, dataset: ParsedDataset, parts: PartTable | None) -> None:
    if row.place is None:
        return
    if parts is None:
        if dataset.place != row.place:
            raise CheckpointError(f"tensor {row.tensor!r}: its dataset is at byte {dataset.place}, not {row.place}")
        return
    size = prod(row.shape) * dataset.itemsize
    spans, stored, chunk_bytes = [(0, size)], [(dataset.place, size, _MASKED)], 0
    if dataset.chunk is not None:
        spans = list(iterate_chunk_spans(dataset.shape, dataset.itemsize, dataset.chunk, len(dataset.chunks)))
        stored = [(chunk.at, chunk.stored, chunk.mask) for chunk in dataset.chunks]
        chunk_bytes = prod(dataset.chunk) * dataset.itemsize
    # The parts of a dataset are consecutive, because parts are in the order of the image.
    first = int(np.searchsorted(parts["begin"], row.place))
    chunk_places, forms = [], set()
    for begin, length, at, stored_bytes, inflated, item in parts[first : first + len(spans)].tolist():
        chunk_places.append(((begin - row.place, length), (at, stored_bytes, _UNMASKED if inflated else _MASKED)))
        forms |= {(inflated, item)} if inflated else set()
    if chunk_places != list(zip(spans, stored, strict=True)) or forms - {(chunk_bytes, dataset.itemsize)}:
        raise CheckpointError(f"tensor {row.tensor!r}: its chunks do not lie where the table of parts says")
