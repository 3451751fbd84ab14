"""A token store and a model that are so small that a benchmark takes seconds, and ranks without a new interpreter."""

import subprocess
from pathlib import Path

import pytest
from forked_programs import popen_by_fork

from hpc_train.config.model import TokenDataConfig
from hpc_train.data.corpus.build import ensure_store


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the overrides of a tiny run."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "text.txt").write_text("the order of the samples is a pure function of the seed\n" * 2000)
    config = TokenDataConfig(name="tiny", sources=[str(folder / "text.txt")], cache=str(folder / "cache"))
    store: Path = ensure_store(config)
    model = ["model.layers=2", "model.hidden=32", "model.heads=4", "model.kv_heads=2", "model.feed_forward=64"]
    return [*model, f"data.path={store}", "train.sequence_length=32", "train.global_batch=8", "train.micro_batch=4"]


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a benchmark that is called in this process start its ranks by forks, for a test of what they measure.

    That ranks start as interpreters of their own is tested by those who call the command.
    """
    monkeypatch.setattr(subprocess, "Popen", popen_by_fork)
