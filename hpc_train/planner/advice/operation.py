"""Lints of operating a run: checkpoints, failures, spare nodes, deadline and budget.

A lint is a function from RunFacts to one Advice or None; lints.LINTS lists them all, in the order of printing.
"""

from __future__ import annotations

from hpc_train.planner.advice.facts import Advice, RunFacts
from hpc_train.planner.reliability.failure_rate import DAY
from hpc_train.planner.reliability.goodput import spare_wait_seconds
from hpc_train.planner.reliability.projection import HOUR, count_planned_steps
from hpc_train.units import format_amount

_INTERVAL_FACTOR = 2.0
"""A checkpoint.every this many times longer or shorter than the optimum is reported, if it also costs _MIN_LOSS."""
_MIN_LOSS = 0.005
"""A smaller loss, as a share of the job's time, is not reported."""
_LARGE_NODES = 128
"""1,024 GPUs: RSC-1's jobs of that size were interrupted every 7.9 hours (arXiv:2410.21680)."""
_MAX_SPARES = 64
"""No more spare nodes are recommended."""


def check_never_saves(facts: RunFacts) -> Advice | None:
    """Report a run that never saves although a node may fail during it."""
    outlook, job = facts.outlook, facts.figures.job
    steps = None if job is None else count_planned_steps(facts.config, job.tokens_per_step)
    if facts.config.checkpoint.every or outlook is None or job is None or steps is None:
        return None
    days = steps * job.step_seconds.p50 / DAY
    expected = outlook.rate.rate.mean * facts.nodes * days
    if expected < 0.01:
        return None
    every = outlook.demand.best_every
    fix = f"checkpoint.every={every}" if every else "checkpoint.every=100, or as many steps as you can afford to lose"
    why = f"nothing is saved, and about {expected:.2g} node failures are expected in {days:.3g} days of steps"
    return Advice("checkpoint.every", why, fix, "warning")


def check_save_interval(facts: RunFacts) -> Advice | None:
    """Report a checkpoint.every far from the optimum."""
    outlook, every = facts.outlook, facts.config.checkpoint.every
    if outlook is None or not every or outlook.demand.best_every is None or outlook.demand.best_effective is None:
        return None
    best, gain = outlook.demand.best_every, outlook.demand.best_effective - outlook.demand.effective.p50
    if gain < _MIN_LOSS or 1 / _INTERVAL_FACTOR < every / best < _INTERVAL_FACTOR:
        return None
    step = facts.figures.job.step_seconds.p50 if facts.figures.job else 0.0
    mean = outlook.interruption_seconds.p50 / HOUR
    why = (
        f"a save every {every} steps ({every * step / 60:.3g} minutes), a failure every {format_amount(mean)} hours "
        f"and {float(outlook.save.stall_seconds):.2g} s of stall a save, wastes {gain:.1%} more time than the optimum"
    )
    return Advice("checkpoint.every", why, f"checkpoint.every={best} ({best * step / 60:.3g} minutes)", "warning")


def check_blocking_saves(facts: RunFacts) -> Advice | None:
    """Report saves that training waits for, if they cost much time."""
    outlook, checkpoint = facts.outlook, facts.config.checkpoint
    if outlook is None or not checkpoint.every or checkpoint.background:
        return None
    share = float(outlook.demand.waste.saving)
    if share < _MIN_LOSS:
        return None
    why = f"training waits {float(outlook.save.stall_seconds):.3g} s for every save, {share:.1%} of the time"
    return Advice("checkpoint.background", why, "checkpoint.background=true", "warning")


