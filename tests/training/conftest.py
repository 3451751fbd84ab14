"""A small token store. torch._dynamo is imported here and not by every forked rank at its first optimizer step, which
takes seconds."""

import json
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401
from token_stores import build_store


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the source of the standard library's json package as a token store of bytes."""
    path = tmp_path_factory.mktemp("store") / "json.h5"
    build_store([str(Path(json.__file__).parent)], [".py"], "byte", 256, path)
    return path
