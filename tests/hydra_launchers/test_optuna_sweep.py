"""A sweeper that decides by what the points return: Optuna's, over hydra/launcher=hpc_local."""

from __future__ import annotations

from pathlib import Path

import pytest
from optuna_application import tried, value


@pytest.mark.long  # `make test` has it on Slurm
def test_optuna_finds_what_the_points_returned(tmp_path: Path) -> None:
    values = [value(x) for x in tried(tmp_path, "hpc_local", 6)]
    assert min(values) < min(values[:2]), "later batches know of the first"
