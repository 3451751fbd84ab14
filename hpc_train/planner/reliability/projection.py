"""project_run: how long a run will really take and what it will cost, with failures, saves and prices counted.

Every price is the site's or the user's: none is here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hpc_train.config.run import PlanConfig, RunConfig
from hpc_train.planner.reliability.failure_rate import (
    DAY,
    PUBLISHED_RATES,
    FailureRate,
    Percentiles,
    prior_failure_rate,
    read_logs,
)
from hpc_train.planner.reliability.goodput import (
    Interruption,
    Save,
    SaveCost,
    Waste,
    best_interval,
    break_down_waste,
    effective_share,
    estimate_saving,
    spare_wait_seconds,
    stored_bytes,
)
from hpc_train.units import TIB

HOUR = 3600.0
MONTH = 365.25 / 12 * 86400.0
"""Seconds, as storage is billed."""


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
    """Cost of a whole run; None: a price, or the power draw, is not known."""

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


def compute_bill(
    gpus: float, seconds: float, prices: Prices, stored_bytes: float = 0.0, idle_gpus: float = 0.0
) -> Bill:
    """Compute the bill of so many GPUs for so long. idle_gpus: spares, which are paid for but taken to draw nothing."""
    hours = (gpus + idle_gpus) * seconds / HOUR
    kwh = _kwh(gpus, seconds, prices)
    stored = None if prices.tib_month is None else stored_bytes / TIB * seconds / MONTH * prices.tib_month
    return Bill(
        gpu_hours=hours,
        compute=_times_price(hours, prices.gpu_hour),
        storage=stored,
        electricity=_times_price(kwh, prices.kwh),
        kwh=kwh,
        co2_kg=_times_price(kwh, None if prices.co2_grams_per_kwh is None else prices.co2_grams_per_kwh / 1000),
    )


def _kwh(gpus: float, seconds: float, prices: Prices) -> float | None:
    """Mean draw x time x PUE (as Patterson et al. 2021, arXiv:2104.10350, have it)."""
    if prices.watts_per_gpu is None:
        return None
    return gpus * prices.watts_per_gpu * (prices.pue or 1.0) * seconds / HOUR / 1000


def _times_price(amount: float | None, price: float | None) -> float | None:
    return None if amount is None or price is None else amount * price


def find_cheapest(days: ArrayLike, money: ArrayLike, deadline_days: float | None = None) -> int | None:
    """Index of the least money among those [n] that are done in time, of equals the faster; None where none is."""
    return _find_least(money, days, days, deadline_days)


def find_fastest(days: ArrayLike, money: ArrayLike, budget: float | None = None) -> int | None:
    """Index of the fewest days among those [n] that the budget allows, of equals the cheaper; None where it allows
    none."""
    return _find_least(days, money, money, budget)


def _find_least(key: ArrayLike, then: ArrayLike, limited: ArrayLike, limit: float | None) -> int | None:
    values: NDArray[np.float64] = np.asarray(limited, np.float64)
    allowed = np.flatnonzero(values <= (np.inf if limit is None else limit))
    if not allowed.size:
        return None
    order = np.lexsort((np.asarray(then)[allowed], np.asarray(key)[allowed]))
    return int(allowed[order[0]])


_SMALL_NODES = 128
"""Nodes of the largest jobs that arXiv:2410.21680 found interrupted more by other causes than by nodes."""
_ENDLESS = 1e12
"""Seconds between saves where there are none and the length of the run is not known."""


@dataclass(frozen=True)
class ProjectedJob:
    """The planner's estimate of one candidate, as far as a projection needs it."""

    ranks: int
    """One a GPU."""
    nodes: int
    step_seconds: Percentiles
    """Without saving: `outlook` adds that."""
    tokens_per_step: float
    parameters: float


@dataclass(frozen=True)
class AssumedFailureRate:
    """A failure rate of nodes and its source."""

    rate: FailureRate
    source: str
    """One line."""


