"""How often nodes fail: what other sites have published, and how a site's own counts replace it.

The rate of failures of a node is not known, so it is a Gamma distribution; counts of failures are Poisson given the
rate, for which the Gamma is conjugate: k failures in t node-days add k to its shape and t to its node-days (Gelman et
al. 2013, Bayesian Data Analysis, section 2.6).

What it says of small jobs is too good: at 1,024 GPUs jobs of RSC-1 lasted 7.9 hours on average, where the rate of its
nodes alone gives 29 (Kokolis et al. 2025, arXiv:2410.21680): programs, and what is not a node's fault, end them too.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from statistics import mean, variance

from scipy.special import betainc, gammaincinv

from hpc_train.planner.band import Band

DAY = 86400.0
"""Seconds."""


@dataclass(frozen=True)
class History:
    """Failures counted in so much time of nodes at work."""

    failures: float
    node_days: float

    def __add__(self, other: History) -> History:
        return History(self.failures + other.failures, self.node_days + other.node_days)


@dataclass(frozen=True)
class Published:
    """What one site has told of its failures."""

    site: str
    per_1000_node_days: float
    source: str


PUBLISHED = (
    Published(
        "Meta, Llama 3",
        # 419 unexpected interruptions of 2,048 nodes (16,384 H100) in 54 days.
        419 / (2048 * 54) * 1000,
        "Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.4 and table 5",
    ),
    Published("Meta, RSC-1", 6.50, "Kokolis et al. 2025, arXiv:2410.21680: 16 thousand A100, 11 months"),
    Published("Meta, RSC-2", 2.34, "Kokolis et al. 2025, arXiv:2410.21680: 8 thousand A100, 11 months"),
)
"""3.8, 6.5 and 2.3 failures per 1,000 node-days."""


@dataclass(frozen=True)
class FailureRate:
    """Gamma(shape, rate = node_days) of the failures per node and day."""

    shape: float
    """Failures that were as good as counted."""
    node_days: float
    """In so much time."""

    @property
    def mean(self) -> float:
        """Failures per node-day."""
        return self.shape / self.node_days

    def quantile(self, p: float) -> float:
        """Failures per node-day that are not exceeded with probability p."""
        return float(gammaincinv(self.shape, p)) / self.node_days

    @property
    def band(self) -> Band:
        """Failures per node-day."""
        return Band(self.quantile(0.1), self.quantile(0.5), self.quantile(0.9))

    def after(self, history: History) -> FailureRate:
        """What it becomes with a site's own counts."""
        return FailureRate(self.shape + history.failures, self.node_days + history.node_days)

    def scaled_to(self, mean: float) -> FailureRate:
        """As uncertain in proportion, with another mean (failures per node-day)."""
        return FailureRate(self.shape, self.shape / mean)

    def interruption_seconds(self, nodes: float) -> Band:
        """Mean time to interruption of a job on so many nodes, by their failures."""
        return self.band.through(lambda rate: DAY / (rate * nodes))

    def failures(self, nodes: float, days: float) -> Band:
        """Failures to count with in a run: negative binomial, as the rate and chance are both unknown."""
        chance = self.node_days / (self.node_days + nodes * days)
        return Band(*(_negative_binomial(p, self.shape, chance) for p in (0.1, 0.5, 0.9)))


def _negative_binomial(p: float, shape: float, chance: float) -> float:
    """The fewest events whose probability, and that of fewer, is p: I_chance(shape, k + 1) >= p."""
    high = 1
    while betainc(shape, high + 1, chance) < p:
        high *= 2
    return float(bisect_left(range(high), p, key=lambda k: float(betainc(shape, k + 1, chance))))


def prior(sites: tuple[Published, ...] = PUBLISHED) -> FailureRate:
    """Of a site that nothing is known of: as the published ones, by the mean and the variance between them.

    p10 to p90 is 1.8 to 7.0 failures per 1,000 node-days, the mean 4.2; it weighs as much as about 950 node-days of own
    counts, a week of 135 nodes.
    """
    rates = [site.per_1000_node_days / 1000 for site in sites]
    middle, spread = mean(rates), variance(rates)
    return FailureRate(middle**2 / spread, middle / spread)
