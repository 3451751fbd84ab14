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


def command_words(overrides: Sequence[str], config_dir: str | None, candidate: Candidate) -> list[str]:
    """Return the command's words, unquoted: the whole run, so composing it gives the candidate's configuration.

    overrides: those given to `hpc-train plan`. The candidate's settings replace those given for the same key; keys that
    ask the planner to choose are left out.
    """
    own = settings_to_overrides(candidate.settings)
    keys = {_key_of(word) for word in own} | set(_PLANNERS)
    given = [word for word in overrides if _key_of(word) not in keys and word != "parallel=auto"]
    folder = ["--config-dir", config_dir] if config_dir else []
    return ["hpc-train", _program(overrides, candidate), *folder, *given, *own]


def command_line(overrides: Sequence[str], config_dir: str | None, candidate: Candidate) -> str:
    """Return one shell line."""
    return shlex.join(command_words(overrides, config_dir, candidate))


def _program(overrides: Sequence[str], candidate: Candidate) -> str:
    """Return submit for a cluster, which selects launch=slurm by itself; train for this machine."""
    local = candidate.config.cluster.name == "local" or "launch" in {_key_of(word) for word in overrides}
    return "train" if local and candidate.config.launch.kind == "local" else "submit"


def _key_of(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def plan_to_json(answer: Plan) -> dict[str, Any]:
    """Return the answer as JSON. Bytes are in GiB; null means unknown.

    candidates: best first, also given as `best`; equal_to_best: indistinguishable from the quickest, of which the best
    is the simplest; command: runs the best.
    """
    return {
        "best": {**candidate_to_json(answer.best), "equal_to_best": True} if answer.best else None,
        "candidates": [{**candidate_to_json(it), "equal_to_best": answer.alike(it)} for it in answer.candidates],
        "pareto": [candidate_to_json(it) for it in answer.front],
        "searched": answer.searched,
        "estimated": answer.estimated,
        "seconds": answer.seconds,
        "command": command_line(answer.overrides, answer.config_dir, answer.best) if answer.best else None,
        "familiar": [
            {"name": it.name, "why": it.why, "candidate": candidate_to_json(it.candidate) if it.candidate else None}
            for it in answer.familiar
        ],
        "advice": advice_to_json(answer.advice),
        "notes": answer.notes,
    }


def candidate_to_json(it: Candidate) -> dict[str, Any]:
    """One candidate."""
    return {
        "parallel": parallel_to_json(it),
        "overrides": settings_to_overrides(it.settings),
        "complexity": round(it.complexity, 4),
        "nodes": it.nodes,
        "ranks": it.ranks,
        "global_batch": it.global_batch,
        "fits": it.fits,
        "memory_gib": _memory(it),
        "step_seconds": None if it.step is None else {**asdict(it.step), "parts": it.parts},
        "mfu": it.mfu,
        "hfu": it.hfu,
        "tokens_per_second_per_gpu": it.tokens_per_second,
        "tokens_per_second": it.tokens_per_second * it.ranks if it.tokens_per_second is not None else None,
        "outlook": _outlook(it.outlook),
    }


def parallel_to_json(it: Candidate) -> dict[str, Any]:
    """What makes the layout and the technique, all of it, the defaults too."""
    from hpc_train.config.parallel import resolve_degrees

    parallel = it.config.parallel
    pipeline, recompute, offload = parallel.pipeline, parallel.recompute, parallel.offload
    return {
        "strategy": parallel.strategy,
        **asdict(resolve_degrees(parallel, it.ranks)),
        "micro_batch": it.config.train.micro_batch,
        "tensor": {"sequence": parallel.tensor.sequence, "asynchronous": parallel.tensor.asynchronous},
        "pipeline": {"schedule": pipeline.schedule, "virtual_stages": pipeline.virtual_stages},
        "recompute": {"mode": recompute.mode, "every": recompute.every},
        "offload": {"optimizer": offload.optimizer, "parameters": offload.parameters},
        "reshard_after_forward": parallel.reshard_after_forward,
    }


def _memory(it: Candidate) -> dict[str, Any]:
    worst = max(range(len(STAGES)), key=lambda number: it.stages[number])
    by_stage = {
        stage: {name: part[number] / GIB for name, part in it.memory.items()} for number, stage in enumerate(STAGES)
    }
    return {
        "total": it.total / GIB,
        **by_stage[STAGES[worst]],
        "stage": STAGES[worst],
        "stages": by_stage,
        "device": None if it.capacity is None else it.capacity / GIB,
    }


def _outlook(outlook: Projection | None) -> dict[str, Any] | None:
    if outlook is None:
        return None
    return {
        "demand": _market(outlook.demand),
        "spot": _market(outlook.spot) if outlook.spot else None,
        "failures": _band(outlook.failures),
        "hours_between_interruptions": _band(outlook.interruption_seconds.through(lambda it: it / 3600)),
        "failure_rate": outlook.rate.source,
        "save": asdict(outlook.save),
        "late": outlook.late,
        "over_budget": outlook.over_budget,
        "unknown": list(outlook.unknown),
    }


def _market(market: Market) -> dict[str, Any]:
    bill = market.bill
    return {
        "goodput": _band(market.effective),
        "waste": asdict(market.waste),
        "best_checkpoint_every": market.best_every,
        "days": _band(market.days),
        "gpu_hours": market.gpu_hours,
        "money": _band(market.money),
        "kwh": bill.kwh if bill else None,
        "co2_kg": bill.co2_kg if bill else None,
    }


def _band(band: Percentiles | None) -> dict[str, float] | None:
    return None if band is None else asdict(band)
