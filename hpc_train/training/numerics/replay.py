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
    _, before = run.guard.find_anomaly(_compute_mean_loss(first), norm, sample)
    own = None if first.own is None else float(first.own)
    run.engine.skip_update()
    again, second_norm = compute()
    if run.guard.find_anomaly(_compute_mean_loss(again), float(second_norm), sample)[0] is None:
        ranks = _find_ranks_at_fault(run, own, again)
        _report(run, before or "", _compute_mean_loss(again), ranks)
    return again, second_norm


def _compute_mean_loss(sums: Sums) -> float:
    return float(sums.loss) / max(sums.tokens, 1)


def _find_ranks_at_fault(run: TrainingRun, own: float | None, again: Sums) -> list[int]:
    """Return the ranks whose own loss is another one now; [] if none is, as after an error in backward."""
    if run.copy_group is not None:
        return []  # a rank may be lost meanwhile, and naming one is not worth that
    differs = own is not None and again.own is not None and _differ(own, float(again.own))
    answers = all_gather_values(differs) if run.world.size > 1 else [differs]
    if get_axis_degree(run.world, "pp") > 1:
        return []  # only the last stage has a loss, whichever stage erred
    return [rank for rank, found in enumerate(answers) if found]


def _differ(one: float, other: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.isfinite(one) != math.isfinite(other)
    return abs(one - other) > _SAME_LOSS * max(abs(one), abs(other))


def _report(run: TrainingRun, before: str, loss: float, ranks: list[int]) -> None:
    """Report the error, and record a strike against the node if all ranks at fault are on one."""
    if run.world.rank != 0:
        return
    hosts = {entry["rank"]: entry["host"] for entry in read_json(run.directory.rank_map)["ranks"]} if ranks else {}
    named = sorted({hosts[rank] for rank in ranks})
    where = f": rank {', '.join(map(str, ranks[:8]))} on {', '.join(named[:8])} erred" if ranks else ""
    why = f"{before}, but {loss:.6g} when the step was computed again{where}"
    run.reporter.add_event("transient", step=run.step + 1, why=why, ranks=ranks, hosts=named)
    log.warning("step %d: %s; going on with the second numbers", run.step + 1, why)
    if len(named) == 1:
        append_strike(run.directory.path, Strike(named[0], SOFTWARE, why, run.reporter.attempt))
