"""Rules of parameter servers."""

from __future__ import annotations

from hpc_train.config.degrees import Degrees
from hpc_train.config.run import RunConfig
from hpc_train.config.techniques import ServerConfig
from hpc_train.errors import UserError


def check(config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError for what parameter servers cannot do."""
    if config.parallel.server != ServerConfig():
        raise UserError("parallel.server: not in this version; leave it out")
