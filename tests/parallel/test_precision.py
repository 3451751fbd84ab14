"""bf16: parameters, optimizer state and reductions in float32, computation in bfloat16."""

from __future__ import annotations

import numpy as np
import pytest
from drawn import draw
from outcome import Outcome, assert_close, engine_steps, reference, whole
from plain_setup import LAYOUTS, engine_of

from hpc_train.config.run import RunConfig
from hpc_train.interfaces import World
from hpc_train.testing import run_ranks

RELATIVE = 2**-8
"""Half a unit in the last place of bfloat16, relative."""


def _one_step(world: World, config: RunConfig) -> tuple[Outcome, set[str]]:
    engine = engine_of("untied", config, world)
    outcome = engine_steps(engine, world, config, "untied", "two", (0,))
    return outcome, {str(piece.dtype) for piece in engine.shards()}


@pytest.mark.parametrize("name", draw(["ddp-2", "zero3-2", "hsdp-2x2"], ["ddp-2", "zero3-2"]))
@pytest.mark.parametrize(("precision", "loss", "gradient"), [("fp32", 1e-6, 1e-5), ("bf16", RELATIVE, 16 * RELATIVE)])
def test_low_precision_stays_within_its_rounding(name: str, precision: str, loss: float, gradient: float) -> None:
    """Tolerances: one rounding for the mean loss; for gradients those of a dozen operations in a row."""
    config = LAYOUTS[name].config(f"precision={precision}")
    truth = reference("untied", config, (0,))
    ranks = run_ranks(_one_step, LAYOUTS[name].ranks, config, parallel=config.parallel)
    for rank, dtypes in ranks:
        assert dtypes == {"torch.float32"}
        np.testing.assert_allclose(rank.losses, truth.losses, rtol=loss)
        np.testing.assert_allclose(rank.norms, truth.norms, rtol=gradient)
    gradients = whole([rank.gradients[0] for rank, _ in ranks])
    assert_close(gradients, whole([truth.gradients[0]]), gradient)


@pytest.mark.parametrize("name", ["ddp-2", "zero3-2"])
def test_bf16_does_compute_in_bf16(name: str) -> None:
    """The gradient differs from the exact one by more than float32 could."""
    config = LAYOUTS[name].config("precision=bf16")
    truth = reference("untied", config, (0,))
    ranks = run_ranks(_one_step, LAYOUTS[name].ranks, config, parallel=config.parallel)
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(whole([rank.gradients[0] for rank, _ in ranks]), whole([truth.gradients[0]]), 1e-4)
