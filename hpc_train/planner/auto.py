"""Resolve parallel=auto: choose the planner's best candidate and say why."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from hpc_train.config.model import CustomModelConfig, HfModelConfig
from hpc_train.config.run import RunConfig
from hpc_train.config.schema import seal_config
from hpc_train.errors import UserError
from hpc_train.models.hf.decoder_shape import describe_decoder
from hpc_train.parallel.rules.check import check_support
from hpc_train.planner.candidate import Candidate
from hpc_train.planner.candidate_text import describe_candidate
from hpc_train.planner.output.plan_json import plan_to_json
from hpc_train.planner.plan import Plan, known_figures, make_plan
from hpc_train.planner.request import make_job_request
from hpc_train.planner.search.baseline_layouts import fallback_settings
from hpc_train.planner.settings import apply_settings
from hpc_train.units import GIB, format_seconds


@dataclass(frozen=True)
class ParallelChoice:
    """The layout that the planner chose for parallel=auto."""

    config: RunConfig
    """The run with all degrees set."""
    line: str
    """Why this layout was chosen, in one line."""
    text: str
    """The whole plan as JSON: plan.json of the run directory."""


def choose_parallel(config: RunConfig, ranks: int | None = None) -> ParallelChoice:
    """Return the run with the planner's best candidate.

    ranks: the job's; None: the configuration or the planner chooses the nodes. If the cluster does not describe its
    accelerators, nothing is guessed: the run gets the simplest data parallelism that it supports. Raises UserError if
    nothing fits.
    """
    if isinstance(config.model, CustomModelConfig):
        return _choose_fallback(config, ranks, "only the model itself knows its shape")
    if not known_figures(config).speed and not known_figures(config).memory:
        why = f"cluster={config.cluster.name} does not describe its accelerators"
        return _choose_fallback(config, ranks, why)
    if isinstance(config.model, HfModelConfig):
        try:
            describe_decoder(config.model)
        except UserError as error:
            return _choose_fallback(config, ranks, str(error).rpartition(";")[0])
    plan = make_plan(make_job_request(config, ranks), top=5)
    for candidate in plan.candidates:
        if candidate.fits != "no":
            chosen = seal_config(replace(candidate.config, model=config.model))
            check_support(chosen, candidate.ranks)
            text = json.dumps(plan_to_json(plan), indent=1) + "\n"
            return ParallelChoice(chosen, _explain_choice(plan, candidate), text)
    if plan.outside:
        raise UserError(f"parallel=auto: {plan.outside}")
    world = "any number of its nodes" if ranks is None else f"{ranks} ranks"
    raise UserError(
        f"parallel=auto: model={config.model.name} fits on {world} of cluster={config.cluster.name} in no layout that "
        "the fixed settings allow; use more nodes, or see `hpc-train plan`"
    )


def _choose_fallback(config: RunConfig, ranks: int | None, why: str) -> ParallelChoice:
    """Return the simplest layout that the run supports."""
    world = ranks or make_job_request(config, ranks).ranks[0]
    chosen = apply_settings(config, next(fallback_settings(config, world)))
    line = f"parallel=auto: {chosen.parallel.strategy}, the simplest: {why}"
    return ParallelChoice(chosen, line, json.dumps({"best": None, "candidates": [], "notes": [line]}, indent=1) + "\n")


def _explain_choice(plan: Plan, candidate: Candidate) -> str:
    memory = f"{candidate.total / GIB:.1f} GiB"
    if candidate.capacity:
        memory = f"{candidate.total / GIB:.1f} of {candidate.capacity / GIB:.0f} GiB"
    doubt = ", which may not fit," if candidate.fits == "maybe" else ""
    if candidate.step is None:
        basis = "the simplest that fits, because the accelerator's speed is unknown"
    else:
        basis = f"{format_seconds(candidate.step.p50)} per step, the best of {plan.searched:,} candidates"
    return f"parallel=auto: {describe_candidate(candidate)}: {basis}, {memory}{doubt} (plan.json)"
