"""Project a whole run: its duration and cost with failures, saves and prices taken into account.

Prices come from the configuration only; none is built in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from hpc_train.config.run import PlanConfig, RunConfig
from hpc_train.planner.reliability.failure_log import read_logs
from hpc_train.planner.reliability.failure_rate import (
    DAY,
    PUBLISHED_RATES,
    FailureRate,
    Percentiles,
    make_prior_failure_rate,
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
    """Prices per unit, in one currency. A figure that depends on an unknown price (None) is also None."""

    gpu_hour: float | None = None
    watts_per_gpu: float | None = None
    pue: float | None = None
    kwh: float | None = None
    co2_grams_per_kwh: float | None = None
    tib_month: float | None = None

    @staticmethod
    def from_config(plan: PlanConfig, spot: bool = False) -> Prices:
        """Take the prices of the configuration. spot: those of spot GPUs."""
        energy = plan.energy
        hour = plan.spot_price_per_gpu_hour if spot else plan.price_per_gpu_hour
        tib_month = plan.storage.price_per_tib_month
        return Prices(hour, energy.watts_per_gpu, energy.pue, energy.price_per_kwh, energy.co2_grams_per_kwh, tib_month)


@dataclass(frozen=True)
class Bill:
    """Cost of a whole run. None: a price or the power draw is unknown."""

    gpu_hours: float
    """Including spare nodes."""
    compute: float | None
    storage: float | None
    electricity: float | None
    """Only if it is paid for separately from GPU hours."""
    kwh: float | None
    co2_kg: float | None

    @property
    def money(self) -> float | None:
        """Sum of all parts with a price; None if GPU hours have no price."""
        return None if self.compute is None else self.compute + (self.storage or 0.0) + (self.electricity or 0.0)


def compute_bill(
    gpus: float, seconds: float, prices: Prices, stored_bytes: float = 0.0, idle_gpus: float = 0.0
) -> Bill:
    """Compute the bill of `gpus` for `seconds`. idle_gpus: spares, which are paid for but assumed to draw no power."""
    hours = (gpus + idle_gpus) * seconds / HOUR
    kwh = _compute_kwh(gpus, seconds, prices)
    stored = None if prices.tib_month is None else stored_bytes / TIB * seconds / MONTH * prices.tib_month
    return Bill(
        gpu_hours=hours,
        compute=_multiply_price(hours, prices.gpu_hour),
        storage=stored,
        electricity=_multiply_price(kwh, prices.kwh),
        kwh=kwh,
        co2_kg=_multiply_price(kwh, None if prices.co2_grams_per_kwh is None else prices.co2_grams_per_kwh / 1000),
    )


def _compute_kwh(gpus: float, seconds: float, prices: Prices) -> float | None:
    """Return mean power x time x PUE (Patterson et al. 2021, arXiv:2104.10350)."""
    if prices.watts_per_gpu is None:
        return None
    return gpus * prices.watts_per_gpu * (prices.pue or 1.0) * seconds / HOUR / 1000


def _multiply_price(amount: float | None, price: float | None) -> float | None:
    return None if amount is None or price is None else amount * price


_RESTART_SECONDS = 300.0
"""Assumed duration of a restart if no log has one and plan.restart_minutes is not set."""
_DETECTION_SECONDS = 300.0
"""Assumed time until a fault is noticed if no log has one and plan.detection_minutes is not set."""
_SMALL_NODES = 128
"""Up to this many nodes, jobs were interrupted more by other causes than by node failures (arXiv:2410.21680)."""
_ENDLESS = 1e12
"""Interval in seconds that stands for "never saves" if the length of the run is unknown."""


@dataclass(frozen=True)
class ProjectedJob:
    """The part of a candidate's estimate that a projection needs."""

    ranks: int
    """One per GPU."""
    nodes: int
    step_seconds: Percentiles
    """Without checkpoints: project_run adds them."""
    tokens_per_step: float
    parameters: float


@dataclass(frozen=True)
class AssumedFailureRate:
    """A failure rate of nodes and its source."""

    rate: FailureRate
    source: str
    """Source of the rate, in one line."""
    restart_seconds: float | None = None
    """Median of the restarts that the same logs have; None if they have none."""
    detection_seconds: float | None = None
    """Median time until a fault was noticed, in the same logs; None if they do not tell."""


@dataclass(frozen=True)
class Market:
    """Outcome of the run on on-demand GPUs, or on spot GPUs."""

    effective: Percentiles
    """Long-run share of the time spent on steps that are not lost. The percentiles reflect the uncertain failure rate
    only: a run that expects few failures may have none, or one more."""
    waste: Waste
    """Shares of the time that is not effective, at the median failure rate."""
    best_every: int | None
    """The optimal checkpoint.every; None if the inputs for it are unknown."""
    best_effective: float | None
    """Effective share with best_every, at the median failure rate."""
    days: Percentiles | None
    """None if the number of steps is unknown."""
    bill: Bill | None
    """Price of the run if it takes the median of `days`."""
    money: Percentiles | None

    @property
    def gpu_hours(self) -> float | None:
        return None if self.bill is None else self.bill.gpu_hours


