"""Assemble a run, ready for its next step: resume its checkpoint, or start from adapters or weights."""

from __future__ import annotations

import logging
from functools import partial

from hpc_train.checkpoint import ResumedStep, resume_from_checkpoint
from hpc_train.config.model import HfModelConfig
from hpc_train.config.run import RunConfig, is_loose
from hpc_train.data.datasets import Dataset
from hpc_train.data.own_dataset import OwnStream
from hpc_train.data.stream_loader import restore_position
from hpc_train.errors import UserError
from hpc_train.interfaces import Engine, World
from hpc_train.resilience.load_history import end_load, note_load, read_passed_over
from hpc_train.runtime.consensus import Consensus
from hpc_train.runtime.stop_request import StopRequest
from hpc_train.training.factory import count_samples, count_total_steps, make_loader, make_validation_loader
from hpc_train.training.lost_copies import find_copy_group
from hpc_train.training.numerics.rollback import ROLLBACKS, read_rollbacks
from hpc_train.training.optimizer import find_learning_rate_problem
from hpc_train.training.records.reporter import Reporter
from hpc_train.training.records.run_records import record_unusable_checkpoint
from hpc_train.training.run_directory import RunDirectory, check_nothing_was_saved, find_lost_checkpoint
from hpc_train.training.saving import describe_code_change
from hpc_train.training.training_run import TrainingRun

log = logging.getLogger(__name__)
# Any other error stays on its own rank, and is the first that the run reports, with its traceback.
_USER_ERRORS = Consensus(shared=())


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
    steps = count_total_steps(config, count_samples(data))
    loader, validation = make_loader(config, data, world, augment=True), make_validation_loader(config, world)
    run = TrainingRun(config, world, directory, engine, loader, validation, steps, Reporter(directory, attempt), stop)
    run.copy_group = find_copy_group(config, engine, data)
    # Rollbacks of earlier attempts: their samples are left out from the first step on.
    run.numbers.rollback.restore(_USER_ERRORS.run_on_rank_0(world, lambda: read_rollbacks(directory.path / ROLLBACKS)))
    run.numbers.guard.skip_samples(run.numbers.rollback.entries)
    resumed, lines = _resume(run, attempt)
    if config.adapter.base == "nf4":
        run.saves.base_digest = _USER_ERRORS.run_on_rank_0(world, partial(_check_base, config, resumed))
    elif resumed is not None and (changed := _find_changed_base(run, resumed)) is not None:
        lines.append(changed)
    loaded = _load_starting_adapter(run, resumed)
    lines = [loaded, *lines] if loaded is not None else lines
    if resumed is None and (random_base := find_random_base_problem(config)) is not None:
        lines.append(random_base)
    if is_loose(config) and (loaded is not None or (resumed is not None and resumed.weights_only)):
        from hpc_train.parallel.engines.loose_engine import LooseEngine

        assert isinstance(engine, LooseEngine)
        engine.start_from_anchors()
    if directory.skipped.exists():
        run.write_skip_list()  # without the steps after the checkpoint, which are about to be done again

    def start_reporter() -> None:
        run.reporter = Reporter.start(config, directory, attempt, steps, run.step, world.rank)

    _USER_ERRORS.run_on_rank_0(world, start_reporter)  # the reporter of every other rank is silent
    for line in lines:
        run.reporter.say(line)
    return run


def _resume(run: TrainingRun, attempt: int) -> tuple[ResumedStep | None, list[str]]:
    """Load the checkpoint that checkpoint.resume chooses, if any; returns it, and lines to print. A collective.

    The load is noted in the logs before it begins, and the note ended after it: a checkpoint whose load has ended the
    ranks twice is passed over at the next start (launch.recovery.crashing_checkpoints).
    """
    config, world, logs = run.config, run.world, run.directory.logs(attempt)
    record_unusable = partial(record_unusable_checkpoint, run.directory.events, attempt)
    resumed = resume_from_checkpoint(
        run.directory.checkpoints,
        config.checkpoint.resume,
        run.engine.shards(),
        world,
        partial(note_load, logs),
        record_unusable,
    )
    if config.checkpoint.resume == "auto":
        if resumed is None:
            _USER_ERRORS.run_on_rank_0(world, partial(check_nothing_was_saved, run.directory))
        elif world.rank == 0 and (lost := find_lost_checkpoint(run.directory)) is not None:
            why = f"checkpoint step {lost} is not in {run.directory.checkpoints} any more"
            log.warning("%s; the run goes on from step %d", why, resumed.step)
            record_unusable(lost, why)
    lines = _restore_run(run, resumed) if resumed is not None else []
    _USER_ERRORS.gather_and_decide(world, lambda: None, lambda _: None)  # until no rank can die in the load any more
    if world.rank == 0:
        end_load(logs)
        run.saves.passed_over = read_passed_over(run.directory.events)
    return resumed, lines


