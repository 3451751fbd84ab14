"""Our orders beside those that torch.distributed.pipelining makes itself, from which ours are not copied."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from hpc_train.errors import UserError
from hpc_train.schedules.generate import generate_order
from hpc_train.schedules.order import format_rows

SINGLE = {"gpipe": schedules.ScheduleGPipe, "1f1b": schedules.Schedule1F1B}
SEVERAL = {
    "interleaved_1f1b": schedules.ScheduleInterleaved1F1B,
    "looped_bfs": schedules.ScheduleLoopedBFS,
    "interleaved_zero_bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
}
VIRTUAL = {"zbv": (2,), "dualpipev": (2,), "interleaved_zero_bubble": (1, 2, 3)}
RANKS = (1, 2, 3, 4, 8)
MICRO_BATCHES = (*range(1, 13), 16, 17, 24, 32)


def stand_in(ranks: int, stages: int) -> Any:
    """As much of a PipelineStage as a schedule looks at before its first step."""
    return SimpleNamespace(
        group_size=ranks, group_rank=0, num_stages=stages, stage_index=0, has_backward=True, submod=None, group=None
    )


def cells(actions: dict[int, list[Any]]) -> list[list[str]]:
    """The computations alone: no pauses, no reduction of gradients."""
    return [[str(a) for a in actions[rank] if a is not None and a.is_compute_op] for rank in sorted(actions)]


def numbered_from_0(last: list[str]) -> list[str]:
    """torch lists the forwards of 1F1B's last rank, and these alone, from 1 on; what it runs begins with 0."""
    forwards = [int(cell.partition("F")[2]) for cell in last if "F" in cell]
    assert forwards == list(range(1, len(forwards) + 1)), "torch is right now: compare as it is"
    return [f"{cell.partition('F')[0]}F{int(cell.partition('F')[2]) - 1}" if "F" in cell else cell for cell in last]


def of_torch(name: str, ranks: int, micro_batches: int, virtual_stages: int) -> list[list[str]]:
    stages = [stand_in(ranks, ranks * virtual_stages) for _ in range(virtual_stages)]
    if name in SINGLE:
        single = SINGLE[name](stages[0], micro_batches, loss_fn=max)
        listed = cells(single._get_pipeline_order())
        return [*listed[:-1], numbered_from_0(listed[-1])] if name == "1f1b" else listed
    return cells(SEVERAL[name](stages, micro_batches, loss_fn=max).pipeline_order)


@pytest.mark.parametrize("name", [*SINGLE, *SEVERAL])
def test_the_same_order_or_both_refuse(name: str) -> None:
    same = refused = 0
    for virtual in VIRTUAL.get(name, (1,) if name in SINGLE else (2, 3, 4)):
        for ranks in RANKS:
            for micro_batches in MICRO_BATCHES:
                try:
                    expected = of_torch(name, ranks, micro_batches, virtual)
                except ValueError:
                    with pytest.raises(UserError):
                        generate_order(name, ranks, micro_batches, virtual)
                    refused += 1
                    continue
                assert format_rows(generate_order(name, ranks, micro_batches, virtual)) == expected, (
                    ranks,
                    micro_batches,
                    virtual,
                )
                same += 1
    assert same >= 40
    assert refused > 0 or name in ("gpipe", "looped_bfs", "zbv")


@pytest.mark.parametrize("name", SEVERAL)
def test_the_same_placement(name: str) -> None:
    order = generate_order(name, 4, 8, 2)
    made = SEVERAL[name]([stand_in(4, 8), stand_in(4, 8)], 8, loss_fn=max)
    assert dict(enumerate(order.placement)) == made.stage_index_to_group_rank
