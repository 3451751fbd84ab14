"""Run a part of a matrix in `make test`, and all of it in `make test-long`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def draw(names: Iterable[Any], drawn: Iterable[Any]) -> list[Any]:
    """Return parameters for pytest, all of which but `drawn` are long tests."""
    names, drawn = list(names), set(drawn)
    assert drawn <= set(names), drawn - set(names)
    return [pytest.param(name, id=str(name), marks=() if name in drawn else pytest.mark.long) for name in names]


def runs_long_tests(session: pytest.Session) -> bool:
    """Return whether this session runs long tests. If it does, a fixture of many cases prepares all of them."""
    return any(item.get_closest_marker("long") for item in session.items)


def draw_every(names: Iterable[Any], period: int) -> list[Any]:
    """Draw the first of each `period` names: for lists in which neighbours are alike."""
    listed = list(names)
    return draw(listed, listed[::period])


def draw_thirds(cases: Iterable[Any]) -> list[Any]:
    """Return parameters (case, third) for a loop over calls or drawn cases: third 0, 1 or 2 runs each third of them.

    The next case has another third in `make test`; the others are long tests.
    """
    return [
        pytest.param(case, third, id=f"{case}-{third}", marks=() if third == number % 3 else pytest.mark.long)
        for number, case in enumerate(cases)
        for third in range(3)
    ]