def _restore_run(run: TrainingRun, resumed: ResumedStep) -> list[str]:
    """Put the run where its checkpoint was saved; returns lines to print. Tensors are in their places already."""
    changed = describe_code_change(resumed.origin, run.saves.saver.origin)
    lines = [changed] if changed is not None else []
    if resumed.weights_only:
        lines.append(
            f"weights of step {resumed.step} in {resumed.directory}: training starts at step 0 with a fresh optimizer"
        )
        rate_problem = find_learning_rate_problem(run.config)
        return [*lines, rate_problem] if rate_problem is not None else lines
    extra = resumed.extra
    run.step = run.numbers.equal_at = resumed.step
    run.saves.saved_at = resumed.step if resumed.directory == run.directory.checkpoints else None
    run.saves.resumed_from = run.saves.saved_at
    run.evaluation.is_owed = run.saves.saved_at is not None and extra.get("owes_validation", False)
    _check_position(extra["consumed_samples"], run)
    run.numbers.noise.restore(extra["noise_scale"])
    run.numbers.guard.restore(extra["numbers"])
    exact = getattr(run.config.data, "resume", "exact") == "exact"
    restarted = restore_position(run.loader, extra.get("data"), run.consumed_samples, exact, run.world)
    if run.saves.saved_at is not None:
        run.numbers.rollback.add_checkpoint(run.saves.saved_at)
    return [*lines, restarted] if restarted else lines


def _load_starting_adapter(run: TrainingRun, resumed: ResumedStep | None) -> str | None:
    """Load adapter.path if no checkpoint has adapters yet; returns a line to print, or None if nothing was loaded."""
    if run.config.adapter.path is None or (resumed is not None and not resumed.lacks_adapters):
        return None
    from hpc_train.training.adapter_start import load_adapter

    return load_adapter(run.config, run.engine, run.world)


def find_random_base_problem(config: RunConfig) -> str | None:
    """Return a line about adapters on a model of transformers whose folder has no weights; None where all is well."""
    model = config.model
    if config.adapter.kind == "none" or not isinstance(model, HfModelConfig) or model.weights != "auto":
        return None
    from hpc_train.checkpoint.convert.pretrained_weights import find_weights

    if find_weights(model) is not None:
        return None
    return (
        f"WARNING: model.path={model.path} has no weights, so adapters are trained on random ones; give a folder with "
        "weights, or model.weights=draw"
    )


def _check_base(config: RunConfig, resumed: ResumedStep | None) -> str:
    """Return the digest of the files of a base in 4 bits, compared with those that adapters were trained on."""
    from hpc_train.checkpoint.convert.quantized_base import check_base, digest_base

    assert isinstance(config.model, HfModelConfig)
    if resumed is not None:
        check_base(config.model, resumed.extra, f"step {resumed.step} in {resumed.directory}")
    return digest_base(config.model)


def _find_changed_base(run: TrainingRun, resumed: ResumedStep) -> str | None:
    """Return a line if model.path has other weights than those that the adapters of a checkpoint were trained on.

    Rank 0 compares its own parts; None on the other ranks.
    """
    model = run.config.model
    if run.config.adapter.kind == "none" or not isinstance(model, HfModelConfig) or resumed.lacks_adapters:
        return None
    from hpc_train.checkpoint.convert.adapted_base import describe_change, find_changed_weight

    shards = list(run.engine.shards())
    changed = _USER_ERRORS.run_on_rank_0(run.world, lambda: find_changed_weight(shards, model))
    return changed and f"warning: {describe_change(model, changed)}; the run goes on with those of its checkpoint"


def _check_position(consumed: int, run: TrainingRun) -> None:
    """Raise UserError if the checkpoint was trained with another global batch: samples would be skipped or repeated."""
    if consumed != run.consumed_samples:
        raise UserError(
            f"checkpoint.resume={run.config.checkpoint.resume}: it has seen {consumed} samples in {run.step} "
            f"steps, which is not train.global_batch={run.config.train.global_batch}; use the batch it was trained with"
        )
