"""Save and load checkpoints in any training loop: the public class for programs other than `hpc-train train`.

    with hpc_train.Checkpointer("checkpoints") as checkpointer:
        loaded = checkpointer.load_latest(model=model, optimizer=optimizer)
        for step in range(loaded.step if loaded else 0, steps):
            ...
            checkpointer.save_async(step + 1, model=model, optimizer=optimizer, extra={"consumed": consumed})

The files are the same that `hpc-train train` writes, so `hpc-train checkpoint ls|verify|reshard|export` work on them.
"""

from __future__ import annotations

import atexit
import logging
import operator
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, cast

import torch
import torch.distributed as dist

from hpc_train.checkpoint.extra_values import make_extra_targets, pack_extra, unpack_extra
from hpc_train.checkpoint.load.load_step import load_newest_sound, load_step
from hpc_train.checkpoint.module_shards import Modules, choose_writers, find_fused_names, make_shards, name_tensors
from hpc_train.checkpoint.optimizer_state import NamedOptimizers, Optimizers, StateValue
from hpc_train.checkpoint.rank_consensus import gather_and_decide, run_on_rank_0
from hpc_train.checkpoint.save.save_step import SaveResult
from hpc_train.checkpoint.save.saver import Saver
from hpc_train.checkpoint.storage.lock import Lock, take_lock
from hpc_train.checkpoint.storage.retention import prune_steps
from hpc_train.checkpoint.storage.step_directory import list_committed_steps
from hpc_train.checkpoint.storage.step_selection import open_step
from hpc_train.errors import UserError
from hpc_train.interfaces import TensorShard, World

_log = logging.getLogger(__name__)
_EXTRA, _GROUPS = "checkpointer_extra", "checkpointer_groups"
"""Keys of the manifest's `extra`: what the user gave, and the parameter groups of the optimizers."""


class LoadedStep(NamedTuple):
    """A step that was loaded."""

    step: int
    extra: dict[str, Any]


class _SavedState(NamedTuple):
    """Contents of a step's manifest that a load needs before it reads tensors."""

    extra: dict[str, Any]
    optimizer_names: list[str]


