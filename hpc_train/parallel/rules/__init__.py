"""Which combinations of techniques exist, asked before any rank is started. No torch in this package.

One file an axis with the checks of its options, check.py with their order. Here: how a message names an option.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any


def format_changed(config: Any) -> str:
    """`name=value` of the first field of a config that is not at its default; there must be one."""
    default = type(config)()
    name = next(item.name for item in fields(config) if getattr(config, item.name) != getattr(default, item.name))
    return f"{name}={format_value(getattr(config, name))}"


def format_value(value: Any) -> str:
    """A value as an override has it."""
    return str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "")
