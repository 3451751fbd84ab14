"""What is saved comes back bit for bit, and any HDF5 reader can read it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import State, alone, blank, holds, names, random_bits, same_bits, save_alone, state, whole

from hpc_train.checkpoint import (
    CheckpointError,
    find_newest_verified,
    list_committed_steps,
    load_step,
    save_step,
    verify_step,
)
from hpc_train.errors import UserError
from hpc_train.interfaces import TensorShard

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_round_trips_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        str(shape): random_bits(shape, dtype) for shape in [(), (1,), (0, 3), (5,), (3, 4), (2, 3, 4), (2000, 3)]
    }
    save_alone(tmp_path, 1, tensors)
    assert holds(tmp_path, 1, tensors)
    assert verify_step(tmp_path, 1) == []


def test_extra_comes_back_as_json_holds_it(tmp_path: Path) -> None:
    extra = {"consumed_samples": 2**60, "lr": 0.1, "config": {"hash": "é\n"}, "by_step": {10: 1, 9: 2}, "none": None}
    save_alone(tmp_path, 3, state(0), extra)
    assert load_step(tmp_path, 3, [], alone()) == json.loads(json.dumps(extra))
    assert verify_step(tmp_path, 3) == []


@pytest.mark.parametrize("extra", [{"loss": float("nan")}, {"tensor": torch.zeros(1)}])
def test_extra_that_json_cannot_hold_is_refused_and_nothing_is_committed(
    tmp_path: Path, extra: dict[str, object]
) -> None:
    with pytest.raises(CheckpointError, match="was not saved"):
        save_step(tmp_path, 1, whole(state(0)), extra, alone())
    assert names(tmp_path) == []


def test_pieces_that_are_not_contiguous_or_need_gradients(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(4, 6))
    columns = weight.t()
    save_step(tmp_path, 1, [TensorShard("w", (6, 4), weight.dtype, (0, 0), columns)], {}, alone()).wait()
    target = torch.nn.Parameter(torch.zeros(4, 6))
    load_step(tmp_path, 1, [TensorShard("w", (6, 4), weight.dtype, (0, 0), target.t())], alone())
    assert same_bits(target.detach(), weight.detach())


def test_only_replica_zero_is_written(tmp_path: Path) -> None:
    first = TensorShard("w", (2,), torch.float32, (0,), torch.ones(2), replica=0)
    copy = TensorShard("w", (2,), torch.float32, (0,), torch.full((2,), 7.0), replica=1)
    save_step(tmp_path, 1, [copy, first], {}, alone()).wait()
    load_step(tmp_path, 1, [copy], alone())
    assert copy.local.tolist() == [1.0, 1.0]


def test_the_handle_tells_what_was_written(tmp_path: Path) -> None:
    saved = save_step(tmp_path / "made" / "on demand", 5, whole(state(0)), {}, alone())
    saved.wait()
    assert saved.path == tmp_path / "made" / "on demand" / "step-5"
    assert saved.bytes == (saved.path / "shards/000/000000.h5").stat().st_size
    assert names(saved.path) == ["index.h5", "manifest.json", "shards"]


def test_a_step_saved_again_is_replaced(tmp_path: Path) -> None:
    save_alone(tmp_path, 5, state(0))
    save_alone(tmp_path, 5, state(1))
    assert holds(tmp_path, 5, state(1))
    assert names(tmp_path) == ["step-5"]


def test_after_a_rollback_the_newest_is_the_last_committed_not_the_highest(tmp_path: Path) -> None:
    for step in (5, 10, 15, 7):
        save_alone(tmp_path, step, state(step))
    assert list_committed_steps(tmp_path) == [5, 10, 15, 7]
    assert find_newest_verified(tmp_path) == 7


ODD_NAMES = [
    "a/b",
    "a",
    "a/b/c",
    ".",
    "..",
    "",
    "w@0,0",
    "100%",
    "%2F",
    "naïve.β.重み",
    "two words",
    "tab\tand\nline",
    "x" * 900,
]


def test_odd_names(tmp_path: Path) -> None:
    tensors = {name: random_bits((3,), torch.float32, seed) for seed, name in enumerate(ODD_NAMES)}
    save_alone(tmp_path, 1, tensors)
    assert holds(tmp_path, 1, tensors)


def test_two_pieces_of_one_rank_with_names_that_look_like_offsets(tmp_path: Path) -> None:
    tensor = random_bits((4, 2), torch.float32)
    halves = [TensorShard("w", (4, 2), tensor.dtype, (row, 0), tensor[row : row + 2]) for row in (0, 2)]
    decoy = TensorShard("w@0,0", (2, 2), tensor.dtype, (0, 0), random_bits((2, 2), torch.float32, 1))
    save_step(tmp_path, 1, [*halves, decoy], {}, alone()).wait()
    assert holds(tmp_path, 1, {"w": tensor, "w@0,0": decoy.local})


READER = """
import h5py, json, sys
assert not any(name.startswith(("hpc_train", "torch")) for name in sys.modules)
with h5py.File(sys.argv[1]) as file:
    print(json.dumps({
        name: [data[...].tolist(), data.attrs["torch_dtype"], data.attrs["global_shape"].astype(int).tolist()]
        for name, data in file.items()
    }))
