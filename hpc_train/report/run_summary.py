"""Gather all that a report shows of one run: its state, configuration, records, verdict and accounts.

Anything missing, damaged or in an earlier format is left out and named in `notes`; it never makes reading fail.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpc_train.config.parallel import Degrees, resolve_degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.launch.slurm.slurm_cli import RunClient
from hpc_train.launch.state.attempts import RANK_MAP, read_rank_entries
from hpc_train.launch.state.job_state import decide_state
from hpc_train.launch.state.progress import add_progress, read_steps
from hpc_train.launch.state.run_facts import gather_facts, read_events
from hpc_train.launch.state.run_ledger import account_run_directory
from hpc_train.launch.state.run_lookup import RunPoint
from hpc_train.launch.state.state_names import RunStatus, State
from hpc_train.models.counts import count_parameters
from hpc_train.regular_files import read_json
from hpc_train.report.efficiency import Pipeline, StepLosses
from hpc_train.report.findings import Facts
from hpc_train.report.prediction import rate_advice
from hpc_train.report.step_table import StepTable, read_newest_steps, read_step_table
from hpc_train.report.verdict import Verdict, find_silent_ranks, format_ranks, judge_run
from hpc_train.resilience.ledger import Ledger
from hpc_train.schedules.generate import generate_order
from hpc_train.traffic.sharding import uses_fully_shard
from hpc_train.traffic.stages import (
    ELEMENT_BYTES,
    compute_block_costs,
    count_micro_batches,
    is_schedule_file,
    list_stage_blocks,
    read_block_costs,
    read_schedule_file,
)


@dataclass(frozen=True)
class RunSummary:
    """One run at one moment: all that its report shows."""

    name: str
    path: Path
    status: RunStatus
    verdict: Verdict
    losses: StepLosses | None
    table: StepTable | None
    steps: list[dict[str, Any]]
    """Lines of metrics.jsonl."""
    events: list[dict[str, Any]]
    ledger: Ledger
    config: RunConfig | None
    ranks: list[dict[str, Any]]
    """Entries of rankmap.json by rank: host and place of each."""
    facts: Facts
    notes: tuple[str, ...] = ()
    """One line for each file that could not be read."""
    made: float = field(default_factory=time.time)


def summarise_run(point: RunPoint, run_client: RunClient) -> RunSummary:
    """Gather a run. run_client: runs Slurm's commands, for runs that have not recorded their own end."""
    (run_facts,) = gather_facts([point], run_client)
    status = add_progress(decide_state(run_facts), run_facts)
    config, note = read_config(point.run)
    ranks = sorted(read_rank_entries(point.run), key=lambda entry: int(entry.get("rank", 0)))
    table = read_step_table(point.run)
    facts = describe_facts(config, table, ranks, (status.steps or 0) - (status.step or 0))
    if status.state is State.RUNNING:
        facts = replace(facts, live=shlex.quote(str(point.run)))
    verdict, losses = judge_run(table, facts)
    # The verdict is a pure function of records; only here is the planner asked what each advice would bring.
    verdict = replace(verdict, advice=rate_advice(verdict.advice, config, len(ranks)))
    return RunSummary(
        name=point.name,
        path=point.run,
        status=status,
        verdict=verdict,
        losses=losses,
        table=table,
        steps=read_steps(point.run / "metrics.jsonl"),
        events=read_events(point.run),
        ledger=account_run_directory(point.run),
        config=config,
        ranks=ranks,
        facts=facts,
        notes=tuple(filter(None, (note, _describe_silent_ranks(table, facts)))),
    )


def _describe_silent_ranks(table: StepTable | None, facts: Facts) -> str:
    """Name the ranks of the newest attempt that have recorded nothing; "" if there are none, or no records at all."""
    silent = find_silent_ranks(table, facts) if table is not None else []
    return f"steps of {format_ranks(silent)}: no records" if silent else ""


def judge_newest_steps(run: Path, steps_left: int = 0) -> tuple[Verdict, StepLosses | None, StepTable | None]:
    """Judge the newest steps of a run, for commands that look often. steps_left: of the whole run.

    The configuration, which takes long to read, is read for pipelines only. Settings to try are left out, because
    without the configuration it is not known whether the run already has them.
    """
    table, ranks = read_newest_steps(run), read_rank_entries(run)
    config = read_config(run)[0] if table is not None and _has_pipeline(run) else None
    facts = describe_facts(config, table, ranks, steps_left)
    verdict, losses = judge_run(table, facts)
    return replace(verdict, advice=()), losses, table


