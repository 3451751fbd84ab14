"""Which of the ranks that hang is at fault, from where they are in their code."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.launch.rank_stacks import RankStack, _innermost_frame, find_odd_task

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
    stacks = [RankStack(f"rank {task}", place, task, place == WAITS) for task, place in enumerate(places)]
    assert find_odd_task(stacks) == odd


@pytest.mark.parametrize(
    ("line", "waits"),
    [("reduction.wait()", True), ("thread.join(60)", True), ("loss = model(x)", False), ("awaited(1)", False)],
)
def test_a_line_that_waits_for_another_rank(tmp_path: Path, line: str, waits: bool) -> None:
    """The innermost frame in Python is the caller's where torch waits in C++."""
    program, log = tmp_path / "engine.py", tmp_path / "task-0.log"
    program.write_text(f"\n\n    {line}\n")
    log.write_text(f'Stack (most recent call first):\n  File "{program}", line 3 in evaluate\n')
    frame = _innermost_frame(log, 0)
    assert frame is not None
    assert frame.waits == waits
    assert frame.place == f"evaluate ({'/'.join(program.parts[-3:])}:3)"
