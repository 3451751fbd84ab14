"""Go on without copies of the model that are lost (parallel.sync.lost_after_seconds)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hpc_train.config.run import RunConfig
from hpc_train.data.own_dataset import OwnStream
from hpc_train.errors import UserError
from hpc_train.interfaces import Engine
from hpc_train.parallel.mesh_axes import get_axis_degree
from hpc_train.regular_files import write_private_file
from hpc_train.training.records.run_records import LOSS_ALLOWED

if TYPE_CHECKING:
    from hpc_train.data.datasets import Dataset
    from hpc_train.parallel.data_parallel.copy_group import CopyGroup
    from hpc_train.training.training_run import TrainingRun

log = logging.getLogger(__name__)


def find_copy_group(config: RunConfig, engine: Engine, data: Dataset | OwnStream) -> CopyGroup | None:
    """Return the copies of a loosely synchronised run, if they may be lost; None otherwise.

    Raises UserError for a stream, because the position of a lost copy in it could not be saved.
    """
    seconds = config.parallel.sync.lost_after_seconds
    if seconds is None:
        return None
    from hpc_train.parallel.engines.loose_engine import LooseEngine

    if isinstance(data, OwnStream):
        raise UserError(
            f"parallel.sync.lost_after_seconds={seconds:g}: not with a stream (data={data.name}), because the position "
            "of a lost copy could not be saved; use a data set with an index, or leave it out"
        )
    assert isinstance(engine, LooseEngine)
    return engine.copy_group


def allow_losses(run: TrainingRun) -> None:
    """Let the launcher know that it need not end all ranks when one ends. Called when all ranks begin to train."""
    if run.copy_group is not None and run.world.rank == 0:
        write_private_file(run.directory.logs(run.reporter.attempt) / LOSS_ALLOWED, "")


def drop_lost_copies(run: TrainingRun) -> None:
    """Notice copies that were lost in this step, and go on with the others. A collective where copies may be lost."""
    if run.copy_group is None:
        return
    # What follows in the step, such as a save, needs all ranks, and a copy may have been lost since the last sum.
    run.copy_group.meet()
    lost_copies = run.copy_group.take_lost_copies()
    if not lost_copies:
        return
    run.change_world(run.copy_group.world)
    share = run.config.train.global_batch // get_axis_degree(run.world, "dp_replicate")
    for copy in lost_copies:
        # Each copy trains on its share of every global batch, and nobody takes over that of a lost one.
        run.reporter.add_event(
            "lost_copy",
            step=run.step,
            copy=copy.copy,
            ranks=list(copy.ranks),
            why=copy.why,
            copies_left=run.copy_group.size,
            untrained_samples_per_step=share,
        )
        if run.world.rank == 0:
            log.warning(
                "step %d: copy %d of the model (rank%s %s) is lost: %s; %d go on, without its %d samples of each step",
                run.step,
                copy.copy,
                "s" if len(copy.ranks) > 1 else "",
                ", ".join(map(str, copy.ranks)),
                copy.why,
                run.copy_group.size,
                share,
            )
