"""What the checkpoints of a run say of its code and config, and what a run that goes on from one says of them."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from hpc_train.checkpoint.origin import Origin, file_hash, text_hash, this_code
from hpc_train.config.compose import to_yaml
from hpc_train.config.model import CustomModelConfig
from hpc_train.config.run import RunConfig


def origin_of(config: RunConfig, attempt: int) -> Origin:
    """Of this process, which has built the model."""
    version, code = this_code()
    return Origin(version, code, text_hash(to_yaml(config)), _model_hash(config), attempt)


def other_code(saved: Origin | None, own: Origin | None) -> str | None:
    """A line for a person, where a checkpoint was made by other code than this; None where it was not, or nobody knows.

    It is no reason to stop: a run may go on with a mended program.
    """
    differ = own.differs(saved) if saved is not None and own is not None else []
    return f"the checkpoint was saved by other code: now {' and '.join(differ)}" if differ else None


def _model_hash(config: RunConfig) -> str | None:
    """Of the one file that model.module names; what that imports is not in it."""
    if not isinstance(config.model, CustomModelConfig) or config.model.module is None:
        return None
    file = getattr(sys.modules.get(config.model.module), "__file__", None)
    with suppress(OSError):
        return file_hash(Path(file)) if file else None
    return None
