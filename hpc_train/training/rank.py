"""Run one rank of a run, from its task to its exit code.

`run_rank` places the rank, joins the process group, opens the data, builds model and engine, resumes, trains, and
agrees with all ranks whether the run is done: its loss is finite and its last checkpoint is on disk.
"""

from __future__ import annotations

import json
import logging
from contextlib import closing, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hpc_train._torch.versions import describe_untested_torch
from hpc_train.checkpoint.storage.lock import hold_lock
from hpc_train.config.model import HfModelConfig
from hpc_train.config.run import RunConfig
from hpc_train.data.datasets import Dataset
from hpc_train.data.own_dataset import OwnStream
from hpc_train.data.samples.mixture import MixtureDataset
from hpc_train.errors import EXIT_DONE
from hpc_train.interfaces import Engine, RankMap, Task, World
from hpc_train.messages import gather_values
from hpc_train.models.registry import build_model
from hpc_train.parallel.rules.parameter_server import find_mpi_setting
from hpc_train.regular_files import write_private_file
from hpc_train.resilience.chaos import FaultInjector
from hpc_train.resilience.heartbeat import Heartbeat, Phase
from hpc_train.resilience.ledger import GOODPUT, LedgerFile
from hpc_train.runtime.arrange_ranks import arrange_ranks
from hpc_train.runtime.device_settings import describe_device
from hpc_train.runtime.rank_assignment import search_placement
from hpc_train.runtime.start import leave_process_group, start
from hpc_train.runtime.stop_request import StopRequest
from hpc_train.training.assemble import assemble_run
from hpc_train.training.completion import find_shortfall, raise_if_any_incomplete
from hpc_train.training.evaluation import make_up_evaluation
from hpc_train.training.factory import count_samples, make_deferred_model, make_engine, open_data
from hpc_train.training.loop import run_training
from hpc_train.training.lost_copies import allow_losses, drop_lost_copies
from hpc_train.training.optimizer import find_learning_rate_problem, require_determinism
from hpc_train.training.records.rank_log import RankLog
from hpc_train.training.records.recorder import StepRecorder
from hpc_train.training.records.warning_files import record_warnings
from hpc_train.training.run_directory import RunDirectory
from hpc_train.training.training_run import TrainingRun

if TYPE_CHECKING:
    from hpc_train.training.records.node_metrics import NodeMetrics
    from hpc_train.training.records.profiler import StepProfiler


log = logging.getLogger(__name__)


def run_rank(
    config: RunConfig,
    task: Task,
    directory: RunDirectory,
    attempt: int,
    stop: StopRequest,
    heartbeat: Heartbeat | None = None,
    lines: RankLog | None = None,
) -> int:
    """Train this rank's share of the run; returns the exit code, the same on every rank.

    Raises UserError on all ranks for mistakes that only show here: data that the model cannot take, a checkpoint of
    another model, missing GPUs. Raises IncompleteRun on all ranks if the last step is made but the run is not done.
    lines: this process's structured log, whose lines have the rank from here on.
    """
    with record_warnings(directory.logs(attempt), task.process):
        return _run_rank(config, task, directory, attempt, stop, heartbeat or Heartbeat(), lines)


def _run_rank(
    config: RunConfig,
    task: Task,
    directory: RunDirectory,
    attempt: int,
    stop: StopRequest,
    heartbeat: Heartbeat,
    lines: RankLog | None,
) -> int:
    """Meet the other ranks, build the run and train; returns the exit code."""
    _configure_torch(config)
    rank_map = place_rank(config, task)
    if lines is not None:
        lines.rank = rank_map.process_to_rank[task.process]
    world = start(task, rank_map, config)
    _log_from_rank_0(world, task, rank_map)
    try:
        _write_rank_map(world, task, rank_map, directory, attempt)
        if config.resilience.preflight != "off":
            from hpc_train.training.node_check import check_job_nodes

            check_job_nodes(config, world, task, directory, attempt)
        # Data before the model: what is wrong with it shows in seconds, where a large model takes minutes to make.
        data = open_data(config, world)
        engine, parameters, notes = _build_engine(config, world)
        # Before resuming: no other job may change these checkpoints while they are read.
        with hold_lock(directory.checkpoints, world) if _does_save(config) else nullcontext() as lock:
            heartbeat.enter(Phase.LOAD)
            run = assemble_run(config, world, directory, attempt, stop, data, engine)
            # Before the first save: it must know whether the lock is still ours.
            run.observers.heartbeat, run.saves.saver.lock = heartbeat, lock
            _attach_observers(run, task, attempt)
            with closing(run):
                if rank_map.warning:
                    run.reporter.add_event("warning", about="placement", why=rank_map.warning)
                make_up_evaluation(run)
                _log_start(
                    run, parameters, count_samples(data), [*rank_map.lines, *notes, *_describe_mixture(run, data)]
                )
                return _train_to_end(run, data)
    finally:
        leave_process_group()


