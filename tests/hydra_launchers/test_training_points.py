"""Our own training as a Hydra application, as a user writes it: the loss comes back to whoever sweeps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpc_train.training.records.run_records import read_metrics

APPLICATION = """
import hydra
from hpc_train.launch.callables.training_function import register, train

register()

@hydra.main(version_base="1.3", config_path="pkg://hpc_train.conf", config_name="config")
def main(config):
    loss = train(config)
    print("loss", repr(loss))
    return loss

if __name__ == "__main__":
    main()
"""
TINY = (
    *("model.layers=1", "model.hidden=32", "model.heads=2", "model.kv_heads=1", "train.sequence_length=32"),
    *("train.steps=2", "train.eval_every=0", "train.tensorboard=false", "train.global_batch=4", "train.micro_batch=2"),
    "checkpoint=none",
)


def test_two_ranks_train_a_point_and_its_loss_comes_back(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APPLICATION)
    words = ("-m", "hydra/launcher=hpc_local", "hydra.launcher.ranks=2", "hydra.sweep.dir=sweep", "optim.lr=0.01")
    done = subprocess.run(
        [sys.executable, "app.py", *words, *TINY], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    logs = {path.name: path.read_text() for path in (tmp_path / "sweep/.submitit").glob("*_log.out")}
    assert done.returncode == 0, done.stdout + done.stderr + "".join(logs.values())
    steps = read_metrics(tmp_path / "sweep/0/run/metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2]
    assert len(logs) == 2
    for log in logs.values():
        assert f"loss {steps[-1]['loss']!r}" in log


WARNING_MODEL = """
import logging
import torch
from hpc_train.models.registry import register


@register("warns")
class Warns(torch.nn.Module):
    def __init__(self, config=None, **_):
        super().__init__()
        self.embedding = torch.nn.Embedding(300, 8)
        self.head = torch.nn.Linear(8, 300)
        logging.getLogger("hpc_train.models").warning("this model has seen something")

    def forward(self, tokens):
        return self.head(self.embedding(tokens))
"""


@pytest.mark.long  # test_local_points has it without a training
def test_what_ranks_warn_of_is_said_once_for_all_points(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APPLICATION)
    (tmp_path / "warning_model.py").write_text(WARNING_MODEL)
    words = ("-m", "hydra/launcher=hpc_local", "hydra.launcher.ranks=1", "hydra.sweep.dir=sweep", "optim.lr=0.01,0.02")
    model = ("model=custom", "model.module=warning_model", "model.name=warns", *TINY[5:])
    done = subprocess.run(
        [sys.executable, "app.py", *words, *model], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "has seen something" in line]
    assert line.endswith("#0, #1: warning: this model has seen something")
