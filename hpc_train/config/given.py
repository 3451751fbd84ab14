"""What a user has said of the parallel degrees and techniques, and what is only a default."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from hpc_train.config.parallel import ParallelConfig
from hpc_train.config.run import RunConfig

MICRO_BATCH = "train.micro_batch"


def given(config: RunConfig, overrides: Sequence[str]) -> list[str]:
    """Keys below `parallel`, and train.micro_batch, that an override names or a file has changed; sorted.

    A degree of -1, what is left, is not given: it is for the planner to say.
    """
    named = {text.lstrip("+").partition("=")[0] for text in overrides}
    keys = {key for key in named if key.startswith("parallel.") or key == MICRO_BATCH}
    keys |= set(_changed(config.parallel, ParallelConfig(), "parallel."))
    keys -= {"parallel.auto", "parallel.fixed"}
    return sorted(key for key in keys if value_of(config, key) not in (-1, None))


def chosen(overrides: Sequence[str]) -> str | None:
    """The last option of the group `parallel` that the overrides choose."""
    options = [value for key, _, value in (text.partition("=") for text in overrides) if key == "parallel"]
    return options[-1] if options else None


def value_of(config: RunConfig, key: str) -> Any:
    """Of a dotted key; None where there is no such key."""
    node: Any = config
    for name in key.split("."):
        node = getattr(node, name, None)
    return node


def _changed(config: Any, default: Any, path: str) -> Iterator[str]:
    for item in fields(config):
        value, plain = getattr(config, item.name), getattr(default, item.name)
        if is_dataclass(value):
            yield from _changed(value, plain, f"{path}{item.name}.")
        elif value != plain:
            yield f"{path}{item.name}"
