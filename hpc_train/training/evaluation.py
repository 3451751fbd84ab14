"""Validation loss: the same samples at every evaluation, whatever the layout."""

from __future__ import annotations

from hpc_train.api import Engine
from hpc_train.data.loader import Loader
from hpc_train.runtime.stop import StopRequest


def validation_loss(engine: Engine, loader: Loader, batches: int, stop: StopRequest) -> float | None:
    """Mean loss a token over the first `batches` global batches of the validation split.

    None if any rank was asked to stop meanwhile: all ranks leave the evaluation at the same batch.
    """
    total, tokens = 0.0, 0
    for index in range(batches):
        batch = loader.batch(index * loader.global_batch)
        batch.stop = stop.requested
        sums = engine.evaluate(batch)
        if sums.stop:
            return None
        total += float(sums.loss)
        tokens += sums.tokens
    return total / max(tokens, 1)
