"""What a run costs: GPU hours, money, energy. Every price is the site's or the user's: none is here.

Published costs are hours times a rate (MPT-7B, DeepSeek-V3), so they can confirm nothing but a multiplication.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hpc_train.config.plan import PlanConfig

HOUR = 3600.0
MONTH = 365.25 / 12 * 86400.0
"""Seconds, as storage is billed."""
TIB = float(1 << 40)


@dataclass(frozen=True)
class Prices:
    """Per unit, in one currency; None: unknown, and so is what follows from it."""

    gpu_hour: float | None = None
    watts_per_gpu: float | None = None
    pue: float | None = None
    kwh: float | None = None
    co2_grams_per_kwh: float | None = None
    tib_month: float | None = None

    @staticmethod
    def of(plan: PlanConfig, spot: bool = False) -> Prices:
        """Those of the config; spot: of GPUs that may be taken back."""
        energy = plan.energy
        hour = plan.spot_price_per_gpu_hour if spot else plan.price_per_gpu_hour
        tib_month = plan.storage.price_per_tib_month
        return Prices(hour, energy.watts_per_gpu, energy.pue, energy.price_per_kwh, energy.co2_grams_per_kwh, tib_month)


@dataclass(frozen=True)
class Bill:
    """Of a whole run; None: its price, or draw, is not known."""

    gpu_hours: float
    """Spare nodes included."""
    compute: float | None
    storage: float | None
    electricity: float | None
    """Only where it is paid for beside the GPU hours."""
    kwh: float | None
    co2_kg: float | None

    @property
    def money(self) -> float | None:
        """All that has a price; None where GPU hours have none."""
        return None if self.compute is None else self.compute + (self.storage or 0.0) + (self.electricity or 0.0)


def bill(gpus: float, seconds: float, prices: Prices, stored_bytes: float = 0.0, idle_gpus: float = 0.0) -> Bill:
    """Of so many GPUs for so long. idle_gpus: spare ones, paid for as the others but taken to draw nothing."""
    hours = (gpus + idle_gpus) * seconds / HOUR
    kwh = _kwh(gpus, seconds, prices)
    stored = None if prices.tib_month is None else stored_bytes / TIB * seconds / MONTH * prices.tib_month
    return Bill(
        gpu_hours=hours,
        compute=_product(hours, prices.gpu_hour),
        storage=stored,
        electricity=_product(kwh, prices.kwh),
        kwh=kwh,
        co2_kg=_product(kwh, None if prices.co2_grams_per_kwh is None else prices.co2_grams_per_kwh / 1000),
    )


def _kwh(gpus: float, seconds: float, prices: Prices) -> float | None:
    """Mean draw x time x PUE (as Patterson et al. 2021, arXiv:2104.10350, have it)."""
    if prices.watts_per_gpu is None:
        return None
    return gpus * prices.watts_per_gpu * (prices.pue or 1.0) * seconds / HOUR / 1000


def _product(amount: float | None, price: float | None) -> float | None:
    return None if amount is None or price is None else amount * price


def cheapest(days: ArrayLike, money: ArrayLike, deadline_days: float | None = None) -> int | None:
    """Index of the least money among those [n] that are done in time, of equals the faster; None where none is."""
    return _least(money, days, days, deadline_days)


def fastest(days: ArrayLike, money: ArrayLike, budget: float | None = None) -> int | None:
    """Index of the fewest days among those [n] that the budget allows, of equals the cheaper; None where it allows
    none."""
    return _least(days, money, money, budget)


def _least(key: ArrayLike, then: ArrayLike, limited: ArrayLike, limit: float | None) -> int | None:
    values: NDArray[np.float64] = np.asarray(limited, np.float64)
    allowed = np.flatnonzero(values <= (np.inf if limit is None else limit))
    if not allowed.size:
        return None
    order = np.lexsort((np.asarray(then)[allowed], np.asarray(key)[allowed]))
    return int(allowed[order[0]])