def describe_pace(run: Path) -> str:
    """Return class, share lost and goodput of a run, as "straggler 42%, goodput 97%"; "" before enough is recorded."""
    verdict, _, _ = judge_newest_steps(run)
    if verdict.name == "not enough data":
        return ""
    share = f" {verdict.share_lost:.0%}" if verdict.share_lost else ""
    return f"{verdict.name}{share}, goodput {account_run_directory(run).goodput:.0%}"


def _has_pipeline(run: Path) -> bool:
    try:
        mesh = read_json(run / RANK_MAP)["mesh"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return isinstance(mesh, dict) and mesh.get("pp", 1) != 1


def read_config(run: Path) -> tuple[RunConfig | None, str]:
    """Read the configuration of a run; None, and a line that says why, if this release cannot.

    A loop of one's own (LoopRecorder) has none, which needs no line.
    """
    if not (run / "config.yaml").exists() and not (run / "job.json").exists() and (run / RANK_MAP).exists():
        return None, ""
    from hpc_train.config.plain_config import config_from_dict
    from hpc_train.config.run_file import load_run_file

    try:
        return config_from_dict(load_run_file(run / "config.yaml")), ""
    except (UserError, OSError, ValueError, TypeError) as error:
        return None, f"config.yaml: {error}"


def describe_facts(
    config: RunConfig | None, table: StepTable | None, ranks: Sequence[dict[str, Any]], steps_left: int
) -> Facts:
    """Describe what the verdict needs of a run. ranks: entries of rankmap.json."""
    nodes = {int(entry["rank"]): str(entry.get("host", "")) for entry in ranks if "rank" in entry}
    if config is None or not ranks:
        return Facts(node_of_rank=nodes, steps_left=max(0, steps_left))
    degrees = resolve_degrees(config.parallel, len(ranks))
    return Facts(
        pipeline=_describe_pipeline(config, degrees, table) if degrees.pp > 1 and table is not None else None,
        node_of_rank=nodes,
        steps_left=max(0, steps_left),
        strategy=config.parallel.strategy,
        degrees={name: getattr(degrees, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")},
        global_batch=config.train.global_batch,
        micro_batch=config.train.micro_batch,
        micro_batches=count_micro_batches(config, degrees),
        compile=config.parallel.compile,
        excluded_nodes=config.launch.exclude or "",
        checkpoint_every=config.checkpoint.every,
        background_saves=config.checkpoint.background,
        accelerator=any(entry.get("gpu") is not None for entry in ranks),
        collective_kib=_measure_collectives(config, degrees),
        waits_measured=config.parallel.server.mode == "none",
    )


def _measure_collectives(config: RunConfig, degrees: Degrees) -> float | None:
    """Return what a collective of fully_shard carries, KiB; None if there are others, or the model's size is unknown.

    Parameters of a block travel together, and those outside of blocks.
    """
    if not uses_fully_shard(config, degrees) or degrees.dp_shard == 1 or degrees.tp * degrees.cp * degrees.pp > 1:
        return None
    parameters, layers = count_parameters(config.model), getattr(config.model, "layers", None)
    if parameters is None or layers is None or config.parallel.ep > 1:
        return None
    return float(parameters / (layers + 1) * ELEMENT_BYTES[config.precision.name] / 1024)


def _describe_pipeline(config: RunConfig, degrees: Degrees, table: StepTable) -> Pipeline | None:
    """Return order and costs of the pipeline, for its simulation; None if they, or records of a stage, are missing."""
    options, micro_batches = config.parallel.pipeline, count_micro_batches(config, degrees)
    try:
        if is_schedule_file(options):
            order = read_schedule_file(options)
        else:
            order = generate_order(options.schedule, degrees.pp, micro_batches, options.virtual_stages)
    except (UserError, OSError):
        return None
    layers = getattr(config.model, "layers", None)
    costs = [1.0] * degrees.pp
    if layers:
        parts = (
            read_block_costs(options.costs)
            if options.costs
            else compute_block_costs(config.model, config.train.sequence_length, layers)
        )
        costs = [0.0] * degrees.pp
        stages = list_stage_blocks(options, parts, len(order.placement))
        for stage, (blocks, rank) in enumerate(zip(stages, order.placement, strict=True)):
            costs[rank] += sum(parts.blocks[block] for block in blocks)
            costs[rank] += parts.before if stage == 0 else 0.0
            costs[rank] += parts.after if stage == len(stages) - 1 else 0.0
    # Ranks of a stage are consecutive: pp is the outermost axis of the mesh.
    world = max(1, degrees.pp * degrees.dp_replicate * degrees.dp_shard * degrees.cp * degrees.tp)
    stage_of_rank = tuple(rank // (world // degrees.pp) for rank in table.ranks)
    # Without records of every stage the simulation would have nothing to compare with.
    if set(stage_of_rank) != set(range(degrees.pp)):
        return None
    return Pipeline(order, stage_of_rank, tuple(costs), micro_batches)
