"""Outlook: how long a run will really take and what it will cost, failures, saves and prices counted."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpc_train.config.plan import PlanConfig
from hpc_train.config.run import RunConfig
from hpc_train.planner.band import Band
from hpc_train.planner.cost import HOUR, Bill, Prices, bill
from hpc_train.planner.failures import read_logs
from hpc_train.planner.goodput import Interruption, Save, Waste, best_interval, effective, spare_wait, waste
from hpc_train.planner.reliability import DAY, PUBLISHED, FailureRate, prior
from hpc_train.planner.saves import Saving, kept_bytes, saving_of

_SMALL_NODES = 128
"""Nodes of the largest jobs that arXiv:2410.21680 found interrupted more by other causes than by nodes."""
_ENDLESS = 1e12
"""Seconds between saves where there are none and the length of the run is not known."""


@dataclass(frozen=True)
class Job:
    """What the planner has estimated of one candidate."""

    ranks: int
    """One a GPU."""
    nodes: int
    step_seconds: Band
    """Without saving: `outlook` adds that."""
    tokens_per_step: float
    parameters: float


@dataclass(frozen=True)
class Rate:
    """How often nodes fail, and who says so."""

    rate: FailureRate
    source: str
    """One line."""


@dataclass(frozen=True)
class Market:
    """One way of having the GPUs: on demand, or spot."""

    effective: Band
    """Share of the time that goes into steps that are kept, in the long run: what is not known is the rate of failures.
    A run that expects few may have none, or one too many."""
    waste: Waste
    """Where the rest goes, at the middle of what is known of failures."""
    best_every: int | None
    """checkpoint.every that wastes least; None where the figures do not tell."""
    best_effective: float | None
    """The effective share at it, at the middle."""
    days: Band | None
    """None where the number of steps is not known."""
    bill: Bill | None
    """At the middle of `days`."""
    money: Band | None

    @property
    def gpu_hours(self) -> float | None:
        return None if self.bill is None else self.bill.gpu_hours


@dataclass(frozen=True)
class Outlook:
    """Of one candidate."""

    rate: Rate
    failures: Band | None
    """Of nodes, in the whole run."""
    interruption_seconds: Band
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


def rate_of(plan: PlanConfig, ranks_per_node: int) -> Rate:
    """From the site's own figure or logs, or else from published ones. Raises UserError for a log that is none."""
    before = prior()
    if plan.failures_per_1000_node_days is not None:
        return Rate(before.scaled_to(plan.failures_per_1000_node_days / 1000), "plan.failures_per_1000_node_days")
    if not plan.failure_logs:
        sites = ", ".join(f"{it.site} {it.per_1000_node_days:.1f}" for it in PUBLISHED)
        return Rate(before, f"published, per 1,000 node-days: {sites}; give plan.failure_logs for your own")
    log = read_logs(plan.failure_logs, ranks_per_node)
    told = f"plan.failure_logs: {log.by_node} failures of nodes in {log.node_days:.0f} node-days of {log.runs} jobs"
    more = f"; {log.unexplained} jobs failed for unknown reasons, not counted" if log.unexplained else ""
    return Rate(before.after(log.history), told + more)


def steps_of(config: RunConfig, tokens_per_step: float) -> int | None:
    """Return the steps of the planned run; None if nobody gave them, or only the data tells (train.epochs)."""
    if config.plan.tokens is not None:
        return math.ceil(config.plan.tokens / tokens_per_step)
    return config.train.steps


def outlook(config: RunConfig, job: Job, rate: Rate | None = None) -> Outlook:
    """rate: of rate_of, where many candidates share it."""
    plan = config.plan
    rate = rate or rate_of(plan, config.cluster.ranks_per_node)
    saving = saving_of(config, job.parameters, job.ranks)
    case = _Case(config, job, saving, rate.rate, steps_of(config, job.tokens_per_step))
    demand = case.market(spot=False)
    spot = case.market(spot=True) if plan.spot_price_per_gpu_hour is not None else None
    costs = [it.money.p50 for it in (demand, spot) if it is not None and it.money is not None]
    return Outlook(
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


def _unknown(config: RunConfig, job: Job, steps: int | None) -> list[str]:
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
    """One job, and what its ways of having GPUs share."""

    config: RunConfig
    job: Job
    saving: Saving
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
            waste=waste(self._interval, self.save, self._restart, self._kinds(band.p50, spot)),
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
        return float(effective(interval, self.save, self._restart, self._kinds(rate, spot)))

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
        wait = 0.0 if repair is None else float(spare_wait(failing, repair, plan.spare_nodes))
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

    def _seconds(self, share: Band) -> Band | None:
        """Of the whole run, the first start included; the speed of a step and failures are independent."""
        if self.steps is None:
            return None
        work = self.job.step_seconds.through(lambda it: it * (self.steps or 0))
        slowed = share.through(lambda it: 1 / max(it, 1e-9))
        return work.times(slowed).through(lambda it: it + self._restart)

    def _bill(self, seconds: float, spot: bool) -> Bill:
        plan, job = self.config.plan, self.job
        spare = plan.spare_nodes * job.ranks / job.nodes
        stored = kept_bytes(self.config, job.parameters) if plan.storage.tib is None else plan.storage.tib * 2**40
        return bill(job.ranks, seconds, Prices.of(plan, spot), stored, spare)