@dataclass(frozen=True)
class Projection:
    """Duration, cost and goodput of the whole run with one candidate."""

    rate: AssumedFailureRate
    failures: Percentiles | None
    """Node failures in the whole run."""
    interruption_seconds: Percentiles
    """Mean time between node failures of the job."""
    save: Save
    demand: Market
    spot: Market | None
    """None if no spot price is given."""
    late: bool
    """The median duration on demand exceeds plan.deadline_days."""
    over_budget: bool
    """The median cost of the cheaper market exceeds plan.budget."""
    unknown: tuple[str, ...]
    """Unknown inputs and what was assumed instead, one line each."""


def choose_failure_rate(plan: PlanConfig, ranks_per_node: int) -> AssumedFailureRate:
    """Use the site's own figure or logs, else published rates. Raises UserError for a file that is not a log."""
    prior = make_prior_failure_rate()
    if plan.failures_per_1000_node_days is not None:
        return AssumedFailureRate(
            prior.scaled_to(plan.failures_per_1000_node_days / 1000), "plan.failures_per_1000_node_days"
        )
    if not plan.failure_logs:
        sites = ", ".join(f"{site.site} {site.per_1000_node_days:.1f}" for site in PUBLISHED_RATES)
        return AssumedFailureRate(
            prior, f"published, per 1,000 node-days: {sites}; set plan.failure_logs to use your site's own"
        )
    log = read_logs(plan.failure_logs, ranks_per_node)
    counts = f"plan.failure_logs: {log.by_node} node failures in {log.node_days:.0f} node-days of {log.runs} jobs"
    unexplained = f"; {log.unexplained} jobs failed for unknown reasons, not counted" if log.unexplained else ""
    restart = median(log.restarts) if log.restarts else None
    measured = f"; {len(log.restarts)} restarts took {restart:.0f} s (median)" if restart is not None else ""
    detection = median(log.detections) if log.detections else None
    noticed = f"; faults were noticed after {detection:.0f} s (median)" if detection is not None else ""
    source = counts + unexplained + measured + noticed
    return AssumedFailureRate(prior.after(log.history), source, restart, detection)


def count_planned_steps(config: RunConfig, tokens_per_step: float) -> int | None:
    """Return the steps of the planned run; None if neither plan.tokens nor train.steps is set."""
    if config.plan.tokens is not None:
        return math.ceil(config.plan.tokens / tokens_per_step)
    return config.train.steps


def project_run(config: RunConfig, job: ProjectedJob, rate: AssumedFailureRate | None = None) -> Projection:
    """Project duration and cost of a run. rate: failure rate, if already chosen (many candidates share one)."""
    plan = config.plan
    rate = rate or choose_failure_rate(plan, config.cluster.ranks_per_node)
    saving = estimate_saving(config, job.parameters, job.ranks)
    projector = _Projector(config, job, saving, rate, count_planned_steps(config, job.tokens_per_step))
    demand = projector.project(spot=False)
    spot = projector.project(spot=True) if plan.spot_price_per_gpu_hour is not None else None
    costs = [market.money.p50 for market in (demand, spot) if market is not None and market.money is not None]
    return Projection(
        rate=rate,
        failures=rate.rate.failures(job.nodes, demand.days.p50) if demand.days else None,
        interruption_seconds=rate.rate.interruption_seconds(job.nodes),
        save=saving.save,
        demand=demand,
        spot=spot,
        late=bool(plan.deadline_days and demand.days and demand.days.p50 > plan.deadline_days),
        over_budget=bool(plan.budget and costs and min(costs) > plan.budget),
        unknown=(*saving.unknown, *_list_unknowns(config, job, projector.steps)),
    )


def _list_unknowns(config: RunConfig, job: ProjectedJob, steps: int | None) -> list[str]:
    plan, lines = config.plan, []
    if steps is None and config.train.epochs is not None:
        lines.append("train.epochs: the number of steps depends on the data; set plan.tokens to get days and costs")
    elif steps is None:
        lines.append("plan.tokens and train.steps: set one of them to get days and costs")
    if plan.price_per_gpu_hour is None and plan.spot_price_per_gpu_hour is None:
        lines.append("plan.price_per_gpu_hour: not set, costs are in GPU hours")
    if 1 < job.nodes <= _SMALL_NODES:
        lines.append("causes other than nodes: RSC-1's jobs of 1,024 GPUs failed every 7.9 h, by nodes every 29 h only")
    if plan.repair_hours is None:
        lines.append("plan.repair_hours: not set, a free node is assumed whenever one fails")
    return lines


