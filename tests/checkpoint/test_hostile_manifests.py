"""A manifest that lies, with a valid checksum, is found by `verify`, refused by `load`, and skipped on resume."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_commands import Terminal
from checkpoint_helpers import alone, blank, holds, same_pieces, save_alone, sharded, whole

from hpc_train.checkpoint import CheckpointError, load_step, resume_from_checkpoint, save_step, verify_step
from hpc_train.checkpoint.format.compressed_chunks import PART_DTYPE, check_parts
from hpc_train.checkpoint.format.hdf5_parser import ParsedDataset
from hpc_train.checkpoint.format.manifest import read_manifest
from hpc_train.checkpoint.format.shard_consistency import ExpectedDataset, _check_place
from hpc_train.checkpoint.load.load_step import check_reads
from hpc_train.checkpoint.load.read_schedule import LoadDestinations, make_strips
from hpc_train.checkpoint.load.verified_reader import ShardReader
from hpc_train.checkpoint.storage.file_system import checksum_bytes
from hpc_train.interfaces import World
from hpc_train.testing import run_ranks

Body = dict[str, Any]
TENSORS = {
    "a": torch.arange(64, dtype=torch.float32),
    "b": torch.arange(64, dtype=torch.float32) + 1000,
    "c": torch.arange(30, dtype=torch.float64).reshape(5, 6),
    "zeros": torch.zeros(4, 4096),
}
"""a and b differ only in their values; zeros are worth compressing."""


def reseal(step: Path, change: Callable[[Body], object]) -> None:
    """Change a manifest and make its checksum again, as anybody can."""
    body = json.loads((step / "manifest.json").read_text())
    del body["checksum"]
    change(body)
    write_body(step, body)


def write_body(step: Path, body: Body) -> None:
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    end = f',"checksum":"{checksum_bytes(text)}"}}\n'.encode()
    (step / "manifest.json").write_bytes(text[:-1] + end)


def place(number: int, row: int = 0) -> Callable[[Body], object]:
    def change(body: Body) -> None:
        body["layouts"][0]["places"] = [number if at == row else it for at, it in enumerate(places(body))]

    return change


def places(body: Body) -> list[int]:
    found = body["layouts"][0]["places"]
    assert isinstance(found, list)
    return found


def at_the_end(body: Body) -> None:
    place(body["files"][0][1])(body)


def swap(key: str) -> Callable[[Body], object]:
    def change(body: Body) -> None:
        row = body["tensors"] if key == "tensors" else body["layouts"][0][key]
        row[0], row[1] = row[1], row[0]

    return change


def layout(**changed: Any) -> Callable[[Body], object]:
    return lambda body: body["layouts"][0].update(changed)


def file(at: int, value: Any) -> Callable[[Body], object]:
    def change(body: Body) -> None:
        body["files"][0][at] = value

    return change


def same_bytes_twice(body: Body) -> None:
    place(places(body)[1])(body)


def a_hole(body: Body) -> None:
    body["kinds"]["are"][body["kinds"]["of"][2]][1] = [5, 7]


def overlapping(body: Body) -> None:
    """Make two rectangles of one tensor overlap, with as many elements together as it has."""
    body["layouts"][0]["tensors"] = [0, 0, 2, 3]
    body["kinds"]["are"][0][1] = [128]


CHANGES: dict[str, Callable[[Body], object]] = {
    "place 2^62": place(1 << 62),
    "place 2^63 - 1": place((1 << 63) - 1),
    "place 2^64": place(1 << 64),
    "negative place": place(-8),
    "place at the end of the file": at_the_end,
    "place one byte on": lambda body: place(places(body)[0] + 1)(body),
    "place of padding": lambda body: place(places(body)[2] + 30 * 8, 2)(body),
    "the same bytes twice": same_bytes_twice,
    "places swapped": swap("places"),
    "names swapped": swap("tensors"),
    "a name of another tensor": lambda body: body["tensors"].__setitem__(0, "b"),
    "an unknown name": lambda body: body["tensors"].__setitem__(0, "elsewhere"),
    "a name with a NUL": lambda body: body["tensors"].__setitem__(0, "a\0"),
    "a name that is a million long": lambda body: body["tensors"].__setitem__(0, "a" * 1_000_000),
    "half a surrogate pair": lambda body: body["tensors"].__setitem__(0, "\ud800"),
    "inflated 2^50 of a plain file": lambda body: body.update(inflated=[1 << 50]),
    "inflated of a plain file": lambda body: body.update(inflated=[body["files"][0][1]]),
    "inflated, of two files": lambda body: body.update(inflated=[1 << 50, 1 << 50]),
    "place 2^40 of an inflated file": lambda body: (body.update(inflated=[1 << 41]), place(1 << 40)(body)),
    "a larger file": lambda body: file(1, body["files"][0][1] + 1)(body),
    "a file of 2^60": file(1, 1 << 60),
    "a file of 2^60 and a place in it": lambda body: (file(1, 1 << 60)(body), place(1 << 59)(body)),
    "a negative file": file(1, -1),
    "a file that is a link out": file(0, "../../../../etc/passwd"),
    "an absolute file": file(0, "/etc/passwd"),
    "a file with a NUL": file(0, "shards/\0.h5"),
    "a file without a name": file(0, ""),
    "a file with a long name": file(0, "a" * 1_000_000),
    "the manifest as a file": file(0, "manifest.json"),
    "no digests": file(2, "xxh3_128:"),
    "digests that are a number": file(2, 7),
    "loops of 10^10": layout(places={"from": 0, "loops": [[10**10, 0]]}),
    "loops of 10^10 in pairs": layout(places={"from": 0, "loops": [[10**5, 1], [10**5, 0]]}),
    "loops of 2^21": layout(places={"from": 0, "loops": [[1 << 21, 1]]}, tensors={"from": 0, "loops": [[1 << 21, 0]]}),
    "loops that overflow": layout(places={"from": 0, "loops": [[4, 1 << 62]]}),
    "loops that are backwards": layout(places={"from": 0, "loops": [[-4, 8192]]}),
    "a thousand loops": layout(places={"from": 0, "loops": [[1, 0]] * 1000}),
    "invalid loops": layout(places={"from": 0, "loops": 7}),
    "places that are text": layout(places="0123"),
    "places that are floats": lambda body: layout(places=[float(it) for it in places(body)])(body),
    "places that are true": layout(places=[True, True, True, True]),
    "fewer places": lambda body: layout(places=places(body)[:-1])(body),
    "a tensor that is not there": layout(tensors=[0, 1, 2, 9]),
    "a file that is not there": layout(files=[1]),
    "a file of two layouts": lambda body: body["layouts"].append(body["layouts"][0]),
    "a layout of two files": layout(files=[0, 0]),
    "a tensor of 2^60": lambda body: body["kinds"]["are"][0].__setitem__(1, [1 << 60]),
    "a tensor of 2^31 x 2^31 x 2^31": lambda body: body["kinds"]["are"][0].__setitem__(1, [1 << 31] * 3),
    "a tensor of a negative length": lambda body: body["kinds"]["are"][0].__setitem__(1, [-64]),
    "a tensor with a hole": a_hole,
    "a tensor with an overlap": overlapping,
    "a piece outside of its tensor": lambda body: body["layouts"][0]["cuts"]["are"][0][1].__setitem__(0, [1]),
    "another dtype": lambda body: body["kinds"]["are"][0].__setitem__(0, "int32"),
    "a dtype that is a module": lambda body: body["kinds"]["are"][0].__setitem__(0, "nn"),
    "no tensors": lambda body: body.update(tensors=[], kinds={"of": [], "are": []}, layouts=[]),
    "no layouts": lambda body: body.update(layouts=[]),
    "a step that is a float": lambda body: body.update(step=2.0),
    "another step": lambda body: body.update(step=3),
    "a sequence of 10^30": lambda body: body.update(sequence=10**30),
    "a negative sequence": lambda body: body.update(sequence=-1),
    "a world that is true": lambda body: body.update(world_size=True),
    "finite that is text": lambda body: body.update(finite="yes"),
    "extra that is a list": lambda body: body.update(extra=[]),
    "extra that is missing": lambda body: body.pop("extra"),
    "a loss that is NaN": lambda body: body.update(validation_loss=float("nan")),
    "a loss that is infinite": lambda body: body.update(validation_loss=1e999),
    "another block": lambda body: body.update(block=4096),
    "a format that is text": lambda body: body.update(format_version="5"),
    "a format that is true": lambda body: body.update(format_version=True),
    "an origin that is a list": lambda body: body.update(origin=[1]),
    "times that are text": lambda body: body.update(times={"at": "now"}),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sound steps; tests damage the second in a copy of them."""
    directory = tmp_path_factory.mktemp("hostile")
    save_alone(directory, 1, TENSORS, {"consumed": 1})
    save_alone(directory, 2, TENSORS, {"consumed": 2})
    return directory


