"""Which of the ranks that hang is at fault, from where they are in their code."""

from __future__ import annotations

import pytest

from hpc_train.launch.rank_stacks import RankStack, find_odd_task

WAITS, OWN = "wait (torch/distributed/distributed_c10d.py:10)", "forward (my_models.py:5)"


@pytest.mark.parametrize(
    ("places", "odd"),
    [
        ([WAITS, OWN, WAITS], 1),
        ([WAITS, None, WAITS], 1),
        ([OWN, None, WAITS], 1),
        ([OWN, OWN, WAITS], None),
        ([None, None, WAITS], None),
        ([WAITS, WAITS], None),
        ([OWN], None),
        ([], None),
    ],
)
def test_the_one_that_the_others_wait_for(places: list[str | None], odd: int | None) -> None:
    stacks = [RankStack(f"rank {task}", place, task) for task, place in enumerate(places)]
    assert find_odd_task(stacks) == odd
