"""Prove that the pipeline's order completes, and choose how many micro-batches a rehearsed step needs."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_train.config.parallel import Degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.schedules.generate import generate_order
from hpc_train.schedules.order import Order
from hpc_train.schedules.simulate import ActionTimes, simulate_order
from hpc_train.schedules.validate import validate_order
from hpc_train.traffic.stages import count_micro_batches, is_schedule_file, read_schedule_file

MAX_FORWARDS = 640
"""Limit on block forwards in a rehearsed step of one rank: each takes about 0.1 s with its backward."""


@dataclass(frozen=True)
class OrderProof:
    """Facts about an order that was proved to be free of deadlock."""

    schedule: str
    ranks: int
    stages: int
    micro_batches: int
    actions: int
    """Number of computations on all ranks."""
    bubble: float
    """Idle share of the ranks if F, I and W take the same time on every stage and messages take none."""
    live: tuple[int, ...]
    """Peak number of activations on each rank; each is of one stage and one micro-batch."""


def prove_order(config: RunConfig, degrees: Degrees) -> OrderProof:
    """Prove the order of the run's own number of micro-batches. Raises UserError, naming ranks, for a deadlock."""
    count = count_micro_batches(config, degrees)
    order = _make_order(config, degrees, count)
    validate_order(order, count)
    simulated = simulate_order(order, ActionTimes.even(order.stages))
    return OrderProof(
        schedule=config.parallel.pipeline.schedule,
        ranks=order.ranks,
        stages=order.stages,
        micro_batches=count,
        actions=sum(1 for rank in range(order.ranks) for _ in order.actions(rank)),
        bubble=simulated.mean_bubble,
        live=simulated.live,
    )


def choose_micro_batches(
    config: RunConfig, degrees: Degrees, blocks: int, proof: OrderProof | None
) -> tuple[int, str | None]:
    """Return (number of micro-batches to rehearse, what memory peak they may miss; None: nothing).

    blocks: number of blocks on one rank. The number is large enough for the memory peak: as many as are ever in flight,
    and one more round, in which gradients exist beside them. If that would take minutes, it is smaller, and the second
    result says so.
    """
    count = count_micro_batches(config, degrees)
    if proof is None:
        keeps_sums = degrees.dp_replicate > 1 and config.parallel.offload.parameters != "none"
        # The second micro-batch adds to existing gradients. HSDP with offloaded parameters keeps sums on the device
        # until the last micro-batch moves them away block by block, so the peak is in one between the first and the
        # last.
        return min(count, 3 if keeps_sums else 2), None
    pipeline = config.parallel.pipeline
    if is_schedule_file(pipeline):
        return count, None
    # The fewest micro-batches with the same peaks as the whole step, in multiples of pp.
    steady = next(
        (some for some in _list_counts(degrees.pp, count) if _count_live(config, degrees, some) == proof.live), count
    )
    steady = min(steady + degrees.pp, count)
    most = max(2 * degrees.pp, MAX_FORWARDS // max(1, blocks))
    if steady <= most:
        return steady, None
    fewer = most // degrees.pp * degrees.pp
    remark = f"memory is counted with {fewer} of {count} micro-batches, and {pipeline.schedule} holds more at once"
    return fewer, f"parallel.pipeline.schedule={pipeline.schedule}: {remark}"


def _list_counts(pp: int, count: int) -> range:
    return range(min(pp, count), count, pp)


def _count_live(config: RunConfig, degrees: Degrees, count: int) -> tuple[int, ...] | None:
    """Count activations in flight; None if the schedule cannot run so few micro-batches."""
    try:
        order = _make_order(config, degrees, count)
    except UserError:
        return None
    return simulate_order(order, ActionTimes.even(order.stages)).live


def _make_order(config: RunConfig, degrees: Degrees, count: int) -> Order:
    pipeline = config.parallel.pipeline
    if is_schedule_file(pipeline):
        return read_schedule_file(pipeline)
    return generate_order(pipeline.schedule, degrees.pp, count, pipeline.virtual_stages)
