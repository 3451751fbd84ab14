"""Advice: one thing to change, and how it is printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "hint"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "hint")


@dataclass(frozen=True)
class Advice:
    """What one lint has found."""

    about: str
    """Key of the configuration, such as model.vocab_size."""
    why: str
    """What is wrong with it, with its numbers, in one line."""
    fix: str
    """What to write instead, or to do, in one line."""
    severity: Severity
    """error: it cannot run so, or misses a goal; warning: it costs or risks much; hint: it may be better."""
    overrides: tuple[tuple[str, ...], ...] = ()
    """The settings in `fix`, each alternative as overrides of the run; all of them have been checked for it."""


def lines(advice: Sequence[Advice]) -> list[str]:
    """For a person: two lines each."""
    found = []
    for it in advice:
        found += [f"{it.severity:<7}  {it.about}: {it.why}", f"{'':<9}{it.fix}"]
    return found


def as_json(advice: Sequence[Advice]) -> list[dict[str, Any]]:
    """As `plan --json` prints it."""
    return [asdict(it) for it in advice]