def _configure_torch(config: RunConfig) -> None:
    if config.launch.threads:
        torch.set_num_threads(config.launch.threads)
    if config.train.deterministic:
        require_determinism()


def _build_engine(config: RunConfig, world: World) -> tuple[Engine, int, list[str]]:
    """Build model and engine; returns the engine, the number of parameters, and notes for the log of the run."""
    notes: list[str] = []
    model, values = make_deferred_model(config, world)
    if world.rank == 0 and (untested := describe_untested_torch(torch.__version__)):
        log.warning("%s", untested)
    # Counted now: the engine splits the model over ranks in place, and each pipeline stage has its own copy.
    parameters = sum(parameter.numel() for parameter in model.parameters())
    engine = make_engine(config, world, model, notes.append if world.rank == 0 else log.info, values)
    if advice := advise_learning_rate(config):
        notes.append(advice)
    frozen = list_frozen_parameters(engine) if _does_save(config) else frozenset()
    if frozen and not config.checkpoint.incremental and (advice := advise_incremental_saves(frozen, engine)):
        notes.append(advice)
    return engine, parameters, notes


def _attach_observers(run: TrainingRun, task: Task, attempt: int) -> None:
    """Give the run what breaks it when ordered to, and what records it, as far as the configuration asks for them."""
    config, world, directory = run.config, run.world, run.directory
    if config.resilience.chaos:
        run.observers.injector = FaultInjector(directory.path, world.rank)
        run.saves.saver.before_write = run.observers.injector.before_write
    if config.train.record_steps:
        file = directory.step_records(attempt, task.node)
        run.observers.recorder = StepRecorder(run.engine, world, run.observers.heartbeat, file, config.parallel.compile)
    run.observers.profiler = start_profiler(run, attempt)
    run.observers.ledger = LedgerFile(directory.path / GOODPUT, attempt, task.nodes) if world.rank == 0 else None
    run.observers.node_metrics = start_node_metrics(run, task)


def _train_to_end(run: TrainingRun, data: Dataset | OwnStream) -> int:
    """Train, and agree with all ranks on whether the run is done; returns the exit code, the same on every rank."""
    allow_losses(run)
    code = run_training(run)
    drop_lost_copies(run)  # the last saves may have taken minutes
    if run.observers.profiler is not None:
        run.observers.profiler.close(run.step)
    raise_if_any_incomplete(find_shortfall(run) if code == EXIT_DONE else None, run.world)
    _log_end(run, data)
    run.observers.heartbeat.enter(Phase.END, run.step)
    if run.observers.ledger is not None:
        run.observers.ledger.write(run.observers.heartbeat, run.step, ended=True)
    if code == EXIT_DONE:
        run.reporter.mark_done()
    run.reporter.close_loggers()
    # A launcher may end the others as soon as one rank exits with a code that is not 0.
    dist.barrier(group=run.world.group)
    return code


def place_rank(config: RunConfig, task: Task) -> RankMap:
    """Agree on which rank each process takes, and bind this one. Every process of the job calls it."""
    return arrange_ranks(
        task,
        config,
        find_mpi_setting(config),
        find=partial(search_placement, parameters=partial(_count_parameters, config)),
    )


def _count_parameters(config: RunConfig) -> int:
    with torch.device("meta"):
        model = build_model(config.model, config.train.seed)
    return sum(parameter.numel() for parameter in model.parameters())


def advise_learning_rate(config: RunConfig) -> str | None:
    """Return one line if weights are fine-tuned at the default learning rate, which is one for random weights."""
    from hpc_train.checkpoint.convert.pretrained_weights import find_weights

    if not isinstance(config.model, HfModelConfig) or find_weights(config.model) is None:
        return None
    return find_learning_rate_problem(config)


def start_node_metrics(run: TrainingRun, task: Task) -> NodeMetrics | None:
    """Start the metrics file of this node on its first rank, if it is asked for; None elsewhere."""
    if run.config.loggers.textfile_dir is None or task.local != 0:
        return None
    from hpc_train.training.records.node_metrics import NodeMetrics

    return NodeMetrics(run.config, run.directory, run.reporter.attempt, run.steps, run.step, task)


def start_profiler(run: TrainingRun, attempt: int) -> StepProfiler | None:
    """Make what traces steps of this rank; None if nothing can ask for it."""
    settings = run.config.profile
    if settings.nvtx:
        from hpc_train.training.records.nvtx_ranges import mark_parts

        mark_parts(run.engine, run.world)
    if settings.steps is None and not settings.poll_seconds:
        return None
    from hpc_train.training.records.profiler import StepProfiler

    say = run.reporter.say if run.world.rank == 0 else log.info
    return StepProfiler(
        config=run.config,
        run=run.directory.path,
        attempt=attempt,
        world=run.world,
        parts=run.engine.parts,
        step=run.step,
        report=say,
    )


