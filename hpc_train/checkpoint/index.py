"""index.h5: every logical tensor of a step as one HDF5 dataset, a view (VDS) of the shard files beside it.

For people and their tools, never for loading: HDF5 shows zeros where a shard file is missing. It holds no data, its
file names are relative, and it can be made again from the manifest at any time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5a, h5d, h5p, h5s, h5t

from hpc_train.checkpoint.dtypes import dtype_of, hdf5_type
from hpc_train.checkpoint.errors import Problem, one_line
from hpc_train.checkpoint.files import sync_directory, write_file
from hpc_train.checkpoint.holdings import Layout, Tensor
from hpc_train.checkpoint.image import dataset_name, dataset_names, nameless, open_hdf5
from hpc_train.checkpoint.manifest import Manifest
from hpc_train.checkpoint.rectangle import Rectangle

INDEX = "index.h5"
Tell = Callable[[int], object]
ORDINARY = 20_000
"""Mappings up to which a save writes it: 20 microseconds and 80 bytes each."""
_ORDINARY_TENSORS = 4_000
"""And tensors: some 150 microseconds and 400 bytes each."""


@dataclass(frozen=True)
class Mapping:
    """A part of a logical tensor and the dataset that holds it."""

    file: str
    dataset: str
    rectangle: Rectangle
    start: tuple[int, ...]
    """Where it begins in the dataset."""
    of: tuple[int, ...] = field(default=(), compare=False)
    """Shape of the dataset; an index does not tell it."""


def mappings(manifest: Manifest) -> int:
    """How many an index needs."""
    return sum(len(layout.files) * len(layout.tensors) for layout in manifest.holdings.layouts)


def is_ordinary(manifest: Manifest) -> bool:
    """Whether a save writes one."""
    return mappings(manifest) <= ORDINARY and len(manifest.holdings.tensors) <= _ORDINARY_TENSORS


def index_image(manifest: Manifest, tell: Tell = lambda done: None) -> bytes:
    """The content of index.h5. Raises CheckpointError, or OSError, where there is no room for a small file.

    tell: is called with the tensors that are done.
    """

    def fill(path: Path) -> None:
        tensors = manifest.holdings.tensors
        of_tensor = _mapped(manifest)
        with open_hdf5(path, "w", interval=1) as file:
            for dataset, tensor in zip(dataset_names(it.name for it in tensors), tensors, strict=True):
                _create(file, dataset, tensor, of_tensor[tensor.name])
                tell(1)

    with nameless(fill) as (_, content):
        return content.read()


def write_index(path: Path, manifest: Manifest, tell: Tell = lambda done: None) -> Path:
    """Make the index of the step in `path`, or make it again; returns its file. Raises as index_image does."""
    target = path / INDEX
    beside = path / f".{INDEX}.{os.getpid()}"
    beside.unlink(missing_ok=True)
    try:
        write_file(beside, index_image(manifest, tell))
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)
    sync_directory(path)
    return target


def index_problem(path: Path, manifest: Manifest) -> Problem | None:
    """What is wrong with the index of a step, compared with its manifest; a step without one is as good."""
    if not (path / INDEX).exists():
        return None
    try:
        with h5py.File(path / INDEX, "r", locking=False) as file:
            return _difference(file, manifest)
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        return Problem(INDEX, f"it cannot be read: {one_line(error)}")


def _mapped(manifest: Manifest) -> dict[str, list[Mapping]]:
    """The mappings of every tensor, those without elements left out."""
    found: dict[str, list[Mapping]] = {tensor.name: [] for tensor in manifest.holdings.tensors}
    for layout in manifest.holdings.layouts:
        tensors = [manifest.holdings.tensors[index].name for index in layout.tensors]
        files = [manifest.files[index].name for index in layout.files]
        rows = zip(tensors, _datasets(layout, tensors), layout.shapes, layout.offsets, strict=True)
        for tensor, (dataset, start, of), shape, offsets in rows:
            if 0 not in shape:
                places = zip(files, offsets.tolist(), strict=True)
                found[tensor] += [Mapping(file, dataset, Rectangle(tuple(at), shape), start, of) for file, at in places]
    return found


def _datasets(layout: Layout, tensors: list[str]) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Of every row the name of its dataset, where it begins in it, and the shape of the dataset."""
    if layout.within is None:
        rows = zip(dataset_names(tensors), layout.shapes, strict=True)
        return [(name, (0,) * len(shape), shape) for name, shape in rows]
    parts = zip(tensors, layout.within, strict=True)
    return [(dataset_name(tensor, it.number), it.start, it.shape) for tensor, it in parts]


def _create(file: Any, name: str, tensor: Tensor, parts: list[Mapping]) -> None:
    creation, link = h5p.create(h5p.DATASET_CREATE), h5p.create(h5p.LINK_CREATE)
    link.set_char_encoding(h5t.CSET_UTF8)
    creation.set_obj_track_times(False)
    whole = _space(tensor.shape)
    if parts:
        creation.set_layout(h5d.VIRTUAL)
    for part in parts:
        if tensor.shape:
            whole.select_hyperslab(part.rectangle.offset, part.rectangle.shape)
        source = _space(part.of)
        if part.of != part.rectangle.shape:
            source.select_hyperslab(part.start, part.rectangle.shape)
        creation.set_virtual(whole, _literal(part.file), _literal(part.dataset), source)
    kind = hdf5_type(dtype_of(tensor.dtype))
    dataset = h5d.create(file.id, name.encode(), kind, _space(tensor.shape), creation, link)
    text = np.array(tensor.dtype.encode())
    # by h5py's own way to set an attribute this would take longer than all the rest
    h5a.create(dataset, b"torch_dtype", h5t.py_create(text.dtype), h5s.create(h5s.SCALAR)).write(text)


def _literal(name: str) -> bytes:
    """HDF5 takes a name with % in it for a pattern of many names."""
    return name.replace("%", "%%").encode()


def _space(shape: tuple[int, ...]) -> Any:
    return h5s.create_simple(shape) if shape else h5s.create(h5s.SCALAR)


def _difference(file: Any, manifest: Manifest) -> Problem | None:
    tensors = manifest.holdings.tensors
    names = dataset_names(it.name for it in tensors)
    if set(file) != set(names):
        return Problem(INDEX, f"it has {len(file)} tensors that are not the {len(names)} of the manifest")
    of_tensor = _mapped(manifest)
    for name, tensor in zip(names, tensors, strict=True):
        expected = hdf5_type(dtype_of(tensor.dtype))
        dataset = file[name]
        if dataset.shape != tensor.shape or dataset.id.get_type() != expected:
            return Problem(INDEX, "its shape or its type is not that of the manifest", tensor=tensor.name)
        if set(_views(dataset)) != set(of_tensor[tensor.name]):
            return Problem(INDEX, "it does not show the parts that the manifest names", tensor=tensor.name)
    return None


def _views(dataset: Any) -> Iterator[Mapping]:
    for source in dataset.virtual_sources() if dataset.is_virtual else ():
        begin, last = source.vspace.get_select_bounds() if dataset.shape else ((), ())
        shape = tuple(int(b) - int(a) + 1 for a, b in zip(begin, last, strict=True))
        file, name = (text.replace("%%", "%") for text in (source.file_name, source.dset_name))
        is_all = source.src_space.get_select_type() == h5s.SEL_ALL
        start = (0,) * len(shape) if is_all else _ints(source.src_space.get_select_bounds()[0])
        yield Mapping(file, name, Rectangle(_ints(begin), shape), start)


def _ints(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)
