"""Run one rank of a run, from its task to its exit code.

`run_rank` places the rank, joins the process group, opens the data, builds model and engine, resumes, trains, and
agrees with all ranks whether the run is done: its loss is finite and its last checkpoint is on disk.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from hpc_train._torch import describe_untested_torch
from hpc_train.checkpoint import ResumedStep, resume_from_checkpoint
from hpc_train.checkpoint.storage.lock import hold_lock
from hpc_train.config.model import CustomModelConfig, HfModelConfig
from hpc_train.config.parallel import resolve_degrees
from hpc_train.config.run import RunConfig, is_loose
from hpc_train.data.datasets import Dataset, check_model_fits_data, open_samples
from hpc_train.data.loader import BatchLoader, Loader
from hpc_train.data.own_dataset import OwnStream, StreamPart
from hpc_train.data.samples.mixture import MixtureDataset
from hpc_train.data.stream_loader import StreamLoader
from hpc_train.errors import EXIT_DONE, IncompleteRun, UserError
from hpc_train.interfaces import Engine, RankMap, Task, World
from hpc_train.messages import gather_values
from hpc_train.models.deferred import DeferredValues, build_deferred
from hpc_train.models.initial_values import Initialised, initialise_parameters
from hpc_train.models.registry import build_model as build_model
from hpc_train.parallel.apply import Report, build, splits_parameters
from hpc_train.parallel.materialise import detach_values, is_on_meta, remake_buffers
from hpc_train.parallel.rules.parameter_server import needs_mpi
from hpc_train.parallel.user_model import check_sizes
from hpc_train.regular_files import write_private_file
from hpc_train.resilience.chaos import FaultInjector
from hpc_train.resilience.heartbeat import Heartbeat, Phase
from hpc_train.resilience.ledger import GOODPUT, LedgerFile
from hpc_train.runtime.consensus import Consensus
from hpc_train.runtime.device_settings import describe_device
from hpc_train.runtime.processes import StopRequest
from hpc_train.runtime.rank_assignment import arrange_ranks, search_placement
from hpc_train.runtime.start import leave_process_group, start
from hpc_train.training.data_position import restore_position
from hpc_train.training.loop import TrainingRun, describe_code_change, evaluate_owed, run_training
from hpc_train.training.numerics.rollback import ROLLBACKS, read_rollbacks
from hpc_train.training.optimizer import doubt_learning_rate, make_optimizer, require_determinism
from hpc_train.training.records.rank_log import RankLog
from hpc_train.training.records.recorder import StepRecorder
from hpc_train.training.records.reporter import Reporter
from hpc_train.training.records.warning_files import recording_warnings
from hpc_train.training.run_directory import RunDirectory

if TYPE_CHECKING:
    from hpc_train.training.profiler import StepProfiler
    from hpc_train.training.records.node_metrics import NodeMetrics

log = logging.getLogger(__name__)
# Any other error stays on its own rank, and is the first that the run reports, with its traceback.
_USER_ERRORS = Consensus(shared=())


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
    with recording_warnings(directory.logs(attempt), task.process):
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
    if config.launch.threads:
        torch.set_num_threads(config.launch.threads)
    if config.train.deterministic:
        require_determinism()
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
        data = open_data(config, world)
        (model, values), notes = make_deferred_model(config, world), list[str]()
        if world.rank == 0 and (untested := describe_untested_torch(torch.__version__)):
            log.warning("%s", untested)
        # Counted now: the engine splits the model over ranks in place.
        parameter_count = sum(parameter.numel() for parameter in model.parameters())
        engine = make_engine(config, world, model, notes.append if world.rank == 0 else log.info, values)
        del model, values  # each pipeline stage has its own copy by now
        if advice := advise_learning_rate(config):
            notes.append(advice)
        frozen = list_frozen_parameters(engine) if _does_save(config) else frozenset()
        if frozen and not config.checkpoint.incremental and (advice := advise_incremental_saves(frozen, engine)):
            notes.append(advice)
        # Before resuming: no other job may change these checkpoints while they are read.
        with hold_lock(directory.checkpoints, world) if _does_save(config) else nullcontext() as lock:
            heartbeat.enter(Phase.LOAD)
            run = assemble_run(config, world, directory, attempt, stop, data, engine)
            run.heartbeat = heartbeat
            if config.resilience.chaos:
                run.injector = FaultInjector(directory.path, world.rank)
                run.saver.before_write = run.injector.before_write
            if config.train.record_steps:
                file = directory.step_records(attempt, task.node)
                run.recorder = StepRecorder(engine, world, heartbeat, file, config.parallel.compile)
            run.profiler = start_profiler(run, attempt)
            run.ledger = LedgerFile(directory.path / GOODPUT, attempt, task.nodes) if world.rank == 0 else None
            run.node_metrics = start_node_metrics(run, task)
            run.saver.lock = lock
            with closing(run):
                if rank_map.warning:
                    run.reporter.event("warning", about="placement", why=rank_map.warning)
                evaluate_owed(run)
                notes = [*rank_map.lines, *notes, *_describe_mixture(run, data)]
                _log_start(run, parameter_count, _count_samples(data), notes)
                code = run_training(run)
                if run.profiler is not None:
                    run.profiler.close(run.step)
                raise_if_any_incomplete(find_shortfall(run) if code == EXIT_DONE else None, world)
                _log_end(run, data)
                heartbeat.enter(Phase.END, run.step)
                if run.ledger is not None:
                    run.ledger.write(heartbeat, run.step, ended=True)
                if code == EXIT_DONE:
                    run.reporter.mark_done()
                run.reporter.close_loggers()
                dist.barrier()  # a launcher may end the others as soon as one rank exits with a code that is not 0
                return code
    finally:
        leave_process_group()


def place_rank(config: RunConfig, task: Task) -> RankMap:
    """Agree on which rank each process takes, and bind this one. Every process of the job calls it."""
    return arrange_ranks(
        task, config, needs_mpi(config), find=partial(search_placement, parameters=partial(_count_parameters, config))
    )


def _count_parameters(config: RunConfig) -> int:
    with torch.device("meta"):
        model = build_model(config.model, config.train.seed)
    return sum(parameter.numel() for parameter in model.parameters())


def open_data(config: RunConfig, world: World) -> Dataset | OwnStream:
    """Open the training samples. Rank 0 first builds the token store if it is not there yet."""
    data = _USER_ERRORS.run_on_rank_0_first(
        world, lambda: open_samples(config.data, config.train.sequence_length, "train", get_stream_part(world))
    )
    if isinstance(data, OwnStream):
        return data
    check_model_fits_data(config.model, data)
    return make_task_samples(config, data)


def make_task_samples(config: RunConfig, data: Dataset) -> Dataset:
    """Return the data as the task of a model of transformers wants it; any other model takes it as it is."""
    if not isinstance(config.model, HfModelConfig):
        return data
    from hpc_train.data.samples.task_samples import ContinuationDataset, MaskedDataset
    from hpc_train.models.hf.config_file import find_mask_token, find_start_token, find_task, read_config_file

    file = read_config_file(config.model)
    task = find_task(config.model, file)
    if task == "masked_lm":
        return MaskedDataset(data, config.train.seed, find_mask_token(config.model, file))
    return ContinuationDataset(data, find_start_token(file)) if task == "seq2seq_lm" else data


def get_stream_part(world: World) -> StreamPart:
    """Return which samples of a stream this rank reads."""
    return StreamPart(world.dp_index, world.dp_size)


def make_model(config: RunConfig) -> nn.Module:
    """Make the model: on the meta device if it can be initialised in parts, else with the same values on every rank."""
    if isinstance(config.model, HfModelConfig):
        return build_model(config.model, config.train.seed)
    if not isinstance(config.model, CustomModelConfig):
        with torch.device("meta"):
            return build_model(config.model, config.train.seed)
    model = build_model(config.model, config.train.seed)
    check_sizes(model)
    if isinstance(model, Initialised) and not is_on_meta(model):
        initialise_parameters(model, config.train.seed)
    return model


def make_deferred_model(config: RunConfig, world: World) -> tuple[nn.Module, DeferredValues | None]:
    """Make the model and, if it is the user's own and split over ranks, its values, each made on request.

    So no rank holds the whole model in memory. If its constructor cannot be recorded, every rank builds all of it.
    """
    if isinstance(config.model, HfModelConfig):
        return make_pretrained_model(config.model, config.train.seed, log.warning if world.rank == 0 else log.debug)
    if isinstance(config.model, CustomModelConfig) and splits_parameters(
        config, resolve_degrees(config.parallel, world.size)
    ):
        deferred = build_deferred(partial(build_model, config.model, config.train.seed))
        if deferred is not None and not isinstance(deferred[0], Initialised):
            check_sizes(deferred[0])
            return deferred
    return make_model(config), None


def make_pretrained_model(
    config: HfModelConfig, seed: int, say: Callable[[str], None] = log.warning
) -> tuple[nn.Module, DeferredValues]:
    """Make a model of transformers without memory, and its values: read from its folder, or drawn, each on request.

    say: gets a line for what the weights lack or have in excess. Raises UserError for a folder that cannot be trained.
    """
    from hpc_train.checkpoint.convert.pretrained_weights import find_weights

    make = partial(build_model, config, seed)
    weights = find_weights(config)
    if weights is not None:
        with torch.device("meta"):
            model = make()
        plan = weights.plan(model)
        for line in plan.describe():
            say(f"model.path={config.path}: {line}")
        if not plan.missing:
            remake_buffers(model, seed)
            values = DeferredValues({})
            plan.fill(model, values)
            return model, values
    deferred = build_deferred(make)
    if deferred is None:
        model = make()  # a constructor that cannot be recorded
        deferred = model, DeferredValues({name: parameter.detach() for name, parameter in model.named_parameters()})
    model, values = deferred
    if weights is not None:
        weights.plan(model).fill(model, values)
        detach_values(model)  # small parameters have values by now, and their memory
    return model, values


def advise_learning_rate(config: RunConfig) -> str | None:
    """Return one line if weights are fine-tuned at the default learning rate, which is one for random weights."""
    from hpc_train.checkpoint.convert.pretrained_weights import find_weights

    if not isinstance(config.model, HfModelConfig) or find_weights(config.model) is None:
        return None
    return doubt_learning_rate(config)


def _check_base(config: RunConfig, resumed: ResumedStep | None) -> str:
    """Return the digest of the files of a base in 4 bits, compared with those that adapters were trained on."""
    from hpc_train.checkpoint.convert.quantized_base import check_base, digest_base

    assert isinstance(config.model, HfModelConfig)
    if resumed is not None:
        check_base(config.model, resumed.extra, f"step {resumed.step} in {resumed.directory}")
    return digest_base(config.model)


def make_engine(
    config: RunConfig, world: World, model: nn.Module, say: Report = log.info, values: DeferredValues | None = None
) -> Engine:
    """Build the engine that the config asks for, with its optimizer. say, values: see parallel.apply.build."""
    return build(model, lambda split: make_optimizer(split, config.optim, world), config, world, say, values)


def assemble_run(
    config: RunConfig,
    world: World,
    directory: RunDirectory,
    attempt: int,
    stop: StopRequest,
    data: Dataset | OwnStream,
    engine: Engine,
) -> TrainingRun:
    """Assemble the run, ready for its next step: the one after the checkpoint that is resumed, or the first."""
    steps = count_total_steps(config, _count_samples(data))
    loader, validation = _make_loader(config, data, world, augment=True), _make_validation_loader(config, world)
    run = TrainingRun(config, world, directory, engine, loader, validation, steps, Reporter(directory, attempt), stop)
    before = _USER_ERRORS.run_on_rank_0(world, lambda: read_rollbacks(directory.path / ROLLBACKS))
    run.rollback.restore(before)
    run.guard.skip_samples(run.rollback.entries)
    restarted = ""
    resumed = resume_from_checkpoint(directory.checkpoints, config.checkpoint.resume, engine.shards(), world)
    if resumed is not None and not resumed.weights_only:
        run.step = run.equal_at = resumed.step
        run.saved_at = resumed.step if resumed.directory == directory.checkpoints else None
        run.resumed_from = run.saved_at
        run.owes_validation = run.saved_at is not None and resumed.extra.get("owes_validation", False)
        _check_position(resumed.extra["consumed_samples"], run)
        run.noise.restore(resumed.extra["noise_scale"])
        if "numbers" in resumed.extra:  # not in checkpoints of earlier releases
            run.guard.restore(resumed.extra["numbers"])
        exact = getattr(config.data, "resume", "exact") == "exact"
        restarted = restore_position(loader, resumed.extra.get("data"), run.consumed_samples, exact, world)
        if run.saved_at is not None:
            run.rollback.add_checkpoint(run.saved_at)
    if config.adapter.base == "nf4":
        run.base_digest = _USER_ERRORS.run_on_rank_0(world, partial(_check_base, config, resumed))
    loaded = None
    if config.adapter.path is not None and (resumed is None or resumed.lacks_adapters):
        from hpc_train.training.adapter_start import load_adapter

        loaded = load_adapter(config, engine, world)
    if is_loose(config) and (loaded is not None or (resumed is not None and resumed.weights_only)):
        from hpc_train.parallel.engines.loose_engine import LooseEngine

        assert isinstance(engine, LooseEngine)
        engine.start_from_anchors()
    if run.directory.skipped.exists():
        run.write_skip_list()  # without the steps after the checkpoint, which are about to be done again

    def start_reporter() -> None:
        run.reporter = Reporter.start(config, directory, attempt, steps, run.step, world.rank)

    _USER_ERRORS.run_on_rank_0(world, start_reporter)  # the reporter of every other rank is silent
    if resumed is not None and (other := describe_code_change(resumed.origin, run.saver.origin)) is not None:
        run.reporter.say(other)
    if loaded is not None:
        run.reporter.say(loaded)
    if restarted:
        run.reporter.say(restarted)
    if resumed is not None and resumed.weights_only:
        run.reporter.say(
            f"weights of step {resumed.step} in {resumed.directory}: training starts at step 0 with a fresh optimizer"
        )
        if (doubt := doubt_learning_rate(config)) is not None:
            run.reporter.say(doubt)
    return run


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
        from hpc_train.training.nvtx_ranges import mark_parts

        mark_parts(run.engine, run.world)
    if settings.steps is None and not settings.poll_seconds:
        return None
    from hpc_train.training.profiler import StepProfiler

    say = run.reporter.say if run.world.rank == 0 else log.info
    return StepProfiler(run.config, run.directory.path, attempt, run.world, run.engine.parts, run.step, say)


def _count_samples(data: Dataset | OwnStream) -> int | None:
    return None if isinstance(data, OwnStream) else len(data)


def count_total_steps(config: RunConfig, samples: int | None) -> int:
    """Return the number of updates of the whole run; epochs are rounded up to whole steps. samples: None if unknown."""
    if config.train.wanted_steps is not None:
        return config.train.wanted_steps
    assert config.train.epochs is not None
    if samples is None:
        raise UserError(f"train.epochs={config.train.epochs:g}: an iterable data set has no length; set train.steps")
    return max(1, math.ceil(config.train.epochs * samples / config.train.global_batch))


def _describe_mixture(run: TrainingRun, data: Dataset | OwnStream) -> list[str]:
    """Say how much of the run each source of a mixture gives, and which are repeated."""
    if not isinstance(data, MixtureDataset):
        return []
    return data.describe_run(run.steps * run.config.train.global_batch)


def _does_save(config: RunConfig) -> bool:
    return config.checkpoint.every > 0 or config.checkpoint.weights_every > 0


def _make_loader(config: RunConfig, data: Dataset | OwnStream, world: World, augment: bool = False) -> BatchLoader:
    train_config = config.train
    if isinstance(data, OwnStream):
        return StreamLoader(data, train_config.global_batch, train_config.micro_batch, world.dp_index, world.dp_size)
    seed, sizes = train_config.seed, (train_config.global_batch, train_config.micro_batch)
    return Loader(data, seed, *sizes, world.dp_index, world.dp_size, augment)


def _make_validation_loader(config: RunConfig, world: World) -> BatchLoader | None:
    if not config.train.eval_every or not config.data.validation_fraction:
        return None
    part = get_stream_part(world)
    validation = open_samples(config.data, config.train.sequence_length, "validation", part)
    if not isinstance(validation, OwnStream):
        validation = make_task_samples(config, validation)
    return _make_loader(config, validation, world)


def _check_position(consumed: int, run: TrainingRun) -> None:
    """Raise UserError if the checkpoint was trained with another global batch: samples would be skipped or repeated."""
    if consumed != run.consumed_samples:
        raise UserError(
            f"checkpoint.resume={run.config.checkpoint.resume}: it has seen {consumed} samples in {run.step} "
            f"steps, which is not train.global_batch={run.config.train.global_batch}; use the batch it was trained with"
        )


def _log_from_rank_0(world: World, task: Task, rank_map: RankMap) -> None:
    """Move the log lines to rank 0 if the placement gave that rank to another process than the launcher's first."""
    if world.rank == task.process:
        return
    logging.getLogger("hpc_train").setLevel(logging.INFO if world.rank == 0 else logging.WARNING)
    if task.process == 0:
        print(f"placed: this is rank {world.rank}; rank 0, which speaks for all, is task {_find_task(0, rank_map)}")


