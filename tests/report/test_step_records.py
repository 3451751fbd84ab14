"""Records of steps are read back as they were written; what is damaged is left out."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
from synthetic import write_run

from hpc_train.report.step_table import MAX_BINS, read_step_table
from hpc_train.step_clock import sum_bins
from hpc_train.training.records.step_records import (
    RECORD,
    THIN_AFTER,
    RecordSum,
    StepRecordFile,
    count_steps_per_record,
    pack_record,
    read_blocks,
)


def test_a_record_is_small() -> None:
    assert RECORD.itemsize <= 2048


def test_ranks_of_a_node_share_a_file(tmp_path: Path) -> None:
    write_run(tmp_path, 4, range(1, 201), lambda rank, step: {"data": rank + step / 1000})
    (file,) = (tmp_path / "logs/0").iterdir()
    read: dict[int, list[float]] = {}
    for rank, records in read_blocks(file):
        read.setdefault(rank, []).extend(records["data"].tolist())
    assert sorted(read) == [0, 1, 2, 3]
    for rank, values in read.items():
        assert values == pytest.approx([rank + step / 1000 for step in range(1, 201)])


@pytest.mark.parametrize("seed", range(20))
def test_damage_costs_only_the_blocks_that_it_hits(tmp_path: Path, seed: int) -> None:
    """Cut, overwrite or insert at a random place: all other blocks are read, and nothing that was not written."""
    write_run(tmp_path, 2, range(1, 641))
    (file,) = (tmp_path / "logs/0").iterdir()
    chooser, whole = random.Random(seed), bytearray(file.read_bytes())
    blocks = list(read_blocks(file))
    at, length = chooser.randrange(len(whole)), chooser.randrange(1, 400)
    kind = chooser.choice(["cut", "overwrite", "insert"])
    damaged = {
        "cut": whole[:at] + whole[at + length :],
        "overwrite": whole[:at] + chooser.randbytes(length) + whole[at + length :],
        "insert": whole[:at] + chooser.randbytes(length) + whole[at:],
    }[kind]
    file.write_bytes(damaged)
    found = list(read_blocks(file))
    assert len(found) >= len(blocks) - 2
    written = {(rank, tuple(records["step"].tolist())) for rank, records in blocks}
    strange = [1 for rank, records in found if (rank, tuple(records["step"].tolist())) not in written]
    assert len(strange) <= 1  # a block whose records, not whose header, were hit
    assert read_step_table(tmp_path) is not None


def test_a_block_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, 1, range(1, 129))
    (file,) = (tmp_path / "logs/0").iterdir()
    os.truncate(file, file.stat().st_size - 1)
    write_run(tmp_path, 1, range(129, 193))
    steps = np.concatenate([records["step"] for _, records in read_blocks(file)])
    assert steps[-1] == 192
    assert len(steps) == len(set(steps.tolist())) > 100


def test_long_runs_are_thinned() -> None:
    """Each record of the n-th thousand covers 2^n steps, so that sums over all steps stay what they are."""
    packed: list[bytes] = []
    total, steps = RecordSum(packed.append), 10_000
    for step in range(1, steps + 1):
        total.add({"step": step, "steps": 1, "data": 0.5, "resident": float(step)})
    total.end()
    records = np.frombuffer(b"".join(packed), RECORD)
    assert len(records) < 4 * THIN_AFTER
    assert sum(int(record["steps"]) for record in records) == steps
    assert sum(float(record["data"]) for record in records) == pytest.approx(0.5 * steps)
    assert float(records[-1]["resident"]) == steps
    assert [count_steps_per_record(n) for n in (0, THIN_AFTER - 1, THIN_AFTER, 3 * THIN_AFTER)] == [1, 1, 2, 8]


def test_a_table_of_a_long_run_keeps_its_means(tmp_path: Path) -> None:
    write_run(tmp_path, 2, range(1, 2001), lambda rank, step: {"data": 0.001 * (step % 7), "total": 1.0})
    table = read_step_table(tmp_path)
    assert table is not None
    assert table.bins <= MAX_BINS
    mean = np.average(table["data"][0], weights=table["steps"][0])
    assert mean == pytest.approx(np.mean([0.001 * (step % 7) for step in range(3, 2001)]), rel=1e-5)


def test_a_step_that_was_made_again_counts_as_made_last(tmp_path: Path) -> None:
    write_run(tmp_path, 2, range(1, 41), lambda rank, step: {"data": 1.0})
    write_run(tmp_path, 2, range(21, 61), lambda rank, step: {"data": 2.0}, attempt=1)
    table = read_step_table(tmp_path)
    assert table is not None
    by_step = dict(zip(table.steps.tolist(), table["data"][0].tolist(), strict=True))
    assert by_step[20] == 1.0
    assert 21 not in by_step  # it warmed up
    assert by_step[40] == by_step[60] == 2.0


def test_a_rank_without_records_leaves_gaps(tmp_path: Path) -> None:
    write_run(tmp_path, 2, range(1, 41))
    write_run(tmp_path, 1, range(41, 61))
    table = read_step_table(tmp_path)
    assert table is not None
    assert np.isnan(table["total"][1, -1])
    assert np.isfinite(table["total"][0, -1])


def test_a_run_without_records_has_no_table(tmp_path: Path) -> None:
    assert read_step_table(tmp_path) is None
    (tmp_path / "logs/0").mkdir(parents=True)
    (tmp_path / "logs/0/steps-node-0.bin").write_bytes(b"hpcsteps" * 100)
    assert read_step_table(tmp_path) is None
    (tmp_path / "logs/0/steps-node-1.bin").symlink_to("/dev/zero")
    assert read_step_table(tmp_path) is None


def test_a_full_disk_drops_records_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = StepRecordFile(Path("/dev/full"), 0)
    for step in range(1, 200):
        file.append(pack_record({"step": step, "steps": 1}), step)
    file.close()
    assert file.failure is not None
    assert "No space left" in file.failure
    assert len(caplog.records) == 1


def test_waits_are_summed_in_order() -> None:
    assert sum_bins([1.0, 2.0], 4) == [1.0, 2.0, 0.0, 0.0]
    values = [float(n) for n in range(100)]
    assert sum(sum_bins(values)) == pytest.approx(sum(values))
    assert sum_bins(values)[0] == sum(values[:6])
