"""Compute a suspicious step again, to tell a momentary error of a device from data that really gives these numbers.

The parameters have not changed yet and dropout draws the same masks, so the second computation has to give the same
numbers. If it gives good numbers, the device made an error the first time, and the run continues with the second
result. If it gives bad numbers again, the cause is the data, the settings or a broken device, and the step is skipped
or only reported, as resilience.numbers says. Running statistics of BatchNorm see the batch twice.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from hpc_train.interfaces import Sums
from hpc_train.messages import all_gather_values
from hpc_train.parallel.mesh_axes import get_axis_degree
from hpc_train.regular_files import read_json
from hpc_train.resilience.exclusion import SOFTWARE, Strike, append_strike

if TYPE_CHECKING:
    from hpc_train.training.training_run import TrainingRun

log = logging.getLogger(__name__)
_SAME_LOSS = 1e-3
"""Relative difference of a rank's two losses that the order of additions on a GPU stays far below."""


def replay_step(
    run: TrainingRun, first: Sums, norm: float, compute: Callable[[], tuple[Sums, Tensor]]
) -> tuple[Sums, Tensor]:
    """Compute the gradient of this step again; returns the second sums and norm, and reports a transient error.

    first, norm: of the first computation. A collective: the guard decides the same on all ranks.
    """
    sample = run.consumed_samples
    _, before = run.numbers.guard.find_anomaly(_compute_mean_loss(first), norm, sample)
    first_loss = None if first.rank_loss is None else float(first.rank_loss)
    run.engine.skip_update()
    second, second_norm = compute()
    if run.numbers.guard.find_anomaly(_compute_mean_loss(second), float(second_norm), sample)[0] is None:
        ranks = _find_ranks_at_fault(run, first_loss, second)
        _report(run, before or "", _compute_mean_loss(second), ranks)
    return second, second_norm


def _compute_mean_loss(sums: Sums) -> float:
    return float(sums.loss) / max(sums.tokens, 1)


def _find_ranks_at_fault(run: TrainingRun, first_loss: float | None, second: Sums) -> list[int]:
    """Return the ranks whose own loss is another one now; [] if none is, as after an error in backward."""
    if run.copy_group is not None:
        return []  # a rank may be lost meanwhile, and naming one is not worth that
    differs = first_loss is not None and second.rank_loss is not None and _differ(first_loss, float(second.rank_loss))
    answers = all_gather_values(differs) if run.world.size > 1 else [differs]
    if get_axis_degree(run.world, "pp") > 1:
        return []  # only the last stage has a loss, whichever stage erred
    return [rank for rank, is_faulty in enumerate(answers) if is_faulty]


def _differ(first: float, second: float) -> bool:
    if not (math.isfinite(first) and math.isfinite(second)):
        return math.isfinite(first) != math.isfinite(second)
    return abs(first - second) > _SAME_LOSS * max(abs(first), abs(second))


def _report(run: TrainingRun, before: str, loss: float, ranks: list[int]) -> None:
    """Report the error, and record a strike against the node if all ranks at fault are on one."""
    if run.world.rank != 0:
        return
    hosts = {entry["rank"]: entry["host"] for entry in read_json(run.directory.rank_map)["ranks"]} if ranks else {}
    named = sorted({hosts[rank] for rank in ranks})
    culprits = f": rank {', '.join(map(str, ranks[:8]))} on {', '.join(named[:8])} erred" if ranks else ""
    description = f"{before}, but {loss:.6g} when the step was computed again{culprits}"
    run.reporter.add_event("transient", step=run.step + 1, why=description, ranks=ranks, hosts=named)
    log.warning("step %d: %s; going on with the second numbers", run.step + 1, description)
    if len(named) == 1:
        append_strike(run.directory.path, Strike(named[0], SOFTWARE, description, run.reporter.attempt))
