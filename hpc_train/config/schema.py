"""Helpers to declare a config dataclass: typed fields with their legal range, made read-only once they are checked."""

from __future__ import annotations

import dataclasses
import operator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")
SEALED_ATTRIBUTE = "_sealed"
"""Name of the attribute that marks a config as read-only; seal_config sets it."""


@dataclass(frozen=True)
class Range:
    """Values that a field accepts beyond its type; None: no limit on that side."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[str, ...] | None = None

    def problem(self, value: Any) -> str | None:
        """Return why `value` is outside the range, as an error message says it; None if it is inside."""
        if self.choices is not None and value not in self.choices:
            return f"must be one of {', '.join(self.choices)}"
        for limit, holds, sign in (
            (self.ge, operator.ge, ">="),
            (self.gt, operator.gt, ">"),
            (self.le, operator.le, "<="),
            (self.lt, operator.lt, "<"),
        ):
            if limit is not None and not holds(value, limit):  # NaN fails every comparison
                return f"must be {sign} {limit}"
        return None


def config_field(
    *,
    default: Any,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """Declare a field with a default and a legal range.

    default: a list, a dict or a class is copied or called for each instance.
    """
    metadata = {"range": Range(ge, gt, le, lt, choices)}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass_transform(field_specifiers=(field, config_field))
def config_dataclass(cls: type[T]) -> type[T]:
    """Make a class a dataclass that OmegaConf can fill, and that seal_config then makes read-only.

    `@dataclass(frozen=True)` is not used because OmegaConf refuses to compose over frozen structured configs.
    """
    made = dataclass(cls)

    def guarded(self: Any, name: str, value: Any) -> None:
        if getattr(self, SEALED_ATTRIBUTE, False):
            raise dataclasses.FrozenInstanceError(f"{type(self).__name__}.{name} is read-only")
        object.__setattr__(self, name, value)

    made.__setattr__ = guarded  # type: ignore[method-assign]
    return made


def seal_config(config: T) -> T:
    """Make a config and all configs inside it read-only; returns it."""
    for item in fields(config):  # type: ignore[arg-type]
        value = getattr(config, item.name)
        if is_dataclass(value) and not isinstance(value, type) and not is_sealed(value):
            seal_config(value)
    object.__setattr__(config, SEALED_ATTRIBUTE, True)
    return config


def is_sealed(config: Any) -> bool:
    """Whether a config was made read-only, and all configs inside it."""
    return getattr(config, SEALED_ATTRIBUTE, False)