class Checkpointer:
    """Saves and loads models and optimizers in one directory. Every rank makes the same calls."""

    def __init__(
        self,
        directory: str | Path,
        world: World | None = None,
        *,
        keep: int | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        """directory: on a file system that all ranks see; it is made at the first save.

        world: from `hpc_train.init()`; without one, the ranks of torch's default process group, or this process alone.
        keep: after each save, delete all but this number of steps; None keeps all. timeout: for one save.
        Raises UserError if the ranks cannot exchange CPU tensors, which all saves and loads do.
        """
        if keep is not None and keep < 1:
            raise UserError(f"Checkpointer: keep={keep} keeps nothing; give at least 1, or None to keep all steps")
        self.directory = Path(directory).expanduser().absolute()
        self.world = world or describe_ranks()
        self._saver = Saver(self.directory, self.world, timeout=timeout)
        if keep is not None:
            self._saver.on_commit = lambda _: prune_steps(self.directory, keep)
        self._locked = False

    def save(
        self,
        step: int,
        *,
        model: Modules,
        optimizer: Optimizers | None = None,
        extra: dict[str, Any] | None = None,
    ) -> SaveResult:
        """Save a step and return when it is on the disk. A collective.

        model: a module, the stages of one, or a dictionary of modules, split in any way that DTensor describes.
        extra: JSON values and tensors of rank 0, such as a scheduler's state_dict(). Raises CheckpointError on all
        ranks if nothing was saved, UserError for what cannot be saved.
        """
        future = self._start_save(step, model, optimizer, extra, background=False)
        try:
            return future.result()
        finally:
            self._saver.take_finished()  # this outcome is raised here, and not by `close` again

    def save_async(
        self,
        step: int,
        *,
        model: Modules,
        optimizer: Optimizers | None = None,
        extra: dict[str, Any] | None = None,
    ) -> Future[SaveResult]:
        """As `save`, but return when everything is copied to memory, and write in a thread.

        The future's `result()` raises CheckpointError if nothing was saved; rank 0 also logs it. The next save waits
        for this one, and so does `close`.
        """
        future = self._start_save(step, model, optimizer, extra, background=True)
        if self.world.rank == 0:
            future.add_done_callback(_log_failure)
        return future

    def latest_step(self) -> int | None:
        """Return the newest step, for what has to be made before a load; None if there is no step. A collective.

        It is not verified: `load_latest` skips a damaged one, and returns the step that it has loaded.
        """
        steps: list[int] = run_on_rank_0(self.world, lambda: list_committed_steps(self.directory)[-1:])
        return steps[0] if steps else None

    def load_latest(self, *, model: Modules, optimizer: Optimizers | None = None) -> LoadedStep | None:
        """Load the newest sound step, in place; None if there is no step. A collective.

        A damaged step is skipped with a warning. Raises CheckpointError if no step is sound, UserError if it is of
        another model or optimizer.
        """
        return load_newest_sound(
            self.directory, self.world, lambda step: LoadedStep(step, self.load(step, model=model, optimizer=optimizer))
        )

    def load(self, step: int, *, model: Modules, optimizer: Optimizers | None = None) -> dict[str, Any]:
        """Load a step, in place, into any layout and number of ranks; returns its `extra`. A collective.

        A fresh optimizer is given its state first. Raises as `load_latest`, and CheckpointError if the step is damaged.
        """
        where = f"checkpoint step {step} in {self.directory}"
        saved = _SavedState(*run_on_rank_0(self.world, lambda: self._read_saved_state(step)))
        # In a list of this rank: what the call itself returns would be sent to rank 0.
        prepared: list[tuple[list[TensorShard], list[StateValue], NamedOptimizers | None]] = []
        gather_and_decide(
            self.world, lambda: prepared.append(_prepare_load(model, optimizer, saved, where)), lambda _: None
        )
        ((shards, values, named),) = prepared
        extra_shards = make_extra_targets(saved.extra.get(_EXTRA))
        load_step(self.directory, step, shards + extra_shards, self.world)
        for value in values:
            value.write_back()
        if named is not None and _GROUPS in saved.extra:
            named.restore_groups(saved.extra[_GROUPS])
        if _EXTRA not in saved.extra:
            return saved.extra  # saved by `hpc-train train`
        return cast(dict[str, Any], unpack_extra(saved.extra[_EXTRA], [shard.local for shard in extra_shards]))

    def close(self) -> None:
        """Wait for the last save, and release the lock of the directory. Raises CheckpointError if that save failed."""
        finished = self._saver.wait()
        self._release()
        for saved in finished[-1:]:
            saved.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, SystemExit):  # such as Preemption.requeue, on all ranks
            self.close()
        else:
            self._release()  # other ranks may never come: do not wait for them

    def _start_save(
        self, step: int, model: Modules, optimizer: Optimizers | None, extra: dict[str, Any] | None, background: bool
    ) -> Future[SaveResult]:
        prepared: list[tuple[list[TensorShard], frozenset[str], list[TensorShard], dict[str, Any]]] = []

        def prepare() -> None:
            _check_step(step)
            prepared.append(_prepare_save(model, optimizer, extra, self.world.rank))

        gather_and_decide(self.world, prepare, lambda _: None)
        ((shards, buffers, extra_shards, content),) = prepared
        self._lock_once()
        shards = choose_writers(shards, buffers, self.world) + extra_shards
        self._saver.background = background
        self._saver.take_finished()
        return self._saver.save(step, shards, content)

    def _lock_once(self) -> None:
        """Take the lock of the directory at the first save, so that two jobs never save in it. A collective."""
        if self._locked:
            return
        locks: list[Lock] = []
        run_on_rank_0(self.world, lambda: locks.append(take_lock(self.directory)))
        self._locked = True
        for lock in locks:
            self._saver.lock = lock
            atexit.register(self._release)

    def _release(self) -> None:
        if self._saver.lock is not None:
            self._saver.lock.release()
            self._saver.lock = None
            atexit.unregister(self._release)
        self._locked = False

    def _read_saved_state(self, step: int) -> tuple[dict[str, Any], list[str]]:
        manifest = open_step(self.directory, step).manifest
        names = [tensor.name for tensor in manifest.step_layout.tensors if tensor.name.startswith("optim.")]
        return manifest.extra, names


