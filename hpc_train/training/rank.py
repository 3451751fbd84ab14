"""run_rank: one rank of a run, from its task to its exit code."""

from __future__ import annotations

import json
import logging
import math
from contextlib import closing, nullcontext
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from hpc_train.api import Engine, RankMap, Task, World
from hpc_train.checkpoint import resume
from hpc_train.checkpoint.lock import held
from hpc_train.collectives import broadcast_value, gather_values
from hpc_train.config.degrees import resolve
from hpc_train.config.model import CustomModelConfig
from hpc_train.config.run import RunConfig
from hpc_train.data.datasets import Dataset, check_model, open_dataset
from hpc_train.data.loader import Loader
from hpc_train.errors import EXIT_DONE, UserError
from hpc_train.models.deferred import DeferredValues, build_deferred
from hpc_train.models.init import Initialised, initialise
from hpc_train.models.registry import build as build_model
from hpc_train.parallel.apply import Say, build, splits
from hpc_train.parallel.materialise import is_meta
from hpc_train.parallel.support.server import needs_mpi
from hpc_train.parallel.user_model import check_sizes
from hpc_train.runtime.arrange import arrange
from hpc_train.runtime.search import search
from hpc_train.runtime.start import shut_down, start
from hpc_train.runtime.stop import StopRequest
from hpc_train.training.folder import RunFolder, write_private
from hpc_train.training.frozen import frozen_names, incremental_advice
from hpc_train.training.loop import Run, evaluate_late, train
from hpc_train.training.optimizer import make_optimizer
from hpc_train.training.origin import other_code
from hpc_train.training.outcome import find_shortfall, raise_together
from hpc_train.training.reporting import Reporter
from hpc_train.training.seeds import be_deterministic
from hpc_train.training.warning_files import recording_warnings

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
log = logging.getLogger(__name__)


def run_rank(config: RunConfig, task: Task, folder: RunFolder, attempt: int, stop: StopRequest) -> int:
    """Train this rank's share of the run; returns the exit code, the same on every rank.

    Raises UserError, on all ranks, for what only shows now: data that the model cannot take, a checkpoint of another
    model, GPUs that are not there; and IncompleteRun, on all ranks, if the last step is made but the run is not done.
    """
    with recording_warnings(folder.logs(attempt), task.process):
        return _run_rank(config, task, folder, attempt, stop)


def _run_rank(config: RunConfig, task: Task, folder: RunFolder, attempt: int, stop: StopRequest) -> int:
    if config.launch.threads:
        torch.set_num_threads(config.launch.threads)
    if config.train.deterministic:
        be_deterministic()
    rank_map = place(config, task)
    world = start(task, rank_map, config)
    _let_rank_0_speak(world, task, rank_map)
    try:
        _write_rank_map(world, task, rank_map, folder, attempt)
        data = open_data(config, world)
        (model, values), said = make_model_apart(config, world), list[str]()
        count = sum(parameter.numel() for parameter in model.parameters())  # now, while the model is whole
        frozen = frozen_names(model) if _saves(config) and not config.checkpoint.incremental else frozenset()
        engine = make_engine(config, world, model, said.append if world.rank == 0 else log.info, values)
        del model, values  # each pipeline stage has its own copy by now
        if frozen and (advice := incremental_advice(frozen, engine.pieces())):
            said.append(advice)
        with held(folder.checkpoints, world) if _saves(config) else nullcontext() as lock:
            run = assemble(config, world, folder, attempt, stop, data, engine)
            run.saver.lock = lock
            with closing(run):
                if rank_map.warning:
                    run.reporter.event("warning", about="placement", why=rank_map.warning)
                evaluate_late(run)
                _announce(run, count, len(data), [*rank_map.lines, *said])
                code = train(run)
                raise_together(find_shortfall(run) if code == EXIT_DONE else None, world)
                _farewell(run, data)
                if code == EXIT_DONE:
                    run.reporter.mark_done()
                dist.barrier()  # a launcher may end the others as soon as one rank exits with a code that is not 0
                return code
    finally:
        shut_down()


