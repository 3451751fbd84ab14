"""parallel=auto: the planner's best candidate in place of what was left open, and why it is the best."""

from __future__ import annotations

import json
from dataclasses import dataclass

from hpc_train.config.model import CustomModelConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.parallel.rules.check import check_support
from hpc_train.planner.candidate import Candidate, describe_layout, describe_techniques
from hpc_train.planner.output.plan_json import plan_to_json
from hpc_train.planner.plan import Plan, known_figures, make_plan
from hpc_train.planner.request import make_job_request
from hpc_train.planner.search.baseline_layouts import fallback_settings
from hpc_train.planner.settings import apply_settings
from hpc_train.units import GIB, format_seconds


@dataclass(frozen=True)
class ParallelChoice:
    """What parallel=auto has become."""

    config: RunConfig
    """With every degree in it, and nothing left to choose."""
    line: str
    """Why, in one line."""
    text: str
    """The same at length, as JSON: plan.json of the run directory."""


def choose_parallel(config: RunConfig, ranks: int | None = None) -> ParallelChoice:
    """The run with the best candidate. ranks: of the job; None: as many nodes as the configuration or the planner says.

    A machine whose accelerators are not described is not guessed at: data parallelism then, the simplest that fits as
    far as that is known. Raises UserError where nothing fits.
    """
    if isinstance(config.model, CustomModelConfig):
        return _choose_fallback(config, ranks, "only the model itself knows its shape")
    if not known_figures(config).speed and not known_figures(config).memory:
        where = f"cluster={config.cluster.name} does not describe its accelerators"
        return _choose_fallback(config, ranks, where)
    found = make_plan(make_job_request(config, ranks), top=5)
    for it in found.candidates:
        if it.fits != "no":
            check_support(it.config, it.ranks)
            return ParallelChoice(
                it.config, _explain_choice(found, it), json.dumps(plan_to_json(found), indent=1) + "\n"
            )
    if found.outside:
        raise UserError(f"parallel=auto: {found.outside}")
    world = "any number of its nodes" if ranks is None else f"{ranks} ranks"
    raise UserError(
        f"parallel=auto: model={config.model.name} fits on {world} of cluster={config.cluster.name} in no way that is "
        "left open; use more nodes, or see `hpc-train plan`"
    )


def _choose_fallback(config: RunConfig, ranks: int | None, why: str) -> ParallelChoice:
    """The first way that the run can have at all."""
    world = ranks or make_job_request(config, ranks).ranks[0]
    settings = next(fallback_settings(config, world))
    chosen = apply_settings(config, settings)
    line = f"parallel=auto: {chosen.parallel.strategy}, the simplest: {why}"
    return ParallelChoice(chosen, line, json.dumps({"best": None, "candidates": [], "notes": [line]}, indent=1) + "\n")


def _explain_choice(found: Plan, it: Candidate) -> str:
    config, more = it.config, describe_techniques(it)
    held = f"{it.total / GIB:.1f} of {it.capacity / GIB:.0f} GiB" if it.capacity else f"{it.total / GIB:.1f} GiB"
    doubt = ", which may not fit," if it.fits == "maybe" else ""
    if it.step is None:
        basis = "the simplest that fits, as the accelerator's speed is not known"
    else:
        basis = f"{format_seconds(it.step.p50)} a step, the best of {found.searched:,} candidates"
    what = f"{describe_layout(it)}, micro-batch {config.train.micro_batch}{', ' + more if more else ''}"
    return f"parallel=auto: {what}: {basis}, {held}{doubt} (plan.json)"