@pytest.fixture
def directory(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "steps"))


@pytest.fixture
def terminal(capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(capsys)


def refuses(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Check that every way to read step 2 refuses it, and that resuming takes step 1."""
    assert verify_step(directory, 2) != []
    with pytest.raises(CheckpointError, match="step 2"):
        load_step(directory, 2, poisoned(), alone())
    pieces = poisoned()
    with caplog.at_level(logging.WARNING):
        resumed = resume_from_checkpoint(directory, "auto", pieces, alone())
    assert resumed is not None
    assert resumed.step == 1
    assert "it is skipped" in caplog.text
    assert same_pieces(pieces, whole(TENSORS))


def poisoned() -> list[Any]:
    pieces = blank(whole(TENSORS))
    for piece in pieces:
        piece.local.fill_(777)
    return pieces


@pytest.mark.parametrize("what", CHANGES)
def test_a_lie_is_found(directory: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    reseal(directory / "step-2", CHANGES[what])
    refuses(directory, caplog)


TEXTS: dict[str, bytes] = {
    "nested 200,000 times": b"[" * 200_000 + b"]" * 200_000,
    "objects nested": b'{"a":' * 200_000 + b"1" + b"}" * 200_000,
    "a key twice": b'{"step":2,"step":2}',
    "an integer of 10,000 digits": b'{"step":' + b"9" * 10_000 + b"}",
    "an infinity": b'{"step":Infinity}',
    "UTF-16": '{"step":2}'.encode("utf-16"),
}


@pytest.mark.parametrize("what", TEXTS)
def test_a_text_that_is_no_manifest(directory: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    (directory / "step-2/manifest.json").write_bytes(TEXTS[what])
    refuses(directory, caplog)
    save_alone(directory, 3, TENSORS)
    assert holds(directory, 3, TENSORS)


@pytest.mark.parametrize(
    "what", ["place 2^62", "the same bytes twice", "inflated 2^50 of a plain file", "places swapped"]
)
def test_the_command_says_what_the_function_says(directory: Path, what: str, terminal: Terminal) -> None:
    reseal(directory / "step-2", CHANGES[what])
    found = terminal.call("verify", directory / "step-2", "--json")
    assert found.code == 1
    assert [it["what"] for it in json.loads(found.out)["problems"]] == [it.what for it in verify_step(directory, 2)]


@pytest.mark.long  # compiles all of torch
def test_what_is_checked_does_not_hang_on_asserts(directory: Path) -> None:
    """PYTHONOPTIMIZE, or -O, removes asserts."""
    reseal(directory / "step-2", CHANGES["place 2^62"])
    code = (
        "import sys, torch; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "from test_hostile_manifests import TENSORS, alone, load, poisoned\n"
        "from hpc_train.checkpoint import CheckpointError\n"
        "try: load(Path(sys.argv[1]), 2, poisoned(), alone())\n"
        "except CheckpointError as error: print(error)\n"
    )
    command = [sys.executable, "-O", "-c", code, directory, Path(__file__).parent]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "would be at byte" in found.stdout


def two_of_a_rank(world: World, directory: Path) -> None:
    """Save rows that both ranks want, so that each would read some for the other."""
    save_step(directory, 2, sharded(TENSORS, 0, world.rank, world.size), {}, world).wait()


def refused_by_all(world: World, directory: Path) -> str:
    pieces = blank(whole(TENSORS))
    with pytest.raises(CheckpointError) as error:
        load_step(directory, 2, pieces, world)
    return str(error.value)


SHARED = ("place 2^62", "a file of 2^60", "a larger file", "places swapped", "names swapped", "loops of 10^10")


def test_all_ranks_refuse_it(tmp_path: Path) -> None:
    run_ranks(two_of_a_rank, 2, tmp_path)
    step = tmp_path / "step-2"
    sound = (step / "manifest.json").read_bytes()
    for what in SHARED:
        (step / "manifest.json").write_bytes(sound)
        reseal(step, CHANGES[what])
        one, other = run_ranks(refused_by_all, 2, tmp_path)
        assert one == other
        assert "step 2" in one


@pytest.mark.parametrize("place_in_file", [4096, 4104, 4112])
def test_a_dataset_lies_where_the_manifest_says(place_in_file: int) -> None:
    """The last of three checks that find this: the others are the seal of the layout and the digests."""
    expected = ExpectedDataset("a", "float32", (2,), (0,), (2,), 4104)
    found = ParsedDataset("a", "float32", 4, (2,), (0,), (2,), place_in_file)
    with nullcontext() if place_in_file == 4104 else pytest.raises(CheckpointError, match="its dataset is at byte"):
        _check_place(expected, found, None)


@pytest.mark.parametrize("run", [0, 24, 32, 40])
def test_every_byte_of_a_tensor_is_asked_for_once(directory: Path, run: int) -> None:
    """Reads that a plan with a mistake, or a manifest past all other checks, might make of a tensor of 32 bytes."""
    targets = LoadDestinations(whole({"x": torch.zeros(4, dtype=torch.float64)}))
    manifest = read_manifest(directory / "step-1", 1)
    with ShardReader(directory / "step-1", manifest) as source:
        strips = make_strips([(0, 4096, 1, run, run, 0, 0, run)] if run else [])
        with nullcontext() if run == 32 else pytest.raises(CheckpointError, match="do not fill the tensors exactly"):
            check_reads(strips, source, targets)


def part(begin: int, size: int, at: int, stored: int) -> tuple[int, ...]:
    return begin, size, at, stored, 0 if stored == size else size, 4


PARTS = [part(0, 4096, 0, 1000), part(4096, 100, 1000, 100), part(8192, 4096, 1100, 900)]
"""Two streams, and between them bytes that are stored as they are."""


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        (1, None),
        (1, part(4095, 101, 1000, 101)),  # begins within the one before
        (1, part(4096, 5000, 1000, 100)),  # ends within the one after
        (1, part(4096, 100, 999, 100)),  # shares a byte of the file with the one before
        (2, part(8192, 4096, 1100, 901)),  # ends after the file
        (2, part(8192, 4097, 1100, 900)),  # ends after the image
        (0, part(0, 0, 0, 0)),
        (0, (0, 4096, 0, 1000, 4095, 4)),  # inflates to less than it has
        (0, (0, 4096, 0, 1000, 4096, 0)),
    ],
)
def test_parts_of_a_compressed_file_share_nothing(row: int, wrong: tuple[int, ...] | None) -> None:
    parts = np.array([wrong if wrong and at == row else it for at, it in enumerate(PARTS)], dtype=PART_DTYPE)
    with nullcontext() if wrong is None else pytest.raises(CheckpointError, match="does not lie where there is room"):
        check_parts(parts, 2000, 8192 + 4096)
