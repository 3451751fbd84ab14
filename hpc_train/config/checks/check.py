"""Check what types cannot express: ranges, and fields that must agree with one another.

What depends on the number of ranks, or on two techniques together, is checked in parallel/rules instead.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Collection
from dataclasses import fields, is_dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from hpc_train.config.checks.secret_variables import is_secret_name
from hpc_train.config.cluster import check_cluster
from hpc_train.config.optim import OPTIMIZERS, SCHEDULES
from hpc_train.config.parallel import list_requested_degrees
from hpc_train.config.profile import check_ranks, parse_steps
from hpc_train.config.run import RunConfig
from hpc_train.config.schema import Range
from hpc_train.config.train import CheckpointConfig
from hpc_train.errors import UserError
from hpc_train.near_names import TYPO, did_you_mean, find_near_names, suggest_components

_POOL = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_-]{0,7}\.)?[A-Za-z0-9_][A-Za-z0-9_-]{0,14}")
"""`<pool>` or `<file system>.<pool>`."""
_NO_SUCH = object()
_PATHS = re.compile(r"run_dir|.*\.(\w*dir|path|cache|topology|calibration)")
_PATH_BYTES, _NAME_BYTES = 3072, 255
"""Linux allows 4,095 bytes in a path; a run's own files add a few hundred."""
_MAX_WHOLE, _MAX = 1 << 63, 1e30
"""Larger numbers are treated as typos."""
_SHARED = "because ranks that share a file must know its layout before anything is compressed"
_UNCOMPRESSED = {
    "ranks_per_file": _SHARED,
    "parallel_hdf5": _SHARED,
    "stage_dir": "which frees the memory at once, while compression happens in memory",
}
"""Settings of checkpoint that exclude compression, and why."""


def check_config(config: RunConfig, checked: Collection[str] = ()) -> RunConfig:
    """Raise UserError for the first value that is out of range or contradicts another; returns the config.

    checked: names of groups whose values were found in range before.
    """
    _check_block_formats(config)
    check_group(config, "", checked)
    check_cluster(config.cluster)
    _check_length(config)
    _check_optim(config)
    _check_components(config)
    _check_train(config)
    _check_matmul(config)
    _check_resume(config)
    _check_lustre(config)
    _check_plan(config)
    _check_compression(config)
    _check_sharing(config)
    _check_loggers(config)
    _check_profile(config)
    list_requested_degrees(config.parallel)
    _check_fixed(config)
    return config


def _check_block_formats(config: RunConfig) -> None:
    """Say what to use instead of formats of 4 bits, before they are called no choice."""
    float8 = config.precision.float8
    if float8 in ("mxfp4", "nvfp4"):
        raise UserError(
            f"precision.float8={float8}: there is no training with products of 4 bits; use precision.float8=mxfp8 on "
            "GPUs of compute capability 10.0 or 10.3 (B200, B300), rowwise on others"
        )


def check_group(config: Any, path: str, checked: Collection[str] = ()) -> None:
    """Raise UserError for the first value of one group's config that is out of range.

    path: its name, with a dot. checked: names of values to pass over.
    """
    for item in fields(config):
        value, where = getattr(config, item.name), f"{path}{item.name}"
        if where in checked:
            continue
        if is_dataclass(value):
            check_group(value, f"{where}.")
        elif isinstance(value, list) and any(is_dataclass(element) for element in value):
            for index, element in enumerate(value):
                check_group(element, f"{where}.{index}.")
        else:
            _check_value(value, where, item.metadata.get("range"))


def _check_value(value: Any, where: str, allowed: Range | None) -> None:
    if isinstance(value, list):  # whose type OmegaConf checks for plain elements only
        for index, element in enumerate(value):
            if isinstance(element, (dict, list)):
                raise UserError(f"{where}.{index}={element}: must be one value, such as text or a number")
    for text in _list_strings(value):
        # Values end up in batch scripts, file names and terminals, where a newline or an escape could do anything.
        if any(unicodedata.category(character) == "Cc" for character in text):
            raise UserError(
                f"{where}={text!r}: control characters (newlines too) are refused; write it in one plain line"
            )
    if isinstance(value, str) and _PATHS.fullmatch(where):
        _check_path(value, where)
    if value == "":
        raise UserError(f"{where}=: is empty; leave it out, or write {where}=null for none")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where}={value}: must be a finite number")
    if isinstance(value, (str, int, float)) and allowed and (why := allowed.problem(value)):
        near = find_near_names(str(value), allowed.choices or (), TYPO)
        raise UserError(f"{where}={value}: {why}{f'; {did_you_mean(near)}' if near else ''}")
    _check_number(value, where)


def _check_path(value: str, where: str) -> None:
    # Bytes, not characters: that is what the kernel counts.
    longest = max(len(name.encode()) for name in value.split("/"))
    if len(value.encode()) > _PATH_BYTES or longest > _NAME_BYTES:
        raise UserError(
            f"{where}={value[:40]}...: is {len(value):,} characters long; a path may have {_PATH_BYTES:,} bytes, "
            f"and each name in it {_NAME_BYTES}"
        )


