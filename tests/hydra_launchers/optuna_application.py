"""An application whose points return a number, swept by Optuna with one of our launchers."""

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
defaults: [_self_, {{override hydra/sweeper: optuna}}, {{override hydra/launcher: {launcher}}}]
x: 0.0
hydra:
  sweep: {{dir: sweep}}
  sweeper: {{n_trials: {trials}, n_jobs: 2, sampler: {{seed: 4}}, params: {{x: "interval(-10, 10)"}}}}
"""


def tried(folder: Path, launcher: str, trials: int, *overrides: str) -> list[float]:
    """Sweep in batches of two and check Optuna's answer; returns the values of x that it tried, in order."""
    (folder / "app.py").write_text(APPLICATION)
    (folder / "config.yaml").write_text(CONFIG.format(launcher=launcher, trials=trials))
    words = [sys.executable, "app.py", "-m", *overrides]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [float(OmegaConf.load(folder / f"sweep/{index}/.hydra/config.yaml").x) for index in range(trials)]
    answer = OmegaConf.load(folder / "sweep/optimization_results.yaml")
    values = [value(x) for x in found]
    assert answer.best_value == min(values)
    assert answer.best_params.x == found[values.index(min(values))]
    return found


def value(x: float) -> float:
    """Return what a point returns."""
    return (x - 3.0) ** 2
