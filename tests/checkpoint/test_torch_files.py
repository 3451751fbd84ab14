"""Our reader of torch.save returns what torch.load returns, for everything that torch can write."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_helpers import same_bits
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hpc_train.checkpoint.convert.formats.dcp import DcpTensors, parse_dcp_metadata
from hpc_train.checkpoint.convert.formats.torch_files import read_torch_file
from hpc_train.checkpoint.convert.tensor_sources import read_whole_tensors
from hpc_train.interfaces import TensorShard, World
from hpc_train.testing import run_ranks


def everything() -> dict[str, Any]:
    """Return views, shared storages, parameters, all kinds of dtypes, and objects that are not tensors."""
    base = torch.randn(10, 6, generator=torch.Generator().manual_seed(0))
    parameter, tensor = torch.nn.Parameter(base[0].clone()), base[1].clone()
    parameter.note, tensor.note = 3, "x"  # type: ignore[attr-defined]
    dtypes = (torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.uint16, torch.complex64)
    return OrderedDict(
        base=base,
        rows=base[2:5, 1:3],
        columns=base.t(),
        expanded=base[0, :1].expand(7),
        scalar=torch.tensor(3),
        empty=torch.zeros(0, 4),
        flags=torch.tensor([True, False]),
        linear=torch.nn.Linear(3, 4).state_dict(),
        of_dtype={str(dtype): base[0].to(dtype) for dtype in dtypes},
        parameter=parameter,
        tensor=tensor,
        again={"twice": base, 1: tensor},
        others=[1, {2}, b"abc", bytearray(b"x"), torch.Size([1]), torch.float32, torch.device("cpu"), 2**70, 1j, None],
    )


def flat(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and value of every tensor that must be read."""
    if isinstance(value, torch.Tensor):
        yield name, value.detach()
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{name}.{key}" if name else str(key))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("archive", [True, False])
def test_all_that_torch_writes_is_read_bit_for_bit(tmp_path: Path, archive: bool, protocol: int) -> None:
    state = everything()
    torch.save(state, tmp_path / "a.pt", pickle_protocol=protocol, _use_new_zipfile_serialization=archive)
    found, expected = read_torch_file(tmp_path / "a.pt"), dict(flat(state))
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert same_bits(found[name].contiguous(), tensor.contiguous()), name


def test_one_tensor_alone(tmp_path: Path) -> None:
    torch.save(torch.ones(3), tmp_path / "a.pt")
    assert read_torch_file(tmp_path / "a.pt")["tensor"].tolist() == [1.0, 1.0, 1.0]


def test_what_is_read_is_not_changed_in_the_file(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    read_torch_file(tmp_path / "a.pt")["w"].zero_()
    assert read_torch_file(tmp_path / "a.pt")["w"].tolist() == [1.0, 1.0, 1.0]


def _save_sharded(world: World, folder: str) -> None:
    mesh = world.mesh["dp_replicate"]
    state = {
        "rows": distribute_tensor(ROWS, mesh, [Shard(0)]),
        "columns": distribute_tensor(ROWS.bfloat16(), mesh, [Shard(1)]),
        "copied": distribute_tensor(ROWS[0].clone(), mesh, [Replicate()]),
    }
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))


ROWS = torch.arange(77.0).reshape(7, 11)


def test_sharded_tensors_of_dcp_are_put_together(tmp_path: Path) -> None:
    run_ranks(lambda world: _save_sharded(world, str(tmp_path)), 3)
    stored = parse_dcp_metadata(tmp_path)
    assert {name: len(it.chunks) for name, it in stored.items()} == {"rows": 3, "columns": 3, "copied": 1}
    source = DcpTensors(tmp_path, stored, {it: it for it in stored}, dict.fromkeys(stored, torch.float32))
    found = read_whole_tensors(source, source.tensors)
    assert torch.equal(found["rows"], ROWS)
    assert torch.equal(found["columns"], ROWS)
    assert torch.equal(found["copied"], ROWS[0])
    part = TensorShard("columns", (7, 11), torch.float32, (2, 3), torch.zeros(3, 6))
    source.fill([part])
    assert torch.equal(part.local, ROWS[2:5, 3:9])
