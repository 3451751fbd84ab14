"""One small text and one uninterrupted run for all tests of the folder, and a place for each test's jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import LONG, Workshop
from token_stores import build_store


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 60 kB of real text as a token store."""
    out = tmp_path_factory.mktemp("text") / "text.h5"
    build_store([str(Path(json.__file__).parent)], [".py"], "byte", 256, out)
    return out


@pytest.fixture
def workshop(tmp_path: Path, store: Path) -> Iterator[Workshop]:
    """The jobs of one test, none of which outlives it."""
    place = Workshop(tmp_path, store)
    yield place
    place.clean()


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Path:
    """The run directory of LONG, trained from the first to the last step without an interruption."""
    place = Workshop(tmp_path_factory.mktemp("uninterrupted"), store)
    ended = place.train("run", *LONG)
    place.clean()
    assert ended.code == 0, ended
    return place.folder / "run"
