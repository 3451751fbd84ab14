"""Which setting of a technique a user has changed, as an override says it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


def changed(config: Any) -> str:
    """`name=value` of the first field of a config that is not at its default; there must be one."""
    default = type(config)()
    name = next(item.name for item in fields(config) if getattr(config, item.name) != getattr(default, item.name))
    return f"{name}={written(getattr(config, name))}"


def written(value: Any) -> str:
    """A value as an override has it."""
    return str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "")
