"""Estimate the failure rate of nodes: published rates of other sites, updated with a site's own history.

A failure rate is a gamma distribution; figures computed from it are Percentiles. failure_log.py reads the history.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, mean, variance


@dataclass(frozen=True)
class Percentiles:
    """10th, 50th and 90th percentile of an uncertain number, ascending."""

    p10: float
    p50: float
    p90: float

    def through(self, function: Callable[[float], float]) -> Percentiles:
        """Return the percentiles of a monotone function of the number, rising or falling."""
        low, middle, high = function(self.p10), function(self.p50), function(self.p90)
        return Percentiles(min(low, high), middle, max(low, high))

    def times(self, other: Percentiles) -> Percentiles:
        """Return the percentiles of the product with an independent number.

        Both are taken as log-normal on each side of the median. All six percentiles must be positive.
        """
        down = math.hypot(math.log(self.p50 / self.p10), math.log(other.p50 / other.p10))
        up = math.hypot(math.log(self.p90 / self.p50), math.log(other.p90 / other.p50))
        middle = self.p50 * other.p50
        return Percentiles(middle * math.exp(-down), middle, middle * math.exp(up))


DAY = 86400.0
"""Seconds."""


@dataclass(frozen=True)
class FailureHistory:
    """Failures counted over a number of node-days of running jobs."""

    failures: float
    node_days: float

    def __add__(self, other: FailureHistory) -> FailureHistory:
        return FailureHistory(self.failures + other.failures, self.node_days + other.node_days)


@dataclass(frozen=True)
class PublishedRate:
    """The failure rate that one site has published."""

    site: str
    per_1000_node_days: float
    source: str


PUBLISHED_RATES = (
    PublishedRate(
        "Meta, Llama 3",
        # 419 unexpected interruptions of 2,048 nodes (16,384 H100) in 54 days.
        419 / (2048 * 54) * 1000,
        "Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.4 and table 5",
    ),
    PublishedRate("Meta, RSC-1", 6.50, "Kokolis et al. 2025, arXiv:2410.21680: 16 thousand A100, 11 months"),
    PublishedRate("Meta, RSC-2", 2.34, "Kokolis et al. 2025, arXiv:2410.21680: 8 thousand A100, 11 months"),
)
"""3.8, 6.5 and 2.3 failures per 1,000 node-days."""


@dataclass(frozen=True)
class FailureRate:
    """Failures per node and day: the distribution Gamma(shape, rate = node_days)."""

    shape: float
    """Number of failures that the rate is based on."""
    node_days: float
    """Node-days in which they happened."""

    @property
    def mean(self) -> float:
        """Failures per node-day."""
        return self.shape / self.node_days

    def quantile(self, p: float) -> float:
        """Return the rate (failures per node-day) that is not exceeded with probability p."""
        return _gamma_quantile(self.shape, p) / self.node_days

    @property
    def percentiles(self) -> Percentiles:
        """Failures per node-day."""
        return Percentiles(self.quantile(0.1), self.quantile(0.5), self.quantile(0.9))

    def after(self, history: FailureHistory) -> FailureRate:
        """Update the rate with a site's own counts."""
        return FailureRate(self.shape + history.failures, self.node_days + history.node_days)

    def scaled_to(self, mean: float) -> FailureRate:
        """Return a rate with another mean (failures per node-day) and the same relative uncertainty."""
        return FailureRate(self.shape, self.shape / mean)

    def interruption_seconds(self, nodes: float) -> Percentiles:
        """Return the mean time to interruption of a job on `nodes` nodes, in seconds."""
        return self.percentiles.through(lambda rate: DAY / (rate * nodes))

    def failures(self, nodes: float, days: float) -> Percentiles:
        """Return how many failures to expect in a run: negative binomial, because the rate is uncertain too."""
        # A Poisson number of failures whose rate is gamma distributed is negative binomial.
        chance = self.node_days / (self.node_days + nodes * days)
        return Percentiles(*(_negative_binomial(p, self.shape, chance) for p in (0.1, 0.5, 0.9)))


# Every plan needs a quantile of the gamma distribution, few the negative binomial: importing scipy.special would take a
# tenth of the time of a plan.
_MAX_STEPS, _PRECISION = 50, 1e-11
"""When Newton's method ends: after so many steps, or after one that changes the quantile by less than this share."""


@cache
def _gamma_quantile(shape: float, p: float) -> float:
    """Return the p-quantile of Gamma(shape, 1) to 10 digits, for a shape of at least 1 and p from 0.01 to 0.99."""
    # Newton's method for log P as a function of log x. It begins at the approximation of Wilson and Hilferty 1931, and
    # not below a bound that follows from P(x) <= x^shape / Gamma(shape + 1).
    cube_root = 1 - 1 / (9 * shape) + NormalDist().inv_cdf(p) / (3 * math.sqrt(shape))
    x = max(shape * max(cube_root, 0.0) ** 3, math.exp((math.log(p) + math.lgamma(shape + 1)) / shape))
    for _ in range(_MAX_STEPS):
        below = _gamma_probability(shape, x)
        slope = math.exp(shape * math.log(x) - x - math.lgamma(shape)) / below
        step = min(max(math.log(p / below) / slope, -1.0), 1.0)
        x *= math.exp(step)
        if abs(step) < _PRECISION:
            break
    return x


def _gamma_probability(shape: float, x: float) -> float:
    """Return P(Gamma(shape, 1) <= x) by its power series, whose terms are all positive."""
    term = total = 1.0
    n = shape
    while term > 1e-17 * total:
        n += 1
        term *= x / n
        total += term
    return total * math.exp(shape * math.log(x) - x - math.lgamma(shape + 1))


def _negative_binomial(p: float, shape: float, chance: float) -> float:
    """Return the p-quantile of the negative binomial: the least k with I_chance(shape, k + 1) >= p."""
    from scipy.special import betainc

    high = 1
    while betainc(shape, high + 1, chance) < p:
        high *= 2
    return float(bisect_left(range(high), p, key=lambda k: float(betainc(shape, k + 1, chance))))


def make_prior_failure_rate() -> FailureRate:
    """Return the rate assumed for a site without history: mean and variance of the published rates.

    Mean 4.2 failures per 1,000 node-days, p10 to p90 1.8 to 7.0. It weighs as much as about 950 node-days of a site's
    own history, a week of 135 nodes.
    """
    # The gamma distribution with the same mean and variance (method of moments).
    rates = [site.per_1000_node_days / 1000 for site in PUBLISHED_RATES]
    middle, spread = mean(rates), variance(rates)
    return FailureRate(middle**2 / spread, middle / spread)
