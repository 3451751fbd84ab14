"""How often to ask Slurm: soon after something happened, rarer and rarer while nothing does."""

from __future__ import annotations

from dataclasses import dataclass

LEAST, MOST = 2.0, 60.0
"""Seconds between two polls."""


@dataclass
class Backoff:
    """Doubles from `least` to `most`, and begins again when something changed."""

    least: float = LEAST
    most: float = MOST
    _next: float = 0.0

    def seconds(self, changed: bool) -> float:
        """How long to wait before the next poll, after one that showed a change or did not."""
        self._next = self.least if changed or not self._next else min(self.most, 2 * self._next)
        return self._next
