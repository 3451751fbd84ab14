"""An answer as `hpc-train plan --json` prints it, and as plan.json of a run directory holds it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hpc_train.planner.advice.result import as_json
from hpc_train.planner.answer import Answer
from hpc_train.planner.band import Band
from hpc_train.planner.candidate import GIB, STAGES, Candidate
from hpc_train.planner.command import command_of
from hpc_train.planner.outlook import Market, Outlook
from hpc_train.planner.settings import overrides_of


def answer_json(answer: Answer) -> dict[str, Any]:
    """Return the answer as JSON. Bytes are in GiB; null means unknown.

    candidates: best first, also given as `best`; equal_to_best: indistinguishable from the quickest, of which the best
    is the simplest; command: runs the best.
    """
    return {
        "best": {**candidate_json(answer.best), "equal_to_best": True} if answer.best else None,
        "candidates": [{**candidate_json(it), "equal_to_best": answer.alike(it)} for it in answer.candidates],
        "pareto": [candidate_json(it) for it in answer.front],
        "searched": answer.searched,
        "estimated": answer.estimated,
        "seconds": answer.seconds,
        "command": command_of(answer.overrides, answer.config_dir, answer.best) if answer.best else None,
        "familiar": [
            {"name": it.name, "why": it.why, "candidate": candidate_json(it.candidate) if it.candidate else None}
            for it in answer.familiar
        ],
        "advice": as_json(answer.advice),
        "notes": answer.notes,
    }


def candidate_json(it: Candidate) -> dict[str, Any]:
    """One candidate."""
    return {
        "parallel": parallel_json(it),
        "overrides": overrides_of(it.settings),
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


def parallel_json(it: Candidate) -> dict[str, Any]:
    """What makes the layout and the technique, all of it, the defaults too."""
    from hpc_train.config.degrees import resolve

    parallel = it.config.parallel
    pipeline, recompute, offload = parallel.pipeline, parallel.recompute, parallel.offload
    return {
        "strategy": parallel.strategy,
        **asdict(resolve(parallel, it.ranks)),
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


def _outlook(outlook: Outlook | None) -> dict[str, Any] | None:
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


def _band(band: Band | None) -> dict[str, float] | None:
    return None if band is None else asdict(band)
