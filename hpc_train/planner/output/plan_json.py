"""A plan as JSON, for `hpc-train plan --json` and plan.json of a run directory, and the command that runs it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hpc_train.planner.advice.facts import advice_to_json
from hpc_train.planner.candidate import STAGES, Candidate
from hpc_train.planner.plan import Plan
from hpc_train.planner.reliability.failure_rate import Percentiles
from hpc_train.planner.reliability.projection import Market, Projection
from hpc_train.planner.settings import settings_to_overrides
from hpc_train.units import GIB

_PLANNERS = ("parallel.auto", "parallel.fixed")
"""Keys that only ask the planner to choose."""


def make_command_words(overrides: Sequence[str], config_dir: str | None, candidate: Candidate) -> list[str]:
    """Return the command's words, unquoted: the whole run, so composing it gives the candidate's configuration.

    overrides: those given to `hpc-train plan`. The candidate's settings replace those given for the same key; keys that
    ask the planner to choose are left out.
    """
    settings = settings_to_overrides(candidate.settings)
    keys = {_get_key(word) for word in settings} | set(_PLANNERS)
    given = [word for word in overrides if _get_key(word) not in keys and word != "parallel=auto"]
    folder = ["--config-dir", config_dir] if config_dir else []
    return ["hpc-train", _choose_program(overrides, candidate), *folder, *given, *settings]


def make_command_line(overrides: Sequence[str], config_dir: str | None, candidate: Candidate) -> str:
    """Return one shell line."""
    return shlex.join(make_command_words(overrides, config_dir, candidate))


def _choose_program(overrides: Sequence[str], candidate: Candidate) -> str:
    """Return submit for a cluster, which selects launch=slurm by itself; train for this machine."""
    local = candidate.config.cluster.name == "local" or "launch" in {_get_key(word) for word in overrides}
    return "train" if local and candidate.config.launch.kind == "local" else "submit"


def _get_key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON. Bytes are in GiB; null means unknown.

    candidates: best first, also given as `best`; equal_to_best: indistinguishable from the quickest, of which the best
    is the simplest; command: runs the best.
    """
    return {
        "best": {**candidate_to_json(plan.best), "equal_to_best": True} if plan.best else None,
        "candidates": [
            {**candidate_to_json(other), "equal_to_best": plan.equals_best(other)} for other in plan.candidates
        ],
        "pareto": [candidate_to_json(point) for point in plan.front],
        "searched": plan.searched,
        "estimated": plan.estimated,
        "seconds": plan.seconds,
        "command": make_command_line(plan.overrides, plan.config_dir, plan.best) if plan.best else None,
        "familiar": [
            {"name": row.name, "why": row.why, "candidate": candidate_to_json(row.candidate) if row.candidate else None}
            for row in plan.baselines
        ],
        "advice": advice_to_json(plan.advice),
        "notes": plan.notes,
    }


def candidate_to_json(candidate: Candidate) -> dict[str, Any]:
    """Return one candidate as JSON."""
    rate = candidate.tokens_per_second
    return {
        "parallel": parallel_to_json(candidate),
        "overrides": settings_to_overrides(candidate.settings),
        "complexity": round(candidate.complexity, 4),
        "unmeasured": list(candidate.unmeasured),
        "nodes": candidate.nodes,
        "ranks": candidate.ranks,
        "global_batch": candidate.global_batch,
        "fits": candidate.fits,
        "memory_gib": _memory_to_json(candidate),
        "step_seconds": None if candidate.step is None else {**asdict(candidate.step), "parts": candidate.parts},
        "mfu": candidate.mfu,
        "hfu": candidate.hfu,
        "tokens_per_second_per_gpu": rate,
        "tokens_per_second": None if rate is None else rate * candidate.ranks,
        "outlook": _projection_to_json(candidate.projection),
    }


def parallel_to_json(candidate: Candidate) -> dict[str, Any]:
    """Return every setting of the layout and its techniques, the defaults too."""
    from hpc_train.config.parallel import resolve_degrees

    parallel = candidate.config.parallel
    pipeline, recompute, offload = parallel.pipeline, parallel.recompute, parallel.offload
    return {
        "strategy": parallel.strategy,
        **asdict(resolve_degrees(parallel, candidate.ranks)),
        "micro_batch": candidate.config.train.micro_batch,
        "tensor": {"sequence": parallel.tensor.sequence, "asynchronous": parallel.tensor.asynchronous},
        "pipeline": {"schedule": pipeline.schedule, "virtual_stages": pipeline.virtual_stages},
        "recompute": {"mode": recompute.mode, "every": recompute.every},
        "offload": {"optimizer": offload.optimizer, "parameters": offload.parameters},
        "reshard_after_forward": parallel.reshard_after_forward,
    }


def _memory_to_json(candidate: Candidate) -> dict[str, Any]:
    worst = max(range(len(STAGES)), key=lambda number: candidate.stages[number])
    by_stage = {
        stage: {name: part[number] / GIB for name, part in candidate.memory.items()}
        for number, stage in enumerate(STAGES)
    }
    return {
        "total": candidate.total / GIB,
        **by_stage[STAGES[worst]],
        "stage": STAGES[worst],
        "stages": by_stage,
        "device": None if candidate.capacity is None else candidate.capacity / GIB,
    }


def _projection_to_json(projection: Projection | None) -> dict[str, Any] | None:
    if projection is None:
        return None
    hours = projection.interruption_seconds.through(lambda seconds: seconds / 3600)
    return {
        "demand": _market_to_json(projection.demand),
        "spot": _market_to_json(projection.spot) if projection.spot else None,
        "failures": _percentiles_to_json(projection.failures),
        "hours_between_interruptions": _percentiles_to_json(hours),
        "failure_rate": projection.rate.source,
        "save": asdict(projection.save),
        "late": projection.late,
        "over_budget": projection.over_budget,
        "unknown": list(projection.unknown),
    }


def _market_to_json(market: Market) -> dict[str, Any]:
    bill = market.bill
    return {
        "goodput": _percentiles_to_json(market.effective),
        "waste": asdict(market.waste),
        "best_checkpoint_every": market.best_every,
        "days": _percentiles_to_json(market.days),
        "gpu_hours": market.gpu_hours,
        "money": _percentiles_to_json(market.money),
        "kwh": bill.kwh if bill else None,
        "co2_kg": bill.co2_kg if bill else None,
    }


def _percentiles_to_json(percentiles: Percentiles | None) -> dict[str, float] | None:
    return None if percentiles is None else asdict(percentiles)