def _check_number(value: Any, where: str) -> None:
    """Check a number, or a list of numbers.

    The arguments of a user's model are not checked; they are the model's to judge.
    """
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check_number(item, f"{where}.{index}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where}={value}: must be a finite number")
    if isinstance(value, (int, float)) and abs(value) >= (_MAX_WHOLE if isinstance(value, int) else _MAX):
        raise UserError(f"{where}={value}: is too large for this setting; check its digits")


def _list_strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for item in pair for text in _list_strings(item)]
    return [text for item in value for text in _list_strings(item)] if isinstance(value, (list, tuple)) else []


def _check_length(config: RunConfig) -> None:
    train, longest = config.train, getattr(config.model, "max_positions", None)
    if train.epochs is not None and train.steps is not None:
        raise UserError(f"train.steps={train.steps} and train.epochs={train.epochs:g}: give one of them")
    if longest is not None and train.sequence_length > longest:
        raise UserError(
            f"train.sequence_length={train.sequence_length}: longer than model.max_positions={longest} of "
            f"{config.model.name}"
        )


def _check_fixed(config: RunConfig) -> None:
    for key in config.parallel.fixed or ():
        node: Any = config
        for name in key.split("."):
            node = getattr(node, name, _NO_SUCH) if is_dataclass(node) else _NO_SUCH
        if node is _NO_SUCH or not (key.startswith("parallel.") or key == "train.micro_batch"):
            raise UserError(f"parallel.fixed: {key} is neither a key of parallel nor train.micro_batch")


def _check_optim(config: RunConfig) -> None:
    optim = config.optim
    if optim.lr_scaling != "none" and optim.base_batch is None:
        raise UserError(
            f"optim.lr_scaling={optim.lr_scaling}: needs optim.base_batch, the global batch that optim.lr was tuned at"
        )
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        raise UserError(f"optim.betas={optim.betas}: must be two numbers in [0, 1)")


def _check_train(config: RunConfig) -> None:
    train = config.train
    if train.micro_batch > train.global_batch:
        raise UserError(
            f"train.micro_batch={train.micro_batch}: larger than train.global_batch={train.global_batch}; "
            f"a rank cannot take more sequences at once than a step has; use at most {train.global_batch}"
        )


def _check_matmul(config: RunConfig) -> None:
    precision = config.precision
    if precision.matmul != "highest" and precision.name == "fp64":
        raise UserError(
            f"precision.matmul={precision.matmul}: is for products of float32, of which precision=fp64 has none; leave "
            "it out"
        )


def _check_components(config: RunConfig) -> None:
    """Check the names that a user's Python module or an installed package may add to, where none was named."""
    optim = config.optim
    for where, noun, value, builtin, group in (
        ("optim.name", "optimizer", optim.name, OPTIMIZERS, "hpc_train.optimizers"),
        ("optim.schedule.name", "schedule", optim.schedule.name, SCHEDULES, "hpc_train.schedules"),
    ):
        if value in builtin or optim.module is not None:
            continue
        installed = sorted({point.name for point in entry_points(group=group)}.difference(builtin))
        if value not in installed:
            hint = suggest_components(value, (*builtin, *installed), "optim.module")
            raise UserError(f"{where}={value}: not a registered {noun}; {hint}")
    if optim.name in OPTIMIZERS and optim.args:
        raise UserError(
            f"optim.args ({', '.join(optim.args)}): is for optim=custom; {optim.name} has settings of its own"
        )
    if optim.schedule.name in SCHEDULES and optim.schedule.args:
        raise UserError(f"optim.schedule.args: {optim.schedule.name} has settings of its own; leave it out")


def _check_resume(config: RunConfig) -> None:
    resume = config.checkpoint.resume
    if resume in ("auto", "never") or resume.isdigit() or "/" in resume:
        return
    hint = f"; for the folder {resume} write checkpoint.resume=./{resume}" if Path(resume).is_dir() else ""
    raise UserError(f"checkpoint.resume={resume}: must be auto, never, a step, or the path of a checkpoint{hint}")


def _check_sharing(config: RunConfig) -> None:
    checkpoint = config.checkpoint
    if checkpoint.parallel_hdf5:
        _check_parallel_hdf5(config)
    elif checkpoint.incremental and checkpoint.ranks_per_file != 1:
        raise UserError(
            f"checkpoint.ranks_per_file={checkpoint.ranks_per_file}: with checkpoint.incremental=true every rank has "
            "files of its own, which later steps share; leave one of them out"
        )
    if checkpoint.whole_every and not checkpoint.incremental:
        raise UserError(
            f"checkpoint.whole_every={checkpoint.whole_every}: without checkpoint.incremental=true every save is "
            "whole; leave it out, or set that too"
        )


def _check_profile(config: RunConfig) -> None:
    profile, steps = config.profile, config.train.wanted_steps
    check_ranks(profile.ranks)
    if profile.steps is not None and steps is not None and parse_steps(profile.steps)[1] > steps:
        raise UserError(f"profile.steps={profile.steps}: the run has {steps} steps (train.steps)")