def check_spares(facts: RunFacts) -> Advice | None:
    """Report a large job without spare nodes, or with too few of them."""
    plan, cluster, outlook = facts.config.plan, facts.config.cluster, facts.outlook
    if outlook is None:
        return None
    failing = outlook.rate.rate.mean * facts.nodes / DAY
    if plan.repair_hours is not None:
        return _recommend_spares(facts, failing, plan.repair_hours * HOUR)
    if plan.spare_nodes or facts.nodes < _LARGE_NODES:
        return None
    week = failing * 7 * DAY
    whole_machine = cluster.total_nodes and facts.nodes > 0.98 * cluster.total_nodes
    where = "the job uses all nodes of the machine" if whole_machine else "unless the scheduler always has a free one"
    why = f"{facts.nodes} nodes and no spare node, {where}: about {week:.2g} failures a week stop it until a repair"
    fix = "keep spare nodes (plan.spare_nodes); set plan.repair_hours to see what waiting for repairs costs"
    return Advice("plan.spare_nodes", why, fix, "warning" if whole_machine else "hint")


def _recommend_spares(facts: RunFacts, failing: float, repair: float) -> Advice | None:
    """Recommend more spare nodes if waiting for repairs costs much. failing: failures a second; repair: seconds."""
    have = facts.config.plan.spare_nodes

    def compute_waiting_share(spares: int) -> float:
        """Return the share of the time that the job waits for a node."""
        wait = float(spare_wait_seconds(failing, repair, spares))
        return failing * wait / (1 + failing * wait)

    if compute_waiting_share(have) < _MIN_LOSS:
        return None
    enough = next((n for n in range(have + 1, _MAX_SPARES) if compute_waiting_share(n) < _MIN_LOSS / 5), _MAX_SPARES)
    why = f"with {have} spare nodes the job waits {compute_waiting_share(have):.1%} of the time for one to be repaired"
    share = enough / (facts.nodes + enough)
    fix = f"plan.spare_nodes={enough} ({share:.1%} of the nodes): it then waits {compute_waiting_share(enough):.2%}"
    return Advice("plan.spare_nodes", why, fix, "warning")


def check_deadline(facts: RunFacts) -> Advice | None:
    """Report a run that is expected to end after plan.deadline_days."""
    outlook, deadline = facts.outlook, facts.config.plan.deadline_days
    if outlook is None or not outlook.late or outlook.demand.days is None or deadline is None:
        return None
    days = outlook.demand.days
    why = f"the run takes {days.p50:.3g} days ({days.p10:.3g} to {days.p90:.3g}); {deadline:g} are allowed"
    more = -(-facts.nodes * days.p50 // deadline)
    return Advice(
        "plan.deadline_days", why, f"at least {more:.0f} nodes instead of {facts.nodes}, or fewer tokens", "error"
    )


def check_budget(facts: RunFacts) -> Advice | None:
    """Report a run that costs more than plan.budget, even on the cheaper of on-demand and spot."""
    outlook, plan = facts.outlook, facts.config.plan
    if outlook is None or not outlook.over_budget or plan.budget is None:
        return None
    ways = [
        market.money for market in (outlook.demand, outlook.spot) if market is not None and market.money is not None
    ]
    money = min(ways, key=lambda money: money.p50)
    why = f"the run costs {money.p50:.4g} ({money.p10:.4g} to {money.p90:.4g}); the budget is {plan.budget:.4g}"
    tokens = facts.tokens
    cheaper = f"plan.tokens={tokens * plan.budget / money.p50:.2g}, or " if tokens else ""
    return Advice(
        "plan.budget", why, f"{cheaper}a more efficient layout: fewer GPUs cost less in total, but take longer", "error"
    )


def check_spot_price(facts: RunFacts) -> Advice | None:
    """Report spot GPUs that cost more than on-demand ones once interruptions are counted."""
    outlook = facts.outlook
    if outlook is None or outlook.spot is None or outlook.spot.money is None or outlook.demand.money is None:
        return None
    spot, demand = outlook.spot.money.p50, outlook.demand.money.p50
    if spot < demand:
        return None
    why = (
        f"spot nodes spend {outlook.spot.effective.p50:.0%} of the time on useful steps, on-demand nodes "
        f"{outlook.demand.effective.p50:.0%}; in total spot costs {spot / demand:.3g} times as much"
    )
    return Advice("plan.spot_price_per_gpu_hour", why, "on-demand GPUs, or a smaller job on spot GPUs", "warning")
