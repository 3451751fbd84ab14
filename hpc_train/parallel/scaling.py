"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hpc_train.api import Piece, World
from hpc_train.config.train import PrecisionConfig
from hpc_train.errors import UserError

log = logging.getLogger(__name__)

FIRST, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000
"""Those of torch.amp.GradScaler."""
_SMALLEST, _LARGEST = 2.0**-24, 2.0**126
"""Below the one not even the smallest number of fp16 would be left of a 1; twice the other is too much for float32."""


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device="cpu")


@dataclass
class LossScale:
    """What the loss is multiplied by, so that small gradients do not vanish in fp16. The same on every rank."""

    scale: Tensor = field(default_factory=lambda: _scalar(FIRST))
    good: Tensor = field(default_factory=lambda: _scalar(0))
    """Updates since the scale last changed."""

    @property
    def factor(self) -> float:
        """The scale as it is now."""
        return float(self.scale)

    def learn(self, finite: bool) -> None:
        """Halve the scale after a gradient that was not finite, double it after INTERVAL in a row that were.

        Raises UserError where halving has not helped for so long that it cannot.
        """
        if not finite:
            self._back_off()
            return
        self.good.add_(1)
        if float(self.good) >= INTERVAL:
            self.scale.mul_(GROWTH).clamp_(max=_LARGEST)
            self.good.zero_()

    def _back_off(self) -> None:
        self.scale.mul_(BACKOFF)
        self.good.zero_()
        log.warning("the gradient is not finite in fp16: step skipped, loss scale %g from here", self.factor)
        if self.factor < _SMALLEST:
            raise UserError(
                f"precision=fp16: the gradient is not finite even at a loss scale of {_SMALLEST:g}; lower optim.lr, or "
                "use precision=bf16 or fp32"
            )

    def pieces(self, world: World) -> Iterator[Piece]:
        """To save and to load; every rank holds a copy."""
        for name, value in (("scaler.scale", self.scale), ("scaler.good", self.good)):
            yield Piece(name, (), value.dtype, (), value, replica=world.rank)


def loss_scale(config: PrecisionConfig) -> LossScale | None:
    """Scaling where the format needs it: bfloat16 has the range of float32."""
    return LossScale() if config.name == "fp16" else None