@dataclass(frozen=True)
class _Projector:
    """Projects one job on one market after the other."""

    config: RunConfig
    job: ProjectedJob
    saving: SaveCost
    assumed: AssumedFailureRate
    steps: int | None

    @property
    def rate(self) -> FailureRate:
        return self.assumed.rate

    def project(self, spot: bool) -> Market:
        rate = self.rate.percentiles
        # Every percentile of the failure rate gives one of goodput, duration and money, since these are monotone in it.
        share = rate.through(lambda rate: self._compute_effective(self._interval, rate, spot))
        best = self._find_best_every(rate.p50, spot)
        seconds = self._project_seconds(share)
        days = None if seconds is None else seconds.through(lambda duration: duration / DAY)
        money = (
            None
            if seconds is None
            else seconds.through(lambda duration: self._compute_bill(duration, spot).money or 0.0)
        )
        bill = None if seconds is None else self._compute_bill(seconds.p50, spot)
        return Market(
            effective=share,
            waste=break_down_waste(self._interval, self.save, self._restart, self._list_interruptions(rate.p50, spot)),
            best_every=best,
            best_effective=None if best is None else self._compute_effective(best * self._step, rate.p50, spot),
            days=days,
            bill=bill,
            money=None if bill is None or bill.money is None else money,
        )

    @property
    def save(self) -> Save:
        return self.saving.save

    @property
    def _step(self) -> float:
        return self.job.step_seconds.p50

    @property
    def _restart(self) -> float:
        if self.config.plan.restart_minutes is not None:
            return self.config.plan.restart_minutes * 60
        return self.assumed.restart_seconds or _RESTART_SECONDS

    @property
    def _detection(self) -> float:
        """Seconds from a fault until it is noticed."""
        if self.config.plan.detection_minutes is not None:
            return self.config.plan.detection_minutes * 60
        return _DETECTION_SECONDS if self.assumed.detection_seconds is None else self.assumed.detection_seconds

    @property
    def _interval(self) -> float:
        """Seconds of steps between two saves; all of them if the run never saves."""
        steps = [count for count in (self.config.checkpoint.every, self.steps) if count]
        return min(steps) * self._step if steps else _ENDLESS

    def _compute_effective(self, interval: float, rate: float, spot: bool) -> float:
        return float(effective_share(interval, self.save, self._restart, self._list_interruptions(rate, spot)))

    def _find_best_every(self, rate: float, spot: bool) -> int | None:
        """Return the optimal checkpoint.every, at least 1; None if the duration of a save is unknown."""
        if not self.save.write_seconds:
            return None
        seconds = float(best_interval(self.save, self._restart, self._list_interruptions(rate, spot)))
        return max(1, round(seconds / self._step)) if math.isfinite(seconds) else None

    def _list_interruptions(self, rate: float, spot: bool) -> list[Interruption]:
        """List the kinds of interruption. rate: failures per node-day."""
        plan = self.config.plan
        failing = rate * self.job.nodes / DAY
        repair = None if plan.repair_hours is None else plan.repair_hours * HOUR
        wait = 0.0 if repair is None else float(spare_wait_seconds(failing, repair, plan.spare_nodes))
        kinds = [Interruption(failing, self._detection + wait)]
        save_seconds = float(self.save.write_seconds)
        if plan.planned_interruptions_per_day:
            kinds.append(Interruption(plan.planned_interruptions_per_day / DAY, save_seconds, saved=True))
        if spot and plan.spot_interruptions_per_1000_node_days is not None:
            spot_rate = plan.spot_interruptions_per_1000_node_days / 1000 * self.job.nodes / DAY
            # A notice helps only if a save surely fits in it.
            saved = self.saving.write_known and save_seconds <= plan.spot_notice_seconds
            down = plan.spot_wait_minutes * 60 + (save_seconds if saved else 0.0)
            kinds.append(Interruption(spot_rate, down, saved=saved))
        return kinds

    def _project_seconds(self, share: Percentiles) -> Percentiles | None:
        """Return the duration of the whole run, first start included. Step time and failures are independent."""
        if self.steps is None:
            return None
        work = self.job.step_seconds.through(lambda seconds: seconds * (self.steps or 0))
        slowed = share.through(lambda effective: 1 / max(effective, 1e-9))
        return work.times(slowed).through(lambda seconds: seconds + self._restart)

    def _compute_bill(self, seconds: float, spot: bool) -> Bill:
        plan, job = self.config.plan, self.job
        spare = plan.spare_nodes * job.ranks / job.nodes
        stored = stored_bytes(self.config, job.parameters) if plan.storage.tib is None else plan.storage.tib * TIB
        return compute_bill(job.ranks, seconds, Prices.from_config(plan, spot), stored, spare)
