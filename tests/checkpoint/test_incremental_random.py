"""Any sequence of changes, with any limits: every step is bit for bit that of a plain save, whatever was shared."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from checkpoint_helpers import State, alone, blank, holds, random_bits, same_bits, same_pieces, whole
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from incremental_helpers import check

from hpc_train.checkpoint import Saver, load_step
from hpc_train.checkpoint.format.hdf5_layout import DatasetRow
from hpc_train.checkpoint.format.rectangle import Rectangle, explain_coverage
from hpc_train.checkpoint.format.shard_layout import FileLayout
from hpc_train.checkpoint.save.incremental.incremental_writer import IncrementalWriter, SharingLimits
from hpc_train.checkpoint.save.incremental.row_runs import merge_runs, split_runs
from hpc_train.interfaces import TensorShard

SHAPES: dict[str, tuple[int, ...]] = {"a": (13, 7), "b": (2, 5, 6), "c": (31,), "d": (), "e": (1, 40), "f": (3, 0)}
DTYPES = {"a": torch.float32, "b": torch.float64, "c": torch.bfloat16, "d": torch.int64, "e": torch.uint8}
changes = st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 90), st.integers(1, 40)), max_size=4)
limits = st.builds(
    SharingLimits,
    files=st.integers(1, 4),
    live=st.floats(0, 1),
    least=st.sampled_from([0, 200]),
    run=st.integers(1, 300),
)


def changed(tensors: State, what: list[tuple[str, int, int]], step: int) -> State:
    """The same with other bytes in some places."""
    new = {name: tensor.clone() for name, tensor in tensors.items()}
    for number, (name, begin, size) in enumerate(what):
        raw = new[name].reshape(-1).view(torch.uint8)
        part = raw[begin % len(raw) :][:size]
        part ^= torch.tensor(1 + (step + number) % 255, dtype=torch.uint8)
    return new


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(limits, st.lists(changes, min_size=2, max_size=6), st.integers(0, 5))
def test_any_sequence_of_changes(
    limits: SharingLimits, sequence: list[list[tuple[str, int, int]]], removed: int
) -> None:
    tensors: State = {n: random_bits(SHAPES[n], DTYPES.get(n, torch.float32)) for n in SHAPES}
    folder = Path(tempfile.mkdtemp())
    try:
        of = Saver(folder, alone(), background=False, incremental=IncrementalWriter(limits))
        states = {}
        for step, what in enumerate(sequence, start=1):
            tensors = states[step] = changed(tensors, what, step)
            of.save(step, whole(tensors), {})
            assert of.wait()[0].error is None
            if removed == step:
                shutil.rmtree(folder / f"step-{step}")
        for step, state in states.items():
            if step != removed:
                check(folder, step, state)
        rectangle(folder, step=max(it for it in states if it != removed), tensors=states)
    finally:
        shutil.rmtree(folder)


def rectangle(folder: Path, step: int, tensors: dict[int, State]) -> None:
    """A part of a tensor that begins and ends within what was saved."""
    part = tensors[step]["a"][3:11, 2:5].contiguous()
    found = blank([TensorShard("a", (13, 7), part.dtype, (3, 2), part)])
    load_step(folder, step, found, alone())
    assert same_bits(found[0].local, part)
    assert holds(folder, step, tensors[step])
    assert same_pieces(found, [TensorShard("a", (13, 7), part.dtype, (3, 2), part)])


@given(st.lists(st.integers(0, 7), max_size=4), st.integers(1, 200), st.data())
def test_runs_are_the_rectangle_in_order_and_join_again(shape: list[int], length: int, data: st.DataObject) -> None:
    row = DatasetRow("w", tuple(size + 3 for size in shape), torch.float32, tuple(1 for _ in shape), tuple(shape))
    whole_row = Rectangle(row.offset, row.local_shape)
    runs = split_runs(FileLayout((row,), (4096,)), length)
    assert explain_coverage(whole_row, [run.rectangle for run in runs]) is None
    assert [run.begin for run in runs] == [4096 + sum(it.size for it in runs[:n]) for n in range(len(runs))]
    assert all(run.size == 4 * run.rectangle.volume for run in runs)
    ((everything, parts),) = merge_runs(runs)
    assert (everything.rectangle, everything.begin, everything.size) == (whole_row, 4096, row.bytes)
    assert parts == runs
    some = [run for run in runs if data.draw(st.booleans())]
    joined = merge_runs(some)
    assert [run for _, of in joined for run in of] == some
    others = [run.rectangle for run in runs if run not in some]
    assert explain_coverage(whole_row, [it.rectangle for it, _ in joined] + others) is None
    for it, of in joined:
        assert (it.begin, it.size) == (of[0].begin, sum(run.size for run in of))
