"""One small text for the real runs of the folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from token_stores import build_store


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 60 kB of real text as a token store."""
    out = tmp_path_factory.mktemp("text") / "text.h5"
    build_store([str(Path(json.__file__).parent)], [".py"], "byte", 256, out)
    return out
