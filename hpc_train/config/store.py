"""The schema, registered where conf/ files can name it in their defaults lists."""

from __future__ import annotations

from functools import cache

from hydra.core.config_store import ConfigStore

from hpc_train.config.options import SCHEMAS
from hpc_train.config.run import RunConfig


@cache  # registering takes a tenth of a second
def register() -> None:
    """Put the dataclasses into Hydra's ConfigStore; calling it again changes nothing."""
    store = ConfigStore.instance()
    store.store("run_schema", RunConfig)
    for group, types in SCHEMAS.items():
        for name, kind in types.items():
            store.store(name, kind, group=group)
