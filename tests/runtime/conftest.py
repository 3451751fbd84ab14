"""Shared by the tests of the runtime: they open job stores in this process."""

import pytest


@pytest.fixture(autouse=True)
def _let_gloo_ask_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a job store sets this variable for as long as its process runs; here it ends with the test."""
    monkeypatch.setenv("GLOO_ENABLE_STORE_V2_API", "1")
