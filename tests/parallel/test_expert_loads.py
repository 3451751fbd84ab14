"""What a step says of the loads of experts: of the global batch, and the same on every rank and in every layout."""

from __future__ import annotations

import numpy as np
import pytest
from matrix import LENGTH, MODELS, SEQUENCES, Case, fresh, global_batch, share

from hpc_train.config.model import TransformerConfig
from hpc_train.interfaces import World
from hpc_train.testing import run_ranks

Loads = tuple[list[list[float]], float, float, float]


def count_loads(world: World, case: Case) -> Loads:
    """The loads of the first step, and that an evaluation counts none."""
    engine = fresh(case, world)
    sums = engine.forward_backward(share(global_batch(case.kind, 0), world, case.micro))
    assert sums.experts is not None
    assert engine.evaluate(share(global_batch(case.kind, 1), world, case.micro)).experts is None
    loads = sums.experts
    return loads.tokens.tolist(), float(loads.dropped), float(loads.loss), float(loads.imbalance)


def test_loads_are_those_of_the_global_batch() -> None:
    alone = Case(1, (), "shared-experts", micro=SEQUENCES)
    spread = Case(4, ("parallel=fsdp", "parallel.ep=2", "parallel.cp=2"), "shared-experts", micro=3)
    ((tokens, dropped, loss, imbalance),) = run_ranks(count_loads, 1, alone, parallel=alone.config().parallel)
    config = MODELS["shared-experts"]
    assert isinstance(config, TransformerConfig)
    assert len(tokens) == config.layers - config.experts.first_dense
    assert np.sum(tokens) + dropped == len(tokens) * SEQUENCES * LENGTH * config.experts.top_k
    assert dropped > 0
    assert imbalance == pytest.approx(max(max(layer) / np.mean(layer) for layer in tokens))
    for rank in run_ranks(count_loads, 4, spread, parallel=spread.config().parallel):
        assert rank[0] == tokens
        assert rank[1] == dropped
        assert rank[2] == pytest.approx(loss, rel=1e-12)
