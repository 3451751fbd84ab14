"""Read the config.yaml of a run safely, since somebody else may have written it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpc_train.errors import UserError
from hpc_train.regular_files import read_regular

POINTS_FILE = "points.jsonl"
"""File by which a sweep directory is recognised; next to `points/`, which has the run directories."""
_MAX_BYTES = 1 << 20
"""Maximum bytes of such a file; ours have about 5,000."""
_MAX_DEPTH = 32


def load_run_file(path: Path) -> dict[str, Any]:
    """Return the content of a run's config.yaml as plain values; interpolations stay text.

    Aliases are refused: a few lines of them stand for more values than any memory holds, and we write none.
    Raises UserError naming the file if it is no such configuration.
    """
    try:
        text = read_regular(path, _MAX_BYTES, follow=True).decode()
        _check_events(text)
        plain = OmegaConf.to_container(OmegaConf.create(text))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give the directory of a run, or its config.yaml") from None
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError, LookupError, RecursionError) as error:
        why = str(error) if type(error) is ValueError else type(error).__name__
        raise UserError(f"{path}: is not the configuration of a run ({why})") from None
    if not isinstance(plain, dict):
        raise UserError(f"{path}: is not the configuration of a run (it is a list, not settings)")
    return {str(key): value for key, value in plain.items()}


def _check_events(text: str) -> None:
    """Raise ValueError for aliases and deep nesting, which are cheap to write and costly to load."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it has YAML aliases")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise ValueError("it is nested too deeply")
