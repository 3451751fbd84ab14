"""Which nodes a run keeps away from."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.resilience.exclusion import (
    HARDWARE,
    LIFE_SECONDS,
    NODES,
    SOFTWARE,
    Strike,
    append_strike,
    choose_excluded,
    read_strikes,
)

NOW = 1e9


def strike(host: str, weight: int, age: float = 0.0) -> Strike:
    return Strike(host, weight, "seen", 0, NOW - age)


def test_hardware_counts_at_once_and_software_the_second_time() -> None:
    assert choose_excluded([strike("a", HARDWARE)], 2, NOW) == ["a"]
    assert choose_excluded([strike("a", SOFTWARE)], 2, NOW) == []
    assert choose_excluded([strike("a", SOFTWARE), strike("a", SOFTWARE)], 2, NOW) == ["a"]
    assert choose_excluded([strike("a", SOFTWARE), strike("b", SOFTWARE)], 2, NOW) == []


def test_a_strike_is_forgotten_after_a_day() -> None:
    """So is one of a clock that was ahead by years."""
    assert choose_excluded([strike("a", HARDWARE, -1e8)], 2, NOW) == []
    assert choose_excluded([strike("a", HARDWARE, LIFE_SECONDS)], 2, NOW) == []
    assert choose_excluded([strike("a", SOFTWARE), strike("a", SOFTWARE, LIFE_SECONDS + 1)], 2, NOW) == []


@pytest.mark.parametrize(("nodes", "most"), [(1, 1), (2, 1), (39, 1), (40, 2), (1000, 50)])
def test_no_more_than_one_node_in_twenty_is_left_out(nodes: int, most: int) -> None:
    strikes = [strike(f"n{index}", HARDWARE, index) for index in reversed(range(100))]
    assert choose_excluded(strikes, nodes, NOW) == [f"n{index}" for index in range(most)]


def test_the_worst_node_comes_first() -> None:
    strikes = [strike("new", HARDWARE), strike("bad", HARDWARE, 9), strike("bad", SOFTWARE, 8)]
    assert choose_excluded(strikes, 2, NOW) == ["bad"]


def test_of_equal_nodes_the_one_with_the_latest_strike_comes_first_also_where_the_clock_was_set_back() -> None:
    strikes = [strike("before", HARDWARE, -3600), strike("after", HARDWARE)]
    assert choose_excluded(strikes, 2, NOW) == ["after"]


def test_strikes_are_read_back_and_damage_is_passed_over(tmp_path: Path) -> None:
    assert read_strikes(tmp_path) == []
    written = [Strike("n1", HARDWARE, "does not answer", 0, 1.5), Strike("n2", SOFTWARE, "a hang", 1, 2.5)]
    append_strike(tmp_path, written[0])
    with (tmp_path / NODES).open("a") as file:
        file.write('{"host": "n9"}\n[1]\nnot JSON\n{"host": "n9", "weight": "many", "evidence": "", "attempt": 0}\n')
    append_strike(tmp_path, written[1])
    assert read_strikes(tmp_path) == written
