"""Every choice of conf/parallel trains on the smallest world that it fits, with nothing else said."""

from __future__ import annotations

import pytest
import torch

from hpc_train.config.compose import compose
from hpc_train.config.keys.groups import find_option_files
from hpc_train.config.parallel import compute_smallest_world
from hpc_train.config.run import RunConfig
from hpc_train.interfaces import MicroBatch, StepBatch, World
from hpc_train.launch.freeze import decide_auto_layout
from hpc_train.parallel.rules.check import check_support
from hpc_train.runtime.start import make_another_mesh
from hpc_train.testing import run_ranks
from hpc_train.training.factory import make_engine, make_model

TINY = (
    "model.hidden=32",
    "model.heads=4",
    "model.kv_heads=2",
    "model.feed_forward=64",
    "train.sequence_length=16",
    "train.global_batch=4",
    "train.micro_batch=1",
)
PRESETS = [name for name in find_option_files("parallel") if name != "server"]
"""MPI starts the ranks of servers: tests/parallel/test_server.py."""


def _config(preset: str) -> RunConfig:
    return compose((f"parallel={preset}", *TINY))


def _ranks(preset: str) -> int:
    return max(2, compute_smallest_world(_config(preset).parallel))


def _losses(world: World, presets: list[str]) -> dict[str, list[float]]:
    """Of two steps on the same batch, of each preset."""
    found: dict[str, list[float]] = {}
    for preset in presets:
        config, _ = decide_auto_layout(_config(preset), world.size, print)
        there = make_another_mesh(world, check_support(config, world.size))
        engine = make_engine(config, there, make_model(config))
        tokens = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(0))
        mine = torch.chunk(tokens.chunk(there.dp_size)[there.dp_index], 4 // there.dp_size)
        found[preset] = []
        for _ in range(2):
            sums = engine.forward_backward(StepBatch([MicroBatch(part[:, :-1], part[:, 1:]) for part in mine]))
            engine.clip(1.0)
            assert engine.update(0.01)
            found[preset].append(float(sums.loss) / sums.tokens)
    return found


@pytest.mark.parametrize("ranks", sorted({_ranks(preset) for preset in PRESETS}))
def test_a_preset_trains_and_all_agree(ranks: int) -> None:
    presets = [preset for preset in PRESETS if _ranks(preset) == ranks]
    seen = run_ranks(_losses, ranks, [*presets, "ddp"])
    for losses in (rank[preset] for rank in seen for preset in presets):
        assert losses[1] < losses[0]
        assert losses == pytest.approx(seen[0]["ddp"], rel=1e-4)
