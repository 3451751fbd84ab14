"""Estimate the gradient noise scale, which says up to which size a larger batch pays.

Source: McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", arXiv:1812.06162.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class NoiseScale:
    """Estimate the gradient noise scale from gradient norms at two batch sizes (appendix A.1 of the paper).

    With G_B the mean gradient over B sequences, E|G_B|^2 = |G|^2 + tr(S) / B; two sizes give two equations for
    |G|^2 and tr(S). Both parts are averaged over steps before they are divided, since their ratio is biased.
    """

    decay: float
    signal: float = 0.0
    noise: float = 0.0
    weight: float = 0.0

    def add(self, small_square: float, small: int, big_square: float, big: int) -> None:
        """Add one step's squared norms of the mean gradient over `small` and over `big` sequences; small < big."""
        assert 0 < small < big
        signal = (big * big_square - small * small_square) / (big - small)
        noise = (small_square - big_square) / (1 / small - 1 / big)
        self.signal = self.decay * self.signal + (1 - self.decay) * signal
        self.noise = self.decay * self.noise + (1 - self.decay) * noise
        self.weight = self.decay * self.weight + (1 - self.decay)

    @property
    def value(self) -> float | None:
        """B_simple = tr(S) / |G|^2 in sequences; None until the estimates of both parts are positive."""
        return self.noise / self.signal if self.weight > 0 and self.signal > 0 and self.noise > 0 else None

    def state(self) -> dict[str, float]:
        """Return the state that a checkpoint holds."""
        return {"signal": self.signal, "noise": self.noise, "weight": self.weight}

    def restore(self, state: dict[str, float]) -> None:
        """Continue from what `state` returned."""
        self.signal, self.noise, self.weight = state["signal"], state["noise"], state["weight"]
