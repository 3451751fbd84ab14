"""Lints of running it: checkpoints, failures, spare nodes, goals."""

from __future__ import annotations

from hpc_train.planner.advice.facts import Advice, RunFacts
from hpc_train.planner.reliability.failure_rate import DAY
from hpc_train.planner.reliability.goodput import spare_wait_seconds
from hpc_train.planner.reliability.projection import HOUR, planned_steps
from hpc_train.units import format_amount

_OFF = 2.0
"""checkpoint.every, over the best or under it, from which it is worth a word, if it also costs _SHARE."""
_SHARE = 0.005
"""Of the time of a job, below which a loss is not worth a word."""
_LARGE_NODES = 128
"""1,024 GPUs: RSC-1's jobs of that size were interrupted every 7.9 hours (arXiv:2410.21680)."""
_MOST_SPARES = 64


def check_never_saves(facts: RunFacts) -> Advice | None:
    """checkpoint.every=0 in a run that a failure may hit."""
    told, job = facts.outlook, facts.figures.job
    steps = None if job is None else planned_steps(facts.config, job.tokens_per_step)
    if facts.config.checkpoint.every or told is None or job is None or steps is None:
        return None
    days = steps * job.step_seconds.p50 / DAY
    expected = told.rate.rate.mean * facts.nodes * days
    if expected < 0.01:
        return None
    every = told.demand.best_every
    fix = f"checkpoint.every={every}" if every else "checkpoint.every=100, or as many steps as can be lost"
    why = f"nothing is saved, and {expected:.2g} failures of nodes are to be expected in {days:.3g} days of steps"
    return Advice("checkpoint.every", why, fix, "warning")


def check_save_interval(facts: RunFacts) -> Advice | None:
    """checkpoint.every off the Young/Daly optimum."""
    told, every = facts.outlook, facts.config.checkpoint.every
    if told is None or not every or told.demand.best_every is None or told.demand.best_effective is None:
        return None
    best, gain = told.demand.best_every, told.demand.best_effective - told.demand.effective.p50
    if gain < _SHARE or 1 / _OFF < every / best < _OFF:
        return None
    step = facts.figures.job.step_seconds.p50 if facts.figures.job else 0.0
    mean = told.interruption_seconds.p50 / HOUR
    why = (
        f"a save every {every} steps ({every * step / 60:.3g} minutes), with a "
        f"failure every {format_amount(mean)} hours and "
        f"{float(told.save.stall_seconds):.2g} s of stall, wastes {gain:.1%} of the time more than need be"
    )
    return Advice("checkpoint.every", why, f"checkpoint.every={best} ({best * step / 60:.3g} minutes)", "warning")


def check_blocking_saves(facts: RunFacts) -> Advice | None:
    """Saves that training waits for."""
    told, checkpoint = facts.outlook, facts.config.checkpoint
    if told is None or not checkpoint.every or checkpoint.background:
        return None
    share = float(told.demand.waste.saving)
    if share < _SHARE:
        return None
    why = f"training waits {float(told.save.stall_seconds):.3g} s for every save, {share:.1%} of the time"
    return Advice("checkpoint.background", why, "checkpoint.background=true", "warning")


def check_spares(facts: RunFacts) -> Advice | None:
    """A large job with no node to go on with."""
    plan, cluster, told = facts.config.plan, facts.config.cluster, facts.outlook
    if told is None:
        return None
    failing = told.rate.rate.mean * facts.nodes / DAY
    if plan.repair_hours is not None:
        return _more_spares(facts, failing, plan.repair_hours * HOUR)
    if plan.spare_nodes or facts.nodes < _LARGE_NODES:
        return None
    week = failing * 7 * DAY
    all_of_it = cluster.total_nodes and facts.nodes > 0.98 * cluster.total_nodes
    where = "it takes all nodes of the machine" if all_of_it else "unless the scheduler always has another one"
    why = f"{facts.nodes} nodes and none to spare, {where}: about {week:.2g} failures a week stop it until a repair"
    fix = "leave nodes free (plan.spare_nodes), and set plan.repair_hours to see what waiting costs"
    return Advice("plan.spare_nodes", why, fix, "warning" if all_of_it else "hint")


def _more_spares(facts: RunFacts, failing: float, repair: float) -> Advice | None:
    have = facts.config.plan.spare_nodes

    def waiting(spares: int) -> float:
        """Share of the time between failures and waits."""
        wait = float(spare_wait_seconds(failing, repair, spares))
        return failing * wait / (1 + failing * wait)

    if waiting(have) < _SHARE:
        return None
    enough = next((n for n in range(have + 1, _MOST_SPARES) if waiting(n) < _SHARE / 5), _MOST_SPARES)
    why = f"with {have} spare nodes the job waits {waiting(have):.1%} of the time for one to be repaired"
    share = enough / (facts.nodes + enough)
    fix = f"plan.spare_nodes={enough} ({share:.1%} of the nodes): it then waits {waiting(enough):.2%}"
    return Advice("plan.spare_nodes", why, fix, "warning")


def check_deadline(facts: RunFacts) -> Advice | None:
    """Past the deadline."""
    told, deadline = facts.outlook, facts.config.plan.deadline_days
    if told is None or not told.late or told.demand.days is None or deadline is None:
        return None
    days = told.demand.days
    why = f"it takes {days.p50:.3g} days ({days.p10:.3g} to {days.p90:.3g}), and {deadline:g} are allowed"
    more = -(-facts.nodes * days.p50 // deadline)
    return Advice(
        "plan.deadline_days", why, f"at least {more:.0f} nodes in place of {facts.nodes}, or fewer tokens", "error"
    )


def check_budget(facts: RunFacts) -> Advice | None:
    """Past the budget, in the cheapest way there is."""
    told, plan = facts.outlook, facts.config.plan
    if told is None or not told.over_budget or plan.budget is None:
        return None
    ways = [it.money for it in (told.demand, told.spot) if it is not None and it.money is not None]
    money = min(ways, key=lambda it: it.p50)
    why = f"it costs {money.p50:.4g} ({money.p10:.4g} to {money.p90:.4g}), and {plan.budget:.4g} are there"
    tokens = facts.tokens
    less = f"plan.tokens={tokens * plan.budget / money.p50:.2g}, or " if tokens else ""
    return Advice("plan.budget", why, f"{less}a faster layout: fewer GPUs are more efficient, if slower", "error")


def check_spot_price(facts: RunFacts) -> Advice | None:
    """Spot GPUs that cost more than others once interruptions are counted."""
    told = facts.outlook
    if told is None or told.spot is None or told.spot.money is None or told.demand.money is None:
        return None
    spot, demand = told.spot.money.p50, told.demand.money.p50
    if spot < demand:
        return None
    why = (
        f"spot nodes keep {told.spot.effective.p50:.0%} of the time against {told.demand.effective.p50:.0%}, and cost "
        f"{spot / demand:.3g} times as much in the end"
    )
    return Advice("plan.spot_price_per_gpu_hour", why, "GPUs on demand, or a smaller job on spot ones", "warning")
