"""Which file of a step gets which rectangle of every tensor."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace

from hpc_train.checkpoint.dtypes import dtype_of
from hpc_train.checkpoint.holdings import Tensor
from hpc_train.checkpoint.image import ALIGNMENT, Row
from hpc_train.checkpoint.rectangle import Rectangle


def cut(tensors: Sequence[Tensor], files: int, dim: int) -> list[list[Row]]:
    """The rows of every file: dimension `dim` in parts as even as can be.

    A tensor that has no such dimension, is too short there or too small to be worth it goes whole to the file that has
    least so far.
    """
    rows: list[list[Row]] = [[] for _ in range(files)]
    loads = [(0, index) for index in range(files)]
    for tensor in tensors:
        bytes_of = tensor.rectangle.volume * tensor.itemsize
        if len(tensor.shape) > dim and tensor.shape[dim] >= files and bytes_of >= files * ALIGNMENT:
            for index in range(files):
                rows[index].append(_row(tensor, _part(tensor.rectangle, dim, index, files)))
        else:
            load, index = loads[0]
            rows[index].append(_row(tensor, tensor.rectangle))
            heapreplace(loads, (load + max(1, rows[index][-1].bytes), index))
    return rows


def _part(whole: Rectangle, dim: int, index: int, parts: int) -> Rectangle:
    size = whole.shape[dim]
    begin, end = size * index // parts, size * (index + 1) // parts
    offset, shape = list(whole.offset), list(whole.shape)
    offset[dim], shape[dim] = begin, end - begin
    return Rectangle(tuple(offset), tuple(shape))


def _row(tensor: Tensor, rectangle: Rectangle) -> Row:
    return Row(tensor.name, tensor.shape, dtype_of(tensor.dtype), rectangle.offset, rectangle.shape)
