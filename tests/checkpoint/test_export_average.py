"""Exports of the average of the weights: what the average is in the step, under the names of the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hpc_train.checkpoint import save_step
from hpc_train.cli.main import main
from hpc_train.config.compose import compose
from hpc_train.interfaces import World
from hpc_train.parallel.optimizer_step import OptimizerUpdates
from hpc_train.testing import run_ranks


def _save(world: World, folder: Path, decay: float | None) -> dict[str, list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[1].requires_grad_(False)
    ema = compose([f"optim.ema.decay={decay}"] if decay else []).optim.ema
    trained = [p for p in model.parameters() if p.requires_grad]
    updates, expected = OptimizerUpdates([model], torch.optim.AdamW(trained), world, ema=ema), {}
    for update in range(3):
        model(torch.ones(4, 3) * update).square().sum().backward()
        updates.update(0.1)
        for name, p in model.named_parameters():
            value = p.detach().clone()
            expected[name] = value if update == 0 or decay is None else decay * expected[name] + (1 - decay) * value
    save_step(folder, 3, updates.shards(), {}, world).wait()
    return {name: value.flatten().tolist() for name, value in expected.items()}


def test_average_in_place_of_the_weights(tmp_path: Path) -> None:
    (expected,) = run_ranks(_save, 1, tmp_path / "steps", 0.5)
    out = tmp_path / "out"
    words = ["checkpoint", "export", str(tmp_path / "steps"), str(out), "--format", "safetensors", "--average"]
    assert main(words) == 0
    found = {key: value for file in out.glob("*.safetensors") for key, value in load_file(file).items()}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].flatten().tolist() == pytest.approx(value, rel=1e-6), name


def test_a_step_without_an_average_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(_save, 1, tmp_path / "steps", None)
    words = ["checkpoint", "export", str(tmp_path / "steps"), str(tmp_path / "out"), "--format", "dcp", "--average"]
    assert main(words) == 2
    said = capsys.readouterr().err.strip()
    assert "has no average of the weights; train with optim.ema.decay=0.999, or take the trained ones" in said
    assert "\n" not in said
    assert not (tmp_path / "out").exists()
