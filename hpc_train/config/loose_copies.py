"""Describe one of the copies of a loosely synchronised run as a run of its own."""

from __future__ import annotations

from dataclasses import asdict, replace

from hpc_train.config.parallel import Degrees, SyncConfig
from hpc_train.config.run import RunConfig


def is_loose(config: RunConfig) -> bool:
    """Return whether the copies of the model train on their own between exchanges."""
    return config.parallel.sync.every is not None


def describe_one_copy(config: RunConfig, degrees: Degrees) -> tuple[RunConfig, Degrees]:
    """Return the configuration and the degrees of a single copy, which trains on its share of the global batch."""
    own = replace(degrees, dp_replicate=1)
    batch = config.train.global_batch // degrees.dp_replicate
    parallel = replace(config.parallel, sync=SyncConfig(), auto=False, **asdict(own))
    return replace(config, parallel=parallel, train=replace(config.train, global_batch=batch)), own