def _find_task(rank: int, rank_map: RankMap) -> int:
    return rank_map.process_to_rank.index(rank)


def _write_rank_map(world: World, task: Task, rank_map: RankMap, directory: RunDirectory, attempt: int) -> None:
    """Write rankmap.json to the run directory and to this attempt's logs: another attempt may map ranks differently."""
    location = {
        "rank": world.rank,
        "process": task.process,
        "host": task.host,
        "node": task.node,
        "local_rank": task.local,
    }
    everybody = gather_values({**location, **rank_map.own})
    if world.rank == 0:
        mesh = dict(zip(world.mesh.mesh_dim_names or (), world.mesh.shape, strict=True))
        content = {"reason": rank_map.reason, **rank_map.shared, "mesh": mesh, "ranks": everybody}
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
    run.reporter.event("resume" if resumed else "start", step=run.step, steps=run.steps, world=run.world.size)


def _log_end(run: TrainingRun, data: Dataset | OwnStream) -> None:
    if run.step < run.steps:
        return
    run.reporter.event("end", step=run.step)
    losses = [f"loss {run.last_loss:.4f}"] if run.last_loss is not None else []
    if run.last_validation is not None:
        losses.append(f"validation {run.last_validation:.4f}")
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
    for piece in engine.shards():
        if piece.replica == 0:
            total += piece.local.nbytes
            frozen_bytes += piece.local.nbytes if piece.name in frozen else 0
    if 2 * frozen_bytes <= total:
        return None
    return (
        f"{frozen_bytes / total:.0%} of what a save writes is of frozen parameters: with "
        "checkpoint.incremental=true they are written once"
    )


