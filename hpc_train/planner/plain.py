"""plain_settings: what is tried where a machine's speed is not known: data parallelism, the simplest first."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.parallel.support import check_support
from hpc_train.planner.settings import Settings, with_settings

_LADDER: tuple[Settings, ...] = (
    {"parallel.strategy": "ddp"},
    {"parallel.strategy": "zero1"},
    {"parallel.strategy": "zero2"},
    {"parallel.strategy": "zero3"},
    {"parallel.strategy": "zero3", "parallel.recompute.mode": "full"},
)
"""Each needs less memory than the one before."""


def plain_settings(config: RunConfig, ranks: int) -> Iterator[Settings]:
    """Those of the ladder that the run can have, with what it fixes as it is.

    Raises UserError, as the run itself would, if it can have none.
    """
    fixed, first = set(config.parallel.fixed or ()), None
    found = False
    for step in _LADDER:
        settings = {key: value for key, value in step.items() if key not in fixed}
        try:
            check_support(with_settings(config, settings), ranks)
        except UserError as error:
            first = first or error
            continue
        found = True
        yield settings
    if not found and first is not None:
        raise first
