"""Checkpoints that are sound and still no good: NaN or infinity in the state, or marked bad by somebody.

They can be loaded by their step, are passed over by checkpoint.resume=auto, and retention does not count them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf, isfinite, prod
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_train.checkpoint.catalogue import locate
from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.files import sync_directory, write_file
from hpc_train.checkpoint.holdings import Held
from hpc_train.checkpoint.manifest import Manifest
from hpc_train.regular_files import NotRegularError, read_regular

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MARK = "bad"
"""File in the directory of a step that is marked; its text is the reason."""
_PADDING = 4096
_REASON = 64 << 10
"""Maximum bytes of a reason."""


def mark_bad(directory: Path, step: int, why: str) -> None:
    """Mark a committed step: checkpoint.resume=auto no longer takes it. A mark that is there is replaced.

    Raises UserError if the step is not there, CheckpointError if the mark cannot be written.
    """
    path = locate(directory, step)
    beside = path / f".{MARK}-{os.getpid()}"
    try:
        beside.unlink(missing_ok=True)
        write_file(beside, (" ".join(why.split()) + "\n").encode())
        beside.replace(path / MARK)
        sync_directory(path)
    except OSError as error:
        raise CheckpointError(f"checkpoint step {step} in {directory} was not marked: {error.strerror}") from error


def unmark(directory: Path, step: int) -> None:
    """Take the mark away, if there is one. Raises as `mark_bad`."""
    path = locate(directory, step)
    try:
        (path / MARK).unlink(missing_ok=True)
        sync_directory(path)
    except OSError as error:
        raise CheckpointError(f"the mark of step {step} in {directory} was not removed: {error.strerror}") from error


def poison_of(path: Path, manifest: Manifest | None) -> str | None:
    """Why a step is not to be gone on from; None if nothing speaks against it.

    path: of the directory of the step. Raises OSError if it cannot be seen whether there is a mark.
    """
    try:
        return f"is marked bad: {mark_of(path)}"
    except FileNotFoundError:
        return None if manifest is None or manifest.finite else "has NaN or infinity in it, or in the loss"


def mark_of(path: Path) -> str:
    """Return why a step is marked bad. Raises FileNotFoundError if it is not, OSError if that cannot be determined."""
    try:
        return read_regular(path / MARK, _REASON).decode("utf-8", "replace").strip()
    except NotRegularError as error:
        return str(error.strerror)  # whatever it is, somebody has put it there


@dataclass(frozen=True)
class Span:
    """Adjacent tensors of one dtype; `rows` are (byte, elements) of each."""

    dtype: torch.dtype
    begin: int
    rows: list[tuple[int, int]]

    @property
    def end(self) -> int:
        at, count = self.rows[-1]
        return at + count * self.dtype.itemsize


def all_finite(memory: memoryview, found: Iterable[Span]) -> bool:
    """Whether no tensor of a shard's image has a NaN or an infinity.

    A mask, of nothing above zero and -inf, is none. One pass at the speed of memory: the least and the greatest element
    are NaN if any is, and infinite if one is; neighbours of one dtype are looked at together.
    """
    return all(_is_finite(memory, span) for span in found)


def spans(memory: memoryview, held: Held) -> Iterator[Span]:
    """What of an image can have a NaN, in the order of the file. The bytes between tensors must be there already."""
    span: Span | None = None
    for dtype, begin, count in _floating(held):
        if span is not None and span.dtype is dtype and _joins(memory, span, begin):
            span.rows.append((begin, count))
            continue
        if span is not None:
            yield span
        span = Span(dtype, begin, [(begin, count)])
    if span is not None:
        yield span


def _floating(held: Held) -> list[tuple[torch.dtype, int, int]]:
    """(dtype, byte, elements) of every tensor that can have a NaN, in the order of the file."""
    found = [
        (row.dtype, place, prod(row.local_shape))
        for row, place in zip(held.rows, held.places, strict=True)
        if row.dtype.is_floating_point or row.dtype.is_complex
    ]
    return sorted((it for it in found if it[2]), key=lambda it: it[1])


def _joins(memory: memoryview, span: Span, begin: int) -> bool:
    """Nothing but a little padding lies between."""
    gap = begin - span.end
    whole = (begin - span.begin) % span.dtype.itemsize == 0
    return whole and 0 <= gap < _PADDING and memory[span.end : begin] == bytes(gap)


def _is_finite(memory: memoryview, span: Span) -> bool:
    if is_harmless(elements(memory, span.dtype, span.begin, (span.end - span.begin) // span.dtype.itemsize), False):
        return True
    return all(is_harmless(elements(memory, span.dtype, at, count), True) for at, count in span.rows)


def is_harmless(values: Tensor, mask: bool) -> bool:
    """Whether there is neither NaN nor infinity among them; mask: or nothing above zero and -inf."""
    if isfinite(float(values.sum())):  # half the work; it can overflow, and NaN and infinity are never lost in it
        return True
    least, greatest = (float(it) for it in values.aminmax())
    if mask and least == -inf and greatest <= 0:
        return True
    return abs(least) < inf and abs(greatest) < inf  # false for NaN


def elements(memory: memoryview, dtype: torch.dtype, begin: int, count: int) -> Tensor:
    """So many of them, from a byte of an image on, in a dtype that can be compared."""
    import torch

    values = torch.frombuffer(memory, dtype=dtype, count=count, offset=begin)
    if dtype.is_complex:
        return torch.view_as_real(values)
    return values.float() if dtype.itemsize == 1 else values