@dataclass(frozen=True)
class Market:
    """Outcome with GPUs on demand, or on spot."""

    effective: Percentiles
    """Share of the time that goes into steps that are kept, in the long run: what is not known is the rate of failures.
    A run that expects few may have none, or one too many."""
    waste: Waste
    """Where the rest goes, at the middle of what is known of failures."""
    best_every: int | None
    """checkpoint.every that wastes least; None where the figures do not tell."""
    best_effective: float | None
    """The effective share at it, at the middle."""
    days: Percentiles | None
    """None where the number of steps is not known."""
    bill: Bill | None
    """At the middle of `days`."""
    money: Percentiles | None

    @property
    def gpu_hours(self) -> float | None:
        return None if self.bill is None else self.bill.gpu_hours


@dataclass(frozen=True)
class Projection:
    """Duration, cost and goodput of the whole run with one candidate."""

    rate: AssumedFailureRate
    failures: Percentiles | None
    """Of nodes, in the whole run."""
    interruption_seconds: Percentiles
    """Mean time to interruption of the job by failures of nodes."""
    save: Save
    demand: Market
    spot: Market | None
    """None where spot prices are not given."""
    late: bool
    """On demand, the middle of the days is past plan.deadline_days."""
    over_budget: bool
    """The cheapest way that is priced costs more than plan.budget, at the middle."""
    unknown: tuple[str, ...]
    """What is not known, and what was taken for it; one line each."""


def choose_failure_rate(plan: PlanConfig, ranks_per_node: int) -> AssumedFailureRate:
    """Take the site's own figure or logs, else published rates. Raises UserError for a file that is no log."""
    before = prior_failure_rate()
    if plan.failures_per_1000_node_days is not None:
        return AssumedFailureRate(
            before.scaled_to(plan.failures_per_1000_node_days / 1000), "plan.failures_per_1000_node_days"
        )
    if not plan.failure_logs:
        sites = ", ".join(f"{it.site} {it.per_1000_node_days:.1f}" for it in PUBLISHED_RATES)
        return AssumedFailureRate(
            before, f"published, per 1,000 node-days: {sites}; give plan.failure_logs for your own"
        )
    log = read_logs(plan.failure_logs, ranks_per_node)
    told = f"plan.failure_logs: {log.by_node} failures of nodes in {log.node_days:.0f} node-days of {log.runs} jobs"
    more = f"; {log.unexplained} jobs failed for unknown reasons, not counted" if log.unexplained else ""
    return AssumedFailureRate(before.after(log.history), told + more)


def planned_steps(config: RunConfig, tokens_per_step: float) -> int | None:
    """Return the steps of the planned run; None if nobody gave them, or only the data tells (train.epochs)."""
    if config.plan.tokens is not None:
        return math.ceil(config.plan.tokens / tokens_per_step)
    return config.train.steps


def project_run(config: RunConfig, job: ProjectedJob, rate: AssumedFailureRate | None = None) -> Projection:
    """rate: of rate_of, where many candidates share it."""
    plan = config.plan
    rate = rate or choose_failure_rate(plan, config.cluster.ranks_per_node)
    saving = estimate_saving(config, job.parameters, job.ranks)
    case = _Case(config, job, saving, rate.rate, planned_steps(config, job.tokens_per_step))
    demand = case.market(spot=False)
    spot = case.market(spot=True) if plan.spot_price_per_gpu_hour is not None else None
    costs = [it.money.p50 for it in (demand, spot) if it is not None and it.money is not None]
    return Projection(
        rate=rate,
        failures=rate.rate.failures(job.nodes, demand.days.p50) if demand.days else None,
        interruption_seconds=rate.rate.interruption_seconds(job.nodes),
        save=saving.save,
        demand=demand,
        spot=spot,
        late=bool(plan.deadline_days and demand.days and demand.days.p50 > plan.deadline_days),
        over_budget=bool(plan.budget and costs and min(costs) > plan.budget),
        unknown=(*saving.unknown, *_unknown(config, job, case.steps)),
    )


def _unknown(config: RunConfig, job: ProjectedJob, steps: int | None) -> list[str]:
    plan, lines = config.plan, []
    if steps is None and config.train.epochs is not None:
        lines.append("train.epochs: how many steps they are depends on the data; give plan.tokens for days and costs")
    elif steps is None:
        lines.append("plan.tokens and train.steps: without one of them there are no days and no costs")
    if plan.price_per_gpu_hour is None and plan.spot_price_per_gpu_hour is None:
        lines.append("plan.price_per_gpu_hour: costs are in GPU hours")
    if 1 < job.nodes <= _SMALL_NODES:
        lines.append("what ends jobs beside nodes: at 1,024 GPUs of RSC-1 it was most (7.9 hours, 29 by nodes alone)")
    if plan.repair_hours is None:
        lines.append("plan.repair_hours: another node counts as free whenever one fails")
    return lines