def find_shortfall(run: TrainingRun) -> str | None:
    """Return one line on why a run that made all its steps is not done; None if it is.

    A run that had nothing to do, because it was resumed at its last step, is done.
    """
    if run.last_loss is None:
        return None
    return _find_not_finite(run) or _find_not_saved(run)


def raise_if_any_incomplete(why: str | None, world: World) -> None:
    """Raise IncompleteRun on all ranks if any rank has a reason. Every rank must call it; it is a barrier."""
    incomplete = torch.tensor(int(why is not None))
    if world.size > 1:
        dist.all_reduce(incomplete, dist.ReduceOp.MAX)
        dist.barrier()  # a launcher may end the other ranks as soon as one exits with a nonzero code
    if incomplete.item():
        raise IncompleteRun(why or "not done: another rank says so")


def _find_not_finite(run: TrainingRun) -> str | None:
    """Return a line if the last step's loss, gradient or evaluation is not finite."""
    assert run.last_loss is not None
    todo = f"lower optim.lr (now {run.config.optim.lr:g}), or look at the data of that step"
    if run.lost_since is not None:
        what = f"is {run.last_loss}" if not math.isfinite(run.last_loss) else "or its gradient is not finite"
        return f"not done: the loss {what} at the last step ({run.step}), and since step {run.lost_since}; {todo}"
    if run.validated_at == run.step and run.last_validation is not None and not math.isfinite(run.last_validation):
        return f"not done: the validation loss is {run.last_validation} at the last step ({run.step}); {todo}"
    return None


def _find_not_saved(run: TrainingRun) -> str | None:
    """Return a line if the last step's checkpoint was not saved, or the last weights if there are no others."""
    checkpoint = run.config.checkpoint
    if checkpoint.every and run.saved_at != run.step:
        newest = f"the newest saved is of step {run.saved_at}" if run.saved_at is not None else "none was saved"
        return (
            f"not done: step {run.step}, the last, was not saved ({newest}): {_explain_failed_save(run, weights=False)}"
        )
    if not checkpoint.every and checkpoint.weights_every and (weights := run.save_failures.get(True)):
        return f"not done: the weights of step {weights.step} were not saved: {_explain_failed_save(run, weights=True)}"
    return None


def _explain_failed_save(run: TrainingRun, weights: bool) -> str:
    failure = run.save_failures.get(weights)
    why = failure.why if failure else "no save of it has ended"
    return f"{why}; make room or mend that, and `hpc-train resume` goes on"
