"""advice: all lints, over one configuration."""

from __future__ import annotations

from collections.abc import Callable

from hpc_train.config.run import RunConfig
from hpc_train.planner.advice import batch_size, layout, operation, shape
from hpc_train.planner.advice.facts import Facts, Figures, facts_of
from hpc_train.planner.advice.result import SEVERITIES, Advice
from hpc_train.planner.advice.runnable import only_runnable

Lint = Callable[[Facts], Advice | None]

LINTS: tuple[Lint, ...] = (
    shape.head_width,
    shape.hidden_width,
    shape.feed_forward_width,
    shape.vocabulary,
    shape.precision,
    layout.tensor_divides,
    layout.tensor_shares_keys,
    layout.tensor_domain,
    layout.uneven_stages,
    layout.rounds,
    layout.bubble,
    layout.launch_bound,
    layout.needless_recompute,
    layout.needless_offload,
    batch_size.past_critical,
    batch_size.scaling_without_warmup,
    batch_size.wrong_rule,
    batch_size.no_warmup,
    batch_size.rate_off_law,
    operation.never_saves,
    operation.interval_off,
    operation.blocking_saves,
    operation.no_spares,
    operation.late,
    operation.over_budget,
    operation.spot_dearer,
)
"""In the order in which they are told, within a severity."""


def advice(config: RunConfig, figures: Figures | None = None, world: int | None = None) -> list[Advice]:
    """What to change, errors first; [] if nothing.

    figures: what has been estimated of the run; lints that need what is not there say nothing. world: ranks; None:
    those of the configuration. Raises UserError for degrees that do not fit the world, and for a failure log that is
    none.
    """
    facts = facts_of(config, figures, world)
    found = [only_runnable(it, config, facts.degrees.world) for it in (lint(facts) for lint in LINTS) if it is not None]
    return sorted(found, key=lambda it: SEVERITIES.index(it.severity))
