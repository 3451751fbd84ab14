"""Which checkpoint an attempt was loading, and what the events of a run say of loads that ended its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpc_train.resilience.load_history import (
    LoadHistory,
    end_load,
    find_passed_over,
    note_load,
    read_load,
    read_load_history,
    read_passed_over,
)


def event(kind: str, attempt: int, **fields: Any) -> dict[str, Any]:
    return {"event": kind, "attempt": attempt, "time": 1.0, **fields}


MARKED = event("passed_over", 1, step=8, action="marked bad")
REMOVED = event("passed_over", 2, step=8, action="mark removed")
ENDED_TWICE = [event("restart", 0, loading=8), event("restart", 1, loading=8), MARKED]


def test_the_step_that_is_being_loaded_is_known_until_the_load_has_ended(tmp_path: Path) -> None:
    assert read_load(tmp_path) is None
    note_load(tmp_path, 8)
    note_load(tmp_path, 4)
    assert read_load(tmp_path) == 4
    end_load(tmp_path)
    end_load(tmp_path)
    assert read_load(tmp_path) is None
    (tmp_path / "loading").write_text("torn")
    assert read_load(tmp_path) is None


def test_loads_that_ended_the_ranks_count_until_one_ends_well_or_the_run_is_submitted_again() -> None:
    history = LoadHistory((8, 8), frozenset({8}))
    assert read_load_history([event("restart", 0), *ENDED_TWICE], 2, 0) == history
    assert read_load_history([*ENDED_TWICE, REMOVED], 3, 0) == LoadHistory((8, 8))
    for between in (event("resume", 2), event("start", 2), event("submit", -1)):
        assert read_load_history([*ENDED_TWICE, between], 3, 0) == LoadHistory()
    assert read_load_history(ENDED_TWICE, 2, 1) == LoadHistory((8,), frozenset({8})), "the same command began attempt 1"
    assert read_load_history(ENDED_TWICE, 1, 0) == LoadHistory((8,)), "a decision that is made again"


def test_a_step_is_passed_over_until_its_mark_is_removed_or_it_is_saved_again(tmp_path: Path) -> None:
    assert find_passed_over(ENDED_TWICE) == {8}
    assert find_passed_over([*ENDED_TWICE, event("checkpoint", 2, step=12)]) == {8}
    assert find_passed_over([*ENDED_TWICE, event("checkpoint", 2, step=8)]) == frozenset()
    assert find_passed_over([*ENDED_TWICE, REMOVED]) == frozenset()
    assert find_passed_over([event("passed_over", 1, step=8, action="left alone")]) == frozenset()
    assert read_passed_over(tmp_path / "events.jsonl") == frozenset()
    (tmp_path / "events.jsonl").write_text('torn\n{"event": "passed_over", "step": 8, "action": "marked bad"}\n{"ev')
    assert read_passed_over(tmp_path / "events.jsonl") == {8}


def test_events_whose_step_is_no_step_change_nothing() -> None:
    odd: list[Any] = [[1], {}, "8", None, True, 8.0]
    events = [{**MARKED, "step": step} for step in odd] + [event("checkpoint", 2, step=step) for step in odd]
    assert find_passed_over([MARKED, *events]) == {8}
