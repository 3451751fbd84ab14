"""What a run's checkpoints say of its code and config, and what a run that goes on from other code says of that."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest
from training_runs import SMALL, run

from hpc_train.checkpoint.format.manifest import read_manifest
from hpc_train.checkpoint.provenance import Origin, identify_code
from hpc_train.config.compose import compose
from hpc_train.config.run import RunConfig

MODEL = """
from torch import nn
from hpc_train.models import register

@register("narrow")
class Narrow(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(256, 8), nn.Linear(8, 256))
"""


@pytest.fixture
def config(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """Two steps of a user's own model, which is in a file of its own."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "narrow_model.py").write_text(MODEL)
    general = [it for it in SMALL if not it.startswith(("model.", "train.steps"))]
    own = ["model=custom", "model.name=narrow", "model.module=narrow_model", "checkpoint.every=1", "train.steps=3"]
    return compose([*general, *own, f"data.path={store}", f"run_dir={tmp_path / 'run'}"])


def notes(config: RunConfig) -> list[str]:
    """What the run said of other code."""
    events = [json.loads(line) for line in (Path(str(config.run_dir)) / "events.jsonl").read_text().splitlines()]
    return [event["text"] for event in events if event["event"] == "note" and "other code" in event["text"]]


def test_code_config_model_and_attempt(config: RunConfig, tmp_path: Path) -> None:
    run(config, asked={0: 2})
    step, model = tmp_path / "run/checkpoints/step-2", (tmp_path / "narrow_model.py").read_bytes()
    frozen = (tmp_path / "run/config.yaml").read_bytes()
    expected = Origin(*identify_code(), sha256(frozen).hexdigest(), sha256(model).hexdigest(), attempt=0)
    assert read_manifest(step, 2).origin == expected
    run(config)
    assert notes(config) == [], "it went on with the same code"
    last = read_manifest(tmp_path / "run/checkpoints/step-3", 3)
    assert last.origin is not None
    assert last.origin.attempt == 1


def test_a_run_that_goes_on_with_other_code_says_so_and_goes_on(config: RunConfig, tmp_path: Path) -> None:
    run(config, asked={0: 2})
    (tmp_path / "narrow_model.py").write_text(MODEL + "# mended\n")
    assert [ended.step for ended in run(config)] == [3, 3]
    before, after = (sha256(text.encode()).hexdigest()[:12] for text in (MODEL, MODEL + "# mended\n"))
    assert notes(config) == [
        f"the checkpoint was saved by other code: now the model's file {after} in place of {before}"
    ]
