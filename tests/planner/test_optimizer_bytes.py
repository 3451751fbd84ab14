"""The optimizer's state that the planner counts is the one that a rank holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpc_train.config.compose import compose
from hpc_train.interfaces import World
from hpc_train.models.registry import build_model
from hpc_train.parallel.apply import build
from hpc_train.planner.model.from_config import jobs_from_config
from hpc_train.testing import run_ranks
from hpc_train.training.optimizer import make_optimizer


@pytest.mark.parametrize(
    "overrides",
    [
        "optim=adamw",
        "optim=muon",
        "optim=sgd",
        "optim=sgd optim.sgd.momentum=0",
        "optim=adafactor",
        "optim=muon optim.ema.decay=0.9",
        "optim=schedule_free",
        "optim.state=8bit optim.block_size=64",
        "optim.state=8bit optim.block_size=128 model.hidden=192 model.heads=4 model.feed_forward=256",
        "optim.state=8bit optim.block_size=32 model=llama_moe_tiny",
    ],
)
def test_bytes_of_optimizer_state(overrides: str) -> None:
    config = compose([*overrides.split(), "launch.ranks=1"])

    def count(world: World) -> int:
        with torch.device("meta"):
            model = build_model(config.model)
        engine = build(model, lambda split: make_optimizer(split, config.optim, world), config, world)
        return sum(shard.local.nbytes for shard in engine.shards() if shard.name.startswith("optim."))

    (counted,) = run_ranks(count, 1, parallel=config.parallel)
    jobs = jobs_from_config(config, 1)
    state = float((jobs.optimizer_bytes * jobs.parameters).item())
    weights = float((jobs.weight_bytes * jobs.parameters).item())
    np.testing.assert_allclose(counted, state, atol=0.02 * weights)