"""


def test_any_hdf5_reader_understands_the_shards(tmp_path: Path) -> None:
    tensors: State = {
        "w": torch.tensor([[1.5, -2.0], [0.25, 3e38]]),
        "half": torch.tensor([1.0, -3.140625, 1e-38, float("inf")]).bfloat16(),
        "f8": torch.tensor([1.0, -57344.0, 0.25]).to(torch.float8_e5m2),
        "step": torch.tensor(12),
        "mask": torch.tensor([True, False]),
    }
    save_alone(tmp_path, 1, tensors)
    shard = str(tmp_path / "step-1" / "shards/000/000000.h5")
    seen = json.loads(subprocess.run([sys.executable, "-c", READER, shard], check=True, capture_output=True).stdout)
    values = {
        name: (tensor.double() if tensor.is_floating_point() else tensor).tolist() for name, tensor in tensors.items()
    }
    assert seen == {
        name: [values[name], str(t.dtype).removeprefix("torch."), [*t.shape]] for name, t in tensors.items()
    }


def test_what_the_model_wants_and_the_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    save_alone(tmp_path, 5, {"w": torch.ones(2, 3)})

    def loading(name: str, local: torch.Tensor) -> None:
        load_step(tmp_path, 5, [TensorShard(name, tuple(local.shape), local.dtype, (0,) * local.dim(), local)], alone())

    with pytest.raises(UserError, match=r"step 5 in .* has no tensor 'v'"):
        loading("v", torch.zeros(2, 3))
    with pytest.raises(UserError, match=r"'w' is float32 of shape \(2, 3\), this run wants float32 of shape \(3, 2\)"):
        loading("w", torch.zeros(3, 2))
    with pytest.raises(UserError, match=r"'w' is float32 of shape \(2, 3\), this run wants bfloat16"):
        loading("w", torch.zeros(2, 3).bfloat16())


def test_nothing_is_written_when_one_of_the_tensors_is_missing(tmp_path: Path) -> None:
    save_alone(tmp_path, 5, {"w": torch.ones(2)})
    pieces = blank(whole({"w": torch.ones(2), "v": torch.ones(2)}))
    with pytest.raises(UserError):
        load_step(tmp_path, 5, pieces, alone())
    assert pieces[0].local.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("offsets", "why"),
    [
        ([0], "2 of its 4 elements are in no piece"),
        ([0, 1], "overlap"),
        ([0, 2, 2], "overlap|two pieces"),
        ([3], "outside"),
    ],
)
def test_pieces_that_do_not_make_a_whole_tensor_are_not_committed(tmp_path: Path, offsets: list[int], why: str) -> None:
    pieces = [TensorShard("w", (4,), torch.float32, (offset,), torch.ones(2)) for offset in offsets]
    with pytest.raises(CheckpointError, match=f"tensor 'w': .*({why})"):
        save_step(tmp_path, 1, pieces, {}, alone()).wait()
    assert names(tmp_path) == []
