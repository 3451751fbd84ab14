"""A sweeper that decides by what the points return: Optuna's, over hydra/launcher=hpc_local."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from omegaconf import OmegaConf

APPLICATION = """
import hydra

@hydra.main(version_base="1.3", config_path=".", config_name="config")
def main(config):
    return (config.x - 3.0) ** 2

if __name__ == "__main__":
    main()
"""
CONFIG = """
defaults: [_self_, {override hydra/sweeper: optuna}, {override hydra/launcher: hpc_local}]
x: 0.0
hydra:
  sweep: {dir: sweep}
  sweeper: {n_trials: 6, n_jobs: 2, sampler: {seed: 4}, params: {x: "interval(-10, 10)"}}
"""


def test_optuna_finds_what_the_points_returned(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APPLICATION)
    (tmp_path / "config.yaml").write_text(CONFIG)
    done = subprocess.run([sys.executable, "app.py", "-m"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    tried = [float(OmegaConf.load(tmp_path / f"sweep/{index}/.hydra/config.yaml").x) for index in range(6)]
    found = OmegaConf.load(tmp_path / "sweep/optimization_results.yaml")
    values = [(x - 3.0) ** 2 for x in tried]
    assert found.best_value == min(values)
    assert found.best_params.x == tried[values.index(min(values))]
    assert min(values) < min(values[:2]), "later batches know of the first"