def place(config: RunConfig, task: Task) -> RankMap:
    """Which rank every process takes; this one is bound and has its environment. Every process of the job calls it."""
    return arrange(task, config, needs_mpi(config), find=partial(search, parameters=partial(_parameters, config)))


def _parameters(config: RunConfig) -> int:
    with torch.device("meta"):
        model = build_model(config.model, config.train.seed)
    return sum(parameter.numel() for parameter in model.parameters())


def open_data(config: RunConfig, world: World) -> Dataset:
    """The training samples; rank 0 builds the token store where it is not there yet."""
    data = _rank_0_first(world, lambda: open_dataset(config.data, config.train.sequence_length, "train"))
    check_model(config.model, data)
    return data


def make_model(config: RunConfig) -> nn.Module:
    """The model, on the meta device if it can be drawn a part at a time; else the same values on every rank."""
    if not isinstance(config.model, CustomModelConfig):
        with torch.device("meta"):
            return build_model(config.model, config.train.seed)
    model = build_model(config.model, config.train.seed)
    check_sizes(model)
    if isinstance(model, Initialised) and not is_meta(model):
        initialise(model, config.train.seed)
    return model


def make_model_apart(config: RunConfig, world: World) -> tuple[nn.Module, DeferredValues | None]:
    """Make the model and, if it is the user's own and split over ranks, its values, each made on request.

    So no rank has the whole model in memory. If its constructor cannot be recorded, the model is made whole.
    """
    if isinstance(config.model, CustomModelConfig) and splits(config, resolve(config.parallel, world.size)):
        apart = build_deferred(partial(build_model, config.model, config.train.seed))
        if apart is not None and not isinstance(apart[0], Initialised):
            check_sizes(apart[0])
            return apart
    return make_model(config), None


def make_engine(
    config: RunConfig, world: World, model: nn.Module, say: Say = log.info, values: DeferredValues | None = None
) -> Engine:
    """Make the engine that the config asks for, with its optimizer. say, values: see parallel.apply.build."""
    return build(model, lambda split: make_optimizer(split, config.optim), config, world, say, values)


def assemble(
    config: RunConfig,
    world: World,
    folder: RunFolder,
    attempt: int,
    stop: StopRequest,
    data: Dataset,
    engine: Engine,
) -> Run:
    """The run, ready for its next step: that after the checkpoint which checkpoint.resume chooses, or the first."""
    steps = total_steps(config, len(data))
    loader, validation = _loader(config, data, world), _validation(config, world)
    run = Run(config, world, folder, engine, loader, validation, steps, Reporter(folder, attempt), stop)
    resumed = resume(folder.checkpoints, config.checkpoint.resume, engine.pieces(), world)
    if resumed is not None and not resumed.weights_only:
        run.step, run.saved_at = resumed.step, resumed.step if resumed.directory == folder.checkpoints else None
        run.resumed_from = run.saved_at
        run.owes_validation = run.saved_at is not None and resumed.extra.get("owes_validation", False)
        _check_position(resumed.extra["consumed_samples"], run)
        run.noise.restore(resumed.extra["noise_scale"])
    run.reporter = Reporter.start(config, folder, attempt, steps, run.step, world.rank)
    if resumed is not None and (other := other_code(resumed.origin, run.saver.origin)) is not None:
        run.reporter.say(other)
    if resumed is not None and resumed.weights_only:
        run.reporter.say(
            f"weights of step {resumed.step} in {resumed.directory}: training starts at step 0 with a fresh optimizer"
        )
    return run


def total_steps(config: RunConfig, samples: int) -> int:
    """Updates of the whole run; epochs are rounded up to whole steps."""
    if config.train.wanted_steps is not None:
        return config.train.wanted_steps
    assert config.train.epochs is not None
    return max(1, math.ceil(config.train.epochs * samples / config.train.global_batch))


def _saves(config: RunConfig) -> bool:
    return config.checkpoint.every > 0 or config.checkpoint.weights_every > 0


def _loader(config: RunConfig, data: Dataset, world: World) -> Loader:
    train_config = config.train
    return Loader(
        data, train_config.seed, train_config.global_batch, train_config.micro_batch, world.dp_index, world.dp_size
    )


