"""Which of the ranks that hang is at fault, from where they are in their code."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.launch.rank_stacks import RankStack, _find_innermost_frame, find_odd_task

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
    log.write_text(f'Current thread 0x1 (most recent call first):\n  File "{program}", line 3 in evaluate\n')
    frame = _find_innermost_frame(log, 0)
    assert frame is not None
    assert frame.waits == waits
    assert frame.place == f"evaluate ({'/'.join(program.parts[-3:])}:3)"


def test_a_thread_that_does_not_wait_is_where_the_rank_is(tmp_path: Path) -> None:
    """Of a rank whose main thread waits for the thread that saves."""
    log, own = tmp_path / "task-0.log", tmp_path / "own.py"
    own.write_text("loop(1)\n")
    idle = 'Thread 0x2 (most recent call first):\n  File "/usr/lib/python3.11/threading.py", line 320 in wait\n'
    saving = f'Thread 0x3 (most recent call first):\n  File "{own}", line 1 in write_shard\n'
    main = 'Current thread 0x1 (most recent call first):\n  File "/usr/lib/python3.11/threading.py", line 9 in join\n'
    log.write_text("a line of the log\n" + idle + saving)
    assert _find_innermost_frame(log, 0) is None, "not all of it is written yet"
    log.write_text("a line of the log\n" + idle + saving + main)
    frame = _find_innermost_frame(log, 0)
    assert frame is not None
    assert frame.function == "write_shard"
    log.write_text(idle + main)
    frame = _find_innermost_frame(log, 0)
    assert frame is not None
    assert (frame.function, frame.waits) == ("join", True)
