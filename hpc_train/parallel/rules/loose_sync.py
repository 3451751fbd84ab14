"""Rules of loose synchronisation."""

from __future__ import annotations

from hpc_train.config.keys.overrides import format_changed_setting
from hpc_train.config.parallel import Degrees, SyncConfig
from hpc_train.config.run import RunConfig, is_loose
from hpc_train.errors import UserError


def check_loose_rules(config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError for what copies that train on their own cannot do."""
    sync = config.parallel.sync
    if not is_loose(config):
        if sync != SyncConfig():
            changed = format_changed_setting(sync)
            raise UserError(f"parallel.sync.{changed}: has no effect without parallel.sync.every; set that to 50 or so")
        return
    option = f"parallel.sync.every={sync.every}"
    _check_copies(config, degrees, option)
    _check_techniques(config, option)
    _check_exchange(config, option)
    if sync.lost_after_seconds is not None:
        _check_loss_of_copies(config, degrees, f"parallel.sync.lost_after_seconds={sync.lost_after_seconds:g}")


def _check_copies(config: RunConfig, degrees: Degrees, option: str) -> None:
    if degrees.dp_replicate == 1 and config.parallel.dp_replicate != 1:
        raise UserError(
            f"{option}: there is a single copy of the model, because parallel.dp_replicate is 1 unless given; give the "
            "number of copies (1 for an outer optimizer over one copy), or leave it out"
        )
    for pipeline_option in ("timeline", "resplit"):
        if getattr(config.parallel.pipeline, pipeline_option):
            raise UserError(
                f"{option}: parallel.pipeline.{pipeline_option}=true writes one file per run, and every copy has a "
                "pipeline of its own; leave it out"
            )
    batch, copies = config.train.global_batch, degrees.dp_replicate
    if batch % copies:
        lower = batch // copies * copies
        legal = f"{lower} or {lower + copies}" if lower else str(copies)
        raise UserError(f"train.global_batch={batch}: does not divide over {copies} copies ({degrees}); use {legal}")


def _check_techniques(config: RunConfig, option: str) -> None:
    parallel = config.parallel
    if parallel.server.mode != "none":
        raise UserError(f"{option}: not with parallel.server.mode={parallel.server.mode}; leave one of them out")
    if parallel.reduce_with != "torch" or parallel.compression.method != "none":
        raise UserError(
            f"{option}: no gradients are sent between copies; leave out parallel.compression and reduce_with "
            "(parallel.sync.compression is for outer gradients)"
        )
    if parallel.sync_batchnorm:
        raise UserError(f"{option}: copies do not meet in a step, so parallel.sync_batchnorm cannot; leave it out")
    if (parallel.offload.parameters, parallel.offload.optimizer) != ("none", "none"):
        raise UserError(f"{option}: outer gradients are formed where the parameters are; leave out parallel.offload")
    if config.optim.name in ("muon", "adafactor"):
        raise UserError(
            f"{option}: optim.name={config.optim.name} is not made for copies that train apart; use optim=adamw or sgd"
        )
    if config.optim.ema.decay is not None:
        raise UserError(f"{option}: each copy would have its own average of the weights; leave out optim.ema.decay")
    if config.precision.name == "fp16":
        raise UserError(f"{option}: each copy would have a loss scale of its own; use precision=bf16 or fp32")


def _check_loss_of_copies(config: RunConfig, degrees: Degrees, setting: str) -> None:
    """Raise UserError for what cannot go on when a copy is lost."""
    checkpoint = config.checkpoint
    if degrees.dp_replicate == 1:
        raise UserError(f"{setting}: there is a single copy of the model; give parallel.dp_replicate, or leave it out")
    if config.parallel.sync.overlap:
        raise UserError(
            f"{setting}: an exchange that fails is made again at once, so none goes on beside steps; leave out "
            "parallel.sync.overlap"
        )
    watched = config.resilience
    if config.launch.kind == "slurm" and not (watched.watch and watched.act and watched.restarts):
        raise UserError(
            f"{setting}: a job that loses nodes has to be watched; use resilience.watch=true, resilience.act=true and "
            "resilience.restarts of 1 or more, or leave it out"
        )
    if config.launch.points_per_job > 1:
        raise UserError(
            f"{setting}: nobody watches points that share a job; use launch.points_per_job=1, or leave it out"
        )
    for name, used in (
        ("incremental=true", checkpoint.incremental),
        (f"ranks_per_file={checkpoint.ranks_per_file}", checkpoint.ranks_per_file != 1),
        ("parallel_hdf5=true", checkpoint.parallel_hdf5),
    ):
        if used:
            raise UserError(
                f"{setting}: not with checkpoint.{name}, which needs the same ranks in each save; leave it out"
            )


def _check_exchange(config: RunConfig, option: str) -> None:
    sync, steps = config.parallel.sync, config.train.wanted_steps
    assert sync.every is not None
    default = SyncConfig()
    if sync.overlap >= sync.every:
        raise UserError(f"parallel.sync.overlap={sync.overlap}: must be less than {option}; lower it, or raise every")
    if sync.fragments > sync.every:
        raise UserError(
            f"parallel.sync.fragments={sync.fragments}: one fragment is exchanged in a step, and each in every "
            f"{sync.every} steps; use {sync.every} at most, or a larger parallel.sync.every"
        )
    if sync.merge != default.merge and sync.overlap == 0:
        raise UserError(
            f"parallel.sync.merge={sync.merge:g}: has no effect without parallel.sync.overlap; leave it out"
        )
    if sync.block != default.block and sync.compression == "none":
        raise UserError(
            f"parallel.sync.block={sync.block}: has no effect without parallel.sync.compression; leave it out"
        )
    if steps is not None and steps % sync.every:
        lower = steps // sync.every * sync.every
        legal = f"{lower} or {lower + sync.every}" if lower else str(sync.every)
        raise UserError(
            f"train.steps={steps}: the last {steps % sync.every} steps would come after the last exchange ({option}) "
            f"and be lost; use {legal}"
        )