def describe_ranks() -> World:
    """Describe the ranks of torch's default process group, or this process alone. Checkpoints ask for no mesh.

    Raises UserError if the group cannot move CPU tensors.
    """
    no_mesh = cast(Any, None)
    if not dist.is_available() or not dist.is_initialized():
        return World(rank=0, size=1, local_rank=0, device=torch.device("cpu"), mesh=no_mesh, dp_index=0, dp_size=1)
    rank, size = dist.get_rank(), dist.get_world_size()
    if size > 1 and "cpu:" not in (backends := dist.get_backend_config()):
        raise UserError(
            f"the default process group ({backends}) cannot move CPU tensors, which checkpoints need; start it with "
            "init_process_group('cpu:gloo,cuda:nccl')"
        )
    return World(
        rank=rank, size=size, local_rank=0, device=torch.device("cpu"), mesh=no_mesh, dp_index=rank, dp_size=size
    )


def _log_failure(future: Future[SaveResult]) -> None:
    if (error := future.exception()) is not None:
        _log.error("%s", error)


def _check_step(step: Any) -> None:
    """Raise UserError for a step under whose name no load would look for it."""
    try:
        number = operator.index(step)
    except TypeError:
        number = None
    if number is None or isinstance(step, bool):
        raise UserError(f"Checkpointer: step {step!r} cannot be saved; steps are whole numbers")
    if number < 0:
        raise UserError(f"Checkpointer: step {step} cannot be saved; steps begin at 0")


def _prepare_save(
    model: Modules, optimizer: Optimizers | None, extra: dict[str, Any] | None, rank: int
) -> tuple[list[TensorShard], frozenset[str], list[TensorShard], dict[str, Any]]:
    """Return (shards, names of buffers, shards of `extra`, the manifest's extra)."""
    parameters, buffers = name_tensors(model)
    tensors: dict[str, torch.Tensor] = {**parameters, **buffers}
    packed, extra_shards = pack_extra({} if extra is None else extra, rank)
    content = {_EXTRA: packed}
    if optimizer is not None:
        named = NamedOptimizers(optimizer, parameters)
        tensors |= {value.name: value.tensor for value in named.list_values()}
        # Hyperparameters go the way of `extra`, with an error that names the group.
        content[_GROUPS] = [
            {
                "values": _pack_json(group["values"], f"group {number} of the optimizer"),
                "parameters": group["parameters"],
            }
            for number, group in enumerate(named.describe_groups())
        ]
    shards = make_shards(tensors, find_fused_names(model, parameters))
    return shards, frozenset(buffers), extra_shards, content


def _pack_json(values: dict[str, Any], where: str) -> Any:
    try:
        packed, tensors = pack_extra(values, 0)
    except UserError as error:
        raise UserError(f"{where}: {str(error).removeprefix('extra')}") from error
    assert not tensors  # hyperparameters that are tensors were read as numbers
    return packed


def _prepare_load(
    model: Modules, optimizer: Optimizers | None, saved: _SavedState, where: str
) -> tuple[list[TensorShard], list[StateValue], NamedOptimizers | None]:
    """Return what a load fills: shards, values of optimizer state to write back, and the optimizers."""
    parameters, buffers = name_tensors(model)
    tensors: dict[str, torch.Tensor] = {**parameters, **buffers}
    values: list[StateValue] = []
    named = None
    if optimizer is not None:
        if not saved.optimizer_names and _GROUPS not in saved.extra:
            raise UserError(f"{where} has no optimizer state; leave optimizer= out to load the model alone")
        named = NamedOptimizers(optimizer, parameters)
        named.check_groups(saved.extra.get(_GROUPS, []) or named.describe_groups(), where)
        named.match_state(saved.optimizer_names)
        values = list(named.list_values())
        tensors |= {value.name: value.tensor for value in values}
    shards = make_shards(tensors, find_fused_names(model, parameters))
    return shards, values, named
