"""Find the distinct combinations of columns, so that what is slow to compute is computed once for each."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpc_train.planner.model.jobs import Jobs, job_columns

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

_TABLE_SIZE = 1 << 17
"""Whole numbers in a range of at most this size are numbered with a table of that size, which is faster than sorting
thousands of them."""
_MIN_JOBS = 256
"""Finding distinct ones among fewer jobs takes longer than computing all of them."""


def find_distinct_jobs(jobs: Jobs, without: frozenset[str]) -> tuple[Jobs, NDArray[np.intp]] | None:
    """Return the jobs that differ in other columns than `without`, and the index of each of the n jobs among them.

    The columns `without` become NaN, so that a result that depends on one is no number. None if it would not be faster.
    """
    vary = {name: column for name, column in job_columns(jobs).items() if column.size > 1}
    if any(column.ndim != 1 for column in vary.values()) or jobs.n < _MIN_JOBS:
        return None
    names = [name for name in vary if name not in without]
    if not names:
        return None
    keys, index = find_distinct(np.stack([vary[name] for name in names]))
    nothing = dict.fromkeys(vary.keys() & without, np.full((), np.nan))
    return replace(jobs, **nothing, **dict(zip(names, keys, strict=True))), index


def take_columns(rows_of_columns: T, index: NDArray[np.intp]) -> T:
    """Return a dataclass of columns with the rows `index` of each; a column with one value stays as it is."""
    columns = {field.name: getattr(rows_of_columns, field.name) for field in fields(rows_of_columns)}
    return replace(
        rows_of_columns, **{name: column[index] if column.size > 1 else column for name, column in columns.items()}
    )


def find_distinct(values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.intp]]:
    """Return the distinct columns of values [k, n], and the index of each of the n columns among them.

    np.unique along an axis does the same, but sorts whole columns, which takes many times as long.
    """
    codes, size = np.zeros(values.shape[1], np.intp), 1
    for row in values:
        if row.size and row.min() != row.max():
            count, code = _number(row)
            if size * count > _TABLE_SIZE:
                size, codes = _number(codes)
            codes, size = codes * count + code, size * count
    count, index = _number(codes)
    example = np.empty(count, np.intp)
    example[index] = np.arange(len(index))
    return values[:, example], index


def _number(values: NDArray[Any]) -> tuple[int, NDArray[np.intp]]:
    """Number the distinct values from 0 in ascending order: (how many there are, the number of each value)."""
    if not values.size:
        return 0, np.empty(0, np.intp)
    lowest = values.min()
    if values.max() - lowest < _TABLE_SIZE:
        steps = (values - lowest).astype(np.intp)
        if np.array_equal(steps + lowest, values):
            present = np.zeros(int(steps.max()) + 1, np.bool_)
            present[steps] = True
            numbers = np.cumsum(present) - 1
            return int(numbers[-1]) + 1, numbers[steps]
    different, index = np.unique(values, return_inverse=True)
    return len(different), index