def _validation(config: RunConfig, world: World) -> Loader | None:
    if not config.train.eval_every or not config.data.validation_fraction:
        return None
    return _loader(config, open_dataset(config.data, config.train.sequence_length, "validation"), world)


def _check_position(consumed: int, run: Run) -> None:
    if consumed != run.consumed_samples:
        raise UserError(
            f"checkpoint.resume={run.config.checkpoint.resume}: it has seen {consumed} samples in {run.step} "
            f"steps, which is not train.global_batch={run.config.train.global_batch}; use the batch it was trained with"
        )


def _rank_0_first(world: World, action: Callable[[], T]) -> T:
    """Run `action` on rank 0 (which may build a file that the others then find), then on the others.

    If rank 0 fails, the others fail too, in place of waiting for it.
    """
    mine = None
    problem: str | None = None
    if world.rank == 0:
        try:
            mine = action()
        except UserError as error:
            problem = str(error)
    if world.size > 1:
        problem = broadcast_value(problem)
    if problem is not None:
        raise UserError(problem)
    return action() if mine is None else mine


def _let_rank_0_speak(world: World, task: Task, rank_map: RankMap) -> None:
    """Where a placement made another process rank 0 than the one that launchers and people look at first."""
    if world.rank == task.process:
        return
    logging.getLogger("hpc_train").setLevel(logging.INFO if world.rank == 0 else logging.WARNING)
    if task.process == 0:
        print(f"placed: this is rank {world.rank}; rank 0, which speaks for all, is task {_task_of(0, rank_map)}")


def _task_of(rank: int, rank_map: RankMap) -> int:
    return rank_map.process_to_rank.index(rank)


def _write_rank_map(world: World, task: Task, rank_map: RankMap, folder: RunFolder, attempt: int) -> None:
    """In the run directory, and beside the logs of this attempt, which another one may map differently."""
    at = {"rank": world.rank, "process": task.process, "host": task.host, "node": task.node, "local_rank": task.local}
    everybody = gather_values({**at, **rank_map.own})
    if world.rank == 0:
        mesh = dict(zip(world.mesh.mesh_dim_names or (), world.mesh.shape, strict=True))
        found = {"reason": rank_map.reason, **rank_map.shared, "mesh": mesh, "ranks": everybody}
        for path in (folder.rank_map, folder.logs(attempt) / folder.rank_map.name):
            write_private(path, json.dumps(found, indent=1) + "\n")


def _announce(run: Run, count: int, samples: int, techniques: list[str]) -> None:
    """What is trained, on what, over which mesh, and by which techniques."""
    resumed = run.step > 0
    axes = zip(run.world.mesh.mesh_dim_names or (), run.world.mesh.shape, strict=True)
    mesh = " x ".join(f"{axis} {size}" for axis, size in axes if size > 1) or "all degrees 1"
    run.reporter.say(
        f"{run.config.model.name}: {count:,} parameters, {run.config.precision.name}, {run.config.parallel.strategy} "
        f"over {run.world.size} ranks ({mesh}); {run.config.data.name}: {samples:,} samples"
    )
    for line in techniques:
        run.reporter.say(line)
    if resumed:
        run.reporter.say(f"resumed at step {run.step} of {run.steps}")
    # Last, because whoever follows the run begins to show progress here.
    run.reporter.event("resume" if resumed else "start", step=run.step, steps=run.steps, world=run.world.size)


def _farewell(run: Run, data: Dataset) -> None:
    if run.step < run.steps:
        return
    run.reporter.event("end", step=run.step)
    losses = [f"loss {run.last_loss:.4f}"] if run.last_loss is not None else []
    if run.last_validation is not None:
        losses.append(f"validation {run.last_validation:.4f}")
    if run.world.rank == 0 and data.unigram_entropy is not None:  # it counts the tokens of the validation split
        losses.append(f"a unigram model of the same text {data.unigram_entropy:.4f} nats a token")
    run.reporter.say(f"done: {run.step} steps; {', '.join(losses)}", last=True)
    run.reporter.say(f"run directory: {run.folder.path}", last=True)
