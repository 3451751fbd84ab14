"""Faults are put into real runs of every layout, and the report has to name them: class, and rank where there is one.

`make test` draws 12 runs, every fault and every layout at least once, which takes a minute: each costs 2 to 8 s of
processor time. All of them have to be right. If one is not, 34 more follow, as a part of the verdicts may be wrong.
Cells that other tests beside them would disturb are in neither (a busy core, and runs without a fault where collectives
have a large part). `make test-long` runs every cell 20 times, alone, and prints the table of docs/seeing.md.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from lab import FAULTS, LAYOUTS, Outcome, run_cells

DRAWN = [
    *(("ddp", fault, 0) for fault in ("none", "small", "memory", "input_and_delay", "delay_and_input")),
    *(("fsdp", fault, 0) for fault in ("link", "sometimes")),
    ("hsdp", "delay", 0),
    ("tp", "input", 0),
    *(("pp", fault, 0) for fault in ("input_one", "save", "in_turn")),
]
FURTHER = [
    *(("ddp", fault, seed) for fault in FAULTS if fault not in ("busy", "memory") for seed in (0, 1, 2)),
    *(("fsdp", fault, 0) for fault in ("input_one", "delay", "memory", "link")),
    *(("hsdp", fault, 0) for fault in ("delay", "save")),
    *(("tp", fault, 0) for fault in ("input", "link")),
    *(("pp", fault, 0) for fault in ("input_one", "delay", "memory", "save")),
    ("ddp", "memory", 0),
]
"""With those of DRAWN that are among them: every fault at least three times, and every layout at least twice."""


def describe_wrong(outcomes: list[Outcome]) -> str:
    return "\n".join(f"{one.layout} {one.fault} (rank {one.rank}): {one.line}" for one in outcomes if not one.right)


@pytest.mark.timeout(900)
def test_faults_are_named(store: Path, tmp_path: Path) -> None:
    assert len(set(DRAWN)) == 12
    assert {fault for _, fault, _ in DRAWN} == set(FAULTS) - {"busy"}
    assert {layout for layout, _, _ in DRAWN} == set(LAYOUTS)
    outcomes = run_cells(DRAWN, store, tmp_path)
    assert len(outcomes) == len(DRAWN)
    if not all(one.right for one in outcomes):
        further = [cell for cell in FURTHER if cell not in DRAWN]
        assert len(further) == 34
        outcomes += run_cells(further, store, tmp_path)
    assert sum(one.right for one in outcomes) >= 0.95 * len(outcomes), describe_wrong(outcomes)


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_every_fault_is_named_in_every_layout(store: Path, tmp_path: Path) -> None:
    runs = int(os.environ.get("CONFUSION_RUNS", "20"))
    cells = [(layout, fault, seed) for layout in LAYOUTS for fault in FAULTS for seed in range(runs)]
    outcomes = run_cells(cells, store, tmp_path)
    print("\n" + make_table(outcomes))
    by_fault: dict[str, list[bool]] = {}
    for one in outcomes:
        by_fault.setdefault(one.fault, []).append(one.right)
    assert sum(one.right for one in outcomes) >= 0.95 * len(outcomes), describe_wrong(outcomes)
    assert all(sum(right) >= 0.9 * len(right) for right in by_fault.values()), describe_wrong(outcomes)


def make_table(outcomes: list[Outcome]) -> str:
    """Return the confusion matrix: a row for each fault, a column for each class that was named."""
    classes = sorted({one.name for one in outcomes})
    lines = [f"| fault | {' | '.join(classes)} | right |", f"| --- |{' --- |' * (len(classes) + 1)}"]
    for fault in FAULTS:
        own = [one for one in outcomes if one.fault == fault]
        counts = Counter(one.name for one in own)
        cells = [str(counts[name] or "") for name in classes]
        lines.append(f"| {fault} | {' | '.join(cells)} | {sum(one.right for one in own)} of {len(own)} |")
    return "\n".join(lines)