def _describe_mixture(run: TrainingRun, data: Dataset | OwnStream) -> list[str]:
    """Say how much of the run each source of a mixture gives, and which are repeated."""
    if not isinstance(data, MixtureDataset):
        return []
    return data.describe_run(run.steps * run.config.train.global_batch)


def _does_save(config: RunConfig) -> bool:
    return config.checkpoint.every > 0 or config.checkpoint.weights_every > 0


def _log_from_rank_0(world: World, task: Task, rank_map: RankMap) -> None:
    """Move the log lines to rank 0 if the placement gave that rank to another process than the launcher's first."""
    if world.rank == task.process:
        return
    logging.getLogger("hpc_train").setLevel(logging.INFO if world.rank == 0 else logging.WARNING)
    if task.process == 0:
        speaker = rank_map.process_to_rank.index(0)
        print(f"placed: this is rank {world.rank}; rank 0, which speaks for all, is task {speaker}")


def _write_rank_map(world: World, task: Task, rank_map: RankMap, directory: RunDirectory, attempt: int) -> None:
    """Write rankmap.json to the run directory and to this attempt's logs: another attempt may map ranks differently."""
    location = {
        "rank": world.rank,
        "process": task.process,
        "host": task.host,
        "node": task.node,
        "local_rank": task.local,
    }
    ranks = gather_values({**location, **rank_map.per_rank})
    if world.rank == 0:
        mesh = dict(zip(world.mesh.mesh_dim_names or (), world.mesh.shape, strict=True))
        content = {"reason": rank_map.reason, **rank_map.shared, "mesh": mesh, "ranks": ranks}
        for path in (directory.rank_map, directory.logs(attempt) / directory.rank_map.name):
            write_private_file(path, json.dumps(content, indent=1) + "\n")


def _log_start(run: TrainingRun, parameters: int, samples: int | None, notes: list[str]) -> None:
    """Report what is trained, on what, over which mesh, with notes on placement and techniques."""
    resumed = run.step > 0
    axes = zip(run.world.mesh.mesh_dim_names or (), run.world.mesh.shape, strict=True)
    mesh = " x ".join(f"{axis} {size}" for axis, size in axes if size > 1) or "all degrees 1"
    config, amount = run.config, "a stream" if samples is None else f"{samples:,} samples"
    run.reporter.say(
        f"{config.model.name}: {parameters:,} parameters, {config.precision.name}, {config.parallel.strategy} "
        f"over {run.world.size} ranks ({mesh}); {config.data.name}: {amount}"
    )
    for line in [*notes, describe_device(config, run.world.device)]:
        if line is not None:
            run.reporter.say(line)
    if resumed:
        run.reporter.say(f"resumed at step {run.step} of {run.steps}")
    # Last, because whoever follows the run begins to show progress here.
    run.reporter.add_event("resume" if resumed else "start", step=run.step, steps=run.steps, world=run.world.size)


def _log_end(run: TrainingRun, data: Dataset | OwnStream) -> None:
    if run.step < run.steps:
        return
    run.reporter.add_event("end", step=run.step)
    losses = [f"loss {run.last_loss:.4f}"] if run.last_loss is not None else []
    if run.evaluation.loss is not None:
        losses.append(f"validation {run.evaluation.loss:.4f}")
    entropy = data.unigram_entropy if run.world.rank == 0 and not isinstance(data, OwnStream) else None
    if entropy is not None:
        losses.append(f"a unigram model of the same text {entropy:.4f} nats a token")
    run.reporter.say(f"done: {run.step} steps; {', '.join(losses)}", last=True)
    run.reporter.say(f"run directory: {run.directory.path}", last=True)


def list_frozen_parameters(engine: Engine) -> frozenset[str]:
    """Return the names of this rank's parameters that are never trained."""
    named = (pair for part in engine.parts for pair in part.named_parameters())
    return frozenset(name for name, parameter in named if not parameter.requires_grad)


def advise_incremental_saves(frozen: frozenset[str], engine: Engine) -> str | None:
    """Return a line of advice if most bytes that this rank saves are of frozen parameters; None otherwise."""
    total = frozen_bytes = 0
    for shard in engine.shards():
        if shard.replica == 0:
            total += shard.local.nbytes
            frozen_bytes += shard.local.nbytes if shard.name in frozen else 0
    if 2 * frozen_bytes <= total:
        return None
    return (
        f"{frozen_bytes / total:.0%} of what a save writes is of frozen parameters: with "
        "checkpoint.incremental=true they are written once"
    )
