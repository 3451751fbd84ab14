"""Values that ranks send each other arrive unchanged, and bytes from anybody else run no code."""

from __future__ import annotations

import json
import os
import pickle
import re
import struct
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hpc_train
from hpc_train.checkpoint import Saver, find_newest_verified, resume_from_checkpoint
from hpc_train.checkpoint.errors import Problem
from hpc_train.checkpoint.format.hdf5_layout import DatasetRow, make_image
from hpc_train.checkpoint.format.manifest import Manifest, ShardFile
from hpc_train.checkpoint.format.shard_layout import gather_layouts, make_file_layout
from hpc_train.checkpoint.rank_consensus import CONSENSUS
from hpc_train.checkpoint.save.save_step import WrittenShard
from hpc_train.checkpoint.save.writer_group import WriterSharing
from hpc_train.errors import LostRanksError
from hpc_train.interfaces import TensorShard, World
from hpc_train.messages import PLAIN, Codec, MessageError, all_gather_values, broadcast_value, gather_values
from hpc_train.runtime.consensus import RemoteFailure
from hpc_train.testing import run_ranks


class Pair(NamedTuple):
    """A listed class of two fields."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """Another listed class."""

    content: Any
    path: Path | None = None


CODEC = Codec((Pair, Box))
PLAIN_VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    PLAIN_VALUES | st.builds(Pair, st.text(), st.lists(st.integers()).map(tuple)),
    lambda inner: (
        st.lists(inner, max_size=9)
        | st.lists(inner, max_size=9).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=5)
        | st.builds(Box, inner, st.none() | st.just(Path("/a/b")))
    ),
    max_leaves=30,
)


@settings(max_examples=100, deadline=None)
@given(VALUES)
def test_values_come_back_as_they_were(value: Any) -> None:
    found = CODEC.decode(CODEC.encode(value))
    assert repr(found) == repr(value)  # repr tells 1 from True, and a list from a tuple
    assert found == value


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "uint64", "float32", "float64", "float16", "bool"])
def test_arrays_come_back_bit_for_bit(dtype: str) -> None:
    array = np.frombuffer(np.random.default_rng(0).bytes(960), dtype=np.uint8).reshape(5, 192) % 2
    array = array.astype(dtype)
    found, text = CODEC.decode(CODEC.encode((array[:, ::3], "x")))
    assert (found.dtype, text) == (array.dtype, "x")
    assert np.array_equal(found, array[:, ::3])
    found[:] = 0  # the receiver owns it


@settings(max_examples=150, deadline=None)
@given(VALUES, st.data())
def test_changed_bytes_are_an_error_or_a_value(value: Any, data: st.DataObject) -> None:
    message = bytearray(CODEC.encode(value))
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    try:
        CODEC.decode(bytes(message))
    except MessageError:
        return


def framed(value: Any) -> bytes:
    """Encode JSON as a message."""
    text = json.dumps(value).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 7,
        struct.pack("<Q", 1 << 63),
        struct.pack("<Q", 300_000) + b"[" * 300_000,
        framed(["object", "system", ["true"]]),
        framed(["object", "Path", ["x"]]),
        framed(["object", "__class__", []]),
        framed(["text", "__import__", "os"]),
        framed(["list", "columns", ["eval", [["plain", ["1"]]]]]),
        framed(["list", "columns", ["Pair", [["plain", ["1"]], ["plain", []]]]]),
        framed(["list", "columns", ["Pair", []]]),
        framed(["array", "|O", [1], 0]) + bytes(8),
        framed(["array", "<i8", [1 << 62, 4], 0]) + bytes(8),
        framed(["array", "<i8", [-1], 0]) + bytes(8),
        framed(["array", "<i8", [1], 1]) + bytes(8),
        framed(["bytes", 1 << 62, 0]),
        framed(["bytes", 4, -4]) + bytes(8),
        framed(["plain"]),
        framed([]),
        framed([["x"]]),
        framed(["dict", "plain", ["a"], "plain", []]),
        framed(["dict", "mixed", [["dict", "plain", [], "plain", []]], "plain", [1]]),
    ],
)
def test_what_no_rank_sends_is_refused(data: bytes) -> None:
    with pytest.raises(MessageError):
        CODEC.decode(data)


def test_subclasses_of_plain_types_come_back_as_those() -> None:
    value = {"version": torch.__version__, "shape": torch.Size([2, 3]), "sizes": [torch.Size([1])], "one": np.int64(1)}
    found = CODEC.decode(CODEC.encode(OrderedDict(value)))
    assert found == {"version": str(torch.__version__), "shape": (2, 3), "sizes": [(1,)], "one": 1}
    assert [type(it) for it in found.values()] == [str, tuple, list, int]


def test_only_listed_classes_are_sent() -> None:
    for value in (object(), Pair("a", ()), torch.float32, os.system, {1, 2}, np.array([None])):
        with pytest.raises((TypeError, MessageError)):
            PLAIN.decode(PLAIN.encode(value))


class CallOnLoad:
    """An object whose pickle calls a function when loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_pickle_from_the_network_is_not_loaded(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for protocol in range(6):
        data = pickle.dumps(CallOnLoad(canary), protocol)
        message = struct.pack("<Q", len(data)) + data
        first = torch.frombuffer(bytearray(message.ljust(1024, b"\0")), dtype=torch.uint8)
        with pytest.raises(LostRanksError):
            CONSENSUS.decode_message(first, torch.empty(0, dtype=torch.uint8))
        with pytest.raises(MessageError):
            PLAIN.decode(data)
    assert not canary.exists()


def test_what_is_said_about_checkpoints(tmp_path: Path) -> None:
    rows = [DatasetRow(f"layers.{i}", (8, 4 + i % 3), torch.bfloat16, (4, 0), (4, 4 + i % 3)) for i in range(300)]
    held = make_file_layout(rows, make_image(rows))
    file = ShardFile("shards/000/000000.h5", 5, "xxh3_64:0", None, 7)
    manifest = Manifest(3, 1, 1, gather_layouts([held]), (file,), {"a": [1, {"b": None}]})
    for value in (
        WrittenShard(((file, held), (file, None)), False, "w", 0.5),
        RemoteFailure("x", True),
        Problem("f", "w"),
    ):
        assert CONSENSUS.make_codec().decode(CONSENSUS.make_codec().encode(value)) == value
    path, found = CONSENSUS.make_codec().decode(CONSENSUS.make_codec().encode((tmp_path, manifest)))
    assert (path, found.to_bytes()) == (tmp_path, manifest.to_bytes())


def _gathered(world: World) -> list[Any]:
    mine = {"rank": world.rank, "text": "x" * (3000 * world.rank), "pairs": [(world.rank, None)]}
    return [all_gather_values(mine), gather_values(mine), broadcast_value(mine if world.rank == 0 else None)]


def test_collectives_of_values() -> None:
    expected = [{"rank": it, "text": "x" * (3000 * it), "pairs": [(it, None)]} for it in range(3)]
    for rank, (everybody, gathered, first) in enumerate(run_ranks(_gathered, 3)):
        assert everybody == expected
        assert gathered == (expected if rank == 0 else None)
        assert first == expected[0]


ALLOWED = {
    "launch/callables/calls.py": "functions that Hydra's launchers hand over, in files of the user alone",
    "testing.py": "functions that a test hands to its own processes, through pipes of theirs",
    "bench/checkpoint/sides.py": "what is measured against, with weights_only, on its own files",
}
FORBIDDEN = re.compile(
    r"^\s*(import|from) (pickle|cloudpickle|marshal|shelve|dill)\b|\btorch\.load\(|_object_list\(|gather_object\(|"
    r"allow_pickle|\b(comm|COMM_WORLD|ranks)\.(bcast|allgather|gather|scatter|send|recv)\(",
    re.MULTILINE,
)


def test_no_other_module_unpickles() -> None:
    package = Path(hpc_train.__file__).parent
    found = {it.relative_to(package).as_posix() for it in package.rglob("*.py") if FORBIDDEN.search(it.read_text())}
    assert found == set(ALLOWED)


def _saved_and_resumed(world: World, folder: str) -> list[str]:
    """Save and resume while Python's unpickler and torch's object collectives fail."""

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("unpickled")

    with patch("pickle.loads", refused), patch("torch.distributed.distributed_c10d._tensor_to_object", refused):
        for sharing in (WriterSharing(), WriterSharing(ranks_per_file=0, writers_per_node=1)):
            saver = Saver(Path(folder) / str(sharing.ranks_per_file), world, sharing=sharing)
            for step in (1, 2):
                state = torch.full((3,), float(step))
                saver.save(
                    step, [TensorShard("w", (9,), state.dtype, (3 * world.rank,), state)], {"step": step}
                ).result(60)
            whole = TensorShard("w", (9,), torch.float32, (0,), torch.zeros(9), replica=world.rank)
            found = resume_from_checkpoint(saver.directory, "auto", [whole], world)
            assert found is not None
            assert whole.local.tolist() == [2.0] * 9
            assert find_newest_verified(saver.directory, world) == 2
    return sorted(it.name for it in Path(folder).iterdir())


def test_checkpoints_are_exchanged_without_a_pickle(tmp_path: Path) -> None:
    assert run_ranks(lambda world: _saved_and_resumed(world, str(tmp_path)), 3) == [["0", "1"]] * 3