@dataclass(frozen=True)
class _Case:
    """One job, as its markets share it."""

    config: RunConfig
    job: ProjectedJob
    saving: SaveCost
    rate: FailureRate
    steps: int | None

    def market(self, spot: bool) -> Market:
        band = self.rate.band
        share = band.through(lambda rate: self._effective(self._interval, rate, spot))
        best = self._best(band.p50, spot)
        seconds = self._seconds(share)
        days = None if seconds is None else seconds.through(lambda it: it / DAY)
        told = None if seconds is None else seconds.through(lambda it: self._bill(it, spot).money or 0.0)
        at = None if seconds is None else self._bill(seconds.p50, spot)
        return Market(
            effective=share,
            waste=break_down_waste(self._interval, self.save, self._restart, self._kinds(band.p50, spot)),
            best_every=best,
            best_effective=None if best is None else self._effective(best * self._step, band.p50, spot),
            days=days,
            bill=at,
            money=None if at is None or at.money is None else told,
        )

    @property
    def save(self) -> Save:
        return self.saving.save

    @property
    def _step(self) -> float:
        return self.job.step_seconds.p50

    @property
    def _restart(self) -> float:
        return self.config.plan.restart_minutes * 60

    @property
    def _interval(self) -> float:
        """Seconds of steps between two saves; a run that never saves has them all between two."""
        told = [it for it in (self.config.checkpoint.every, self.steps) if it]
        return min(told) * self._step if told else _ENDLESS

    def _effective(self, interval: float, rate: float, spot: bool) -> float:
        return float(effective_share(interval, self.save, self._restart, self._kinds(rate, spot)))

    def _best(self, rate: float, spot: bool) -> int | None:
        """Whole steps, 1 at least; None where it is not known how long a save takes."""
        if not self.save.write_seconds:
            return None
        seconds = float(best_interval(self.save, self._restart, self._kinds(rate, spot)))
        return max(1, round(seconds / self._step)) if math.isfinite(seconds) else None

    def _kinds(self, rate: float, spot: bool) -> list[Interruption]:
        """rate: failures of a node in a day."""
        plan = self.config.plan
        failing = rate * self.job.nodes / DAY
        detect = plan.detection_minutes * 60
        repair = None if plan.repair_hours is None else plan.repair_hours * HOUR
        wait = 0.0 if repair is None else float(spare_wait_seconds(failing, repair, plan.spare_nodes))
        kinds = [Interruption(failing, detect + wait)]
        saving = float(self.save.write_seconds)
        if plan.planned_interruptions_per_day:
            kinds.append(Interruption(plan.planned_interruptions_per_day / DAY, saving, saved=True))
        if spot and plan.spot_interruptions_per_1000_node_days is not None:
            taken = plan.spot_interruptions_per_1000_node_days / 1000 * self.job.nodes / DAY
            saved = self.saving.known and saving <= plan.spot_notice_seconds
            down = plan.spot_wait_minutes * 60 + (saving if saved else 0.0)
            kinds.append(Interruption(taken, down, saved=saved))
        return kinds

    def _seconds(self, share: Percentiles) -> Percentiles | None:
        """Of the whole run, the first start included; the speed of a step and failures are independent."""
        if self.steps is None:
            return None
        work = self.job.step_seconds.through(lambda it: it * (self.steps or 0))
        slowed = share.through(lambda it: 1 / max(it, 1e-9))
        return work.times(slowed).through(lambda it: it + self._restart)

    def _bill(self, seconds: float, spot: bool) -> Bill:
        plan, job = self.config.plan, self.job
        spare = plan.spare_nodes * job.ranks / job.nodes
        stored = stored_bytes(self.config, job.parameters) if plan.storage.tib is None else plan.storage.tib * TIB
        return compute_bill(job.ranks, seconds, Prices.of(plan, spot), stored, spare)