def _check_loggers(config: RunConfig) -> None:
    loggers = config.loggers
    if len(set(loggers.use)) != len(loggers.use):
        raise UserError(f"loggers.use={loggers.use}: names a logger twice; leave one out")
    for name in _list_dict_keys(loggers.args):
        if is_secret_name(name):
            raise UserError(
                f"loggers.args: {name} looks like a secret, and a configuration is written to files; read it from the "
                "environment in your own code"
            )
    uri = loggers.mlflow.tracking_uri
    # Only before the first slash: an @ in a path is no password.
    if uri is not None and "@" in uri.partition("://")[2].partition("/")[0]:
        raise UserError(
            "loggers.mlflow.tracking_uri: has a user or password in it, and a configuration is written to files; leave "
            "it out, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )


def _list_dict_keys(value: Any) -> list[str]:
    """Return the keys of a dict and of all dicts in it."""
    if isinstance(value, dict):
        return [name for key, item in value.items() for name in (str(key), *_list_dict_keys(item))]
    return [name for item in value for name in _list_dict_keys(item)] if isinstance(value, (list, tuple)) else []


def _check_compression(config: RunConfig) -> None:
    checkpoint = config.checkpoint
    if checkpoint.compression == "none" and checkpoint.compression_level != 1:
        raise UserError(
            f"checkpoint.compression_level={checkpoint.compression_level}: no effect with checkpoint.compression=none; "
            "set checkpoint.compression=deflate"
        )
    for name, why in _UNCOMPRESSED.items():
        # Compared with the default, because a setting that was not touched contradicts nothing.
        if checkpoint.compression != "none" and getattr(checkpoint, name) != getattr(CheckpointConfig(), name):
            raise UserError(
                f"checkpoint.compression={checkpoint.compression}: not with checkpoint.{name}="
                f"{getattr(checkpoint, name)}, {why}; leave one of them out"
            )


def _check_parallel_hdf5(config: RunConfig) -> None:
    checkpoint, setting = config.checkpoint, "checkpoint.parallel_hdf5=true"
    for name in ("ranks_per_file", "writers_per_node", "stage_dir", "incremental"):
        if getattr(checkpoint, name) != getattr(CheckpointConfig(), name):
            raise UserError(
                f"checkpoint.{name}={getattr(checkpoint, name)}: no effect with {setting}, where all ranks write one "
                "file at once from memory; leave one of them out"
            )
    if config.parallel.reduce_with == "mpi" or config.parallel.server.mode != "none":
        raise UserError(
            f"{setting}: the training uses MPI too, which serves one thread at a time; set "
            "checkpoint.ranks_per_file=0, which shares files without MPI"
        )


def _check_lustre(config: RunConfig) -> None:
    lustre = config.checkpoint.lustre
    if lustre.stripe_count == 0:
        raise UserError("checkpoint.lustre.stripe_count=0: must be -1 (all OSTs) or at least 1; null lets it be chosen")
    if lustre.pool is not None and not _POOL.fullmatch(lustre.pool):
        raise UserError(
            f"checkpoint.lustre.pool={lustre.pool}: is not the name of a pool; `lfs pool_list <file system>` lists them"
        )


def _check_plan(config: RunConfig) -> None:
    plan, energy = config.plan, config.plan.energy
    for name in ("nodes", "global_batches"):
        for value in getattr(plan, name):
            if value < 1:
                raise UserError(f"plan.{name}=[{value}]: must be >= 1")
    if plan.budget is not None and plan.price_per_gpu_hour is None and plan.spot_price_per_gpu_hour is None:
        raise UserError(f"plan.budget={plan.budget:g}: needs plan.price_per_gpu_hour or plan.spot_price_per_gpu_hour")
    if plan.spot_price_per_gpu_hour is not None and plan.spot_interruptions_per_1000_node_days is None:
        raise UserError(
            f"plan.spot_price_per_gpu_hour={plan.spot_price_per_gpu_hour:g}: needs "
            "plan.spot_interruptions_per_1000_node_days, without which the price says little"
        )
    if energy.watts_per_gpu is None and (energy.pue, energy.price_per_kwh, energy.co2_grams_per_kwh) != (None,) * 3:
        raise UserError("plan.energy: needs watts_per_gpu, the mean draw of a GPU with its share of the node")
    if (plan.checkpoint_stall_seconds or 0.0) > (plan.checkpoint_seconds or math.inf):
        raise UserError(
            f"plan.checkpoint_stall_seconds={plan.checkpoint_stall_seconds:g}: longer than the whole save, "
            f"plan.checkpoint_seconds={plan.checkpoint_seconds:g}"
        )
    if plan.failures_per_1000_node_days is not None and plan.failure_logs:
        raise UserError(
            f"plan.failures_per_1000_node_days={plan.failures_per_1000_node_days:g}: there are plan.failure_logs too; "
            "give one of them"
        )
