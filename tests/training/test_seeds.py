"""Random numbers are a function of (seed, step, share of the batch), whatever was drawn before."""

import os
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.interfaces import World
from hpc_train.testing import run_ranks
from hpc_train.training.optimizer import require_determinism, seed_step

SEEDS = st.integers(0, (1 << 63) - 1)


def _draws(seed: int, step: int, index: int) -> tuple[float, float, float]:
    seed_step(seed, step, index)
    return torch.rand(()).item(), float(np.random.rand()), random.random()


@given(seed=SEEDS, step=st.integers(0, 1 << 40), index=st.integers(0, 1 << 20), used=st.integers(0, 5))
def test_seeding_is_a_pure_function(seed: int, step: int, index: int, used: int) -> None:
    first = _draws(seed, step, index)
    torch.rand(used), np.random.rand(used), [random.random() for _ in range(used)]
    assert _draws(seed, step, index) == first


def test_every_argument_matters() -> None:
    drawn = {_draws(*key) for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1 << 62, 0, 0), (0, 1 << 33, 0)]}
    assert len({torch_draw for torch_draw, _, _ in drawn}) == 6
    assert len({numpy_draw for _, numpy_draw, _ in drawn}) == 6
    assert len({python_draw for _, _, python_draw in drawn}) == 6


def unpool_deterministically(_world: World) -> tuple[str, str]:
    """Return the error of an operation that has no deterministic version, and the setting of cuBLAS."""
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    require_determinism()
    with pytest.raises(RuntimeError) as refused:
        torch.nn.functional.max_unpool2d(torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1, dtype=torch.long), 2)
    return str(refused.value), os.environ["CUBLAS_WORKSPACE_CONFIG"]


def test_deterministic_mode_refuses_what_is_not_reproducible() -> None:
    """In a process of its own, since the mode is global."""
    ((refused, workspace),) = run_ranks(unpool_deterministically, 1)
    assert "deterministic" in refused
    assert workspace == ":4096:8"
