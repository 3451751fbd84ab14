"""docs/checkpoint_format.md is right: a reader written from the document alone reads every kind of step."""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import fields
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from checkpoint_helpers import State, alone, whole
from incremental_helpers import SMALL

from hpc_train.checkpoint import Saver
from hpc_train.checkpoint.format import compressed_chunks, integer_columns, manifest, manifest_encoding
from hpc_train.checkpoint.format.block_digests import BLOCK_BYTES, BLOCK_DIGEST_ALGORITHM
from hpc_train.checkpoint.provenance import Origin, SaveTimes, identify_code
from hpc_train.checkpoint.save.incremental.incremental_writer import IncrementalWriter
from hpc_train.checkpoint.storage import step_directory

DOCUMENT = Path(__file__).parents[2] / "docs" / "checkpoint_format.md"
KINDS = ("plain", "compressed", "incremental")


def tensors(step: int) -> State:
    counted = torch.arange(2 * 40_000).reshape(2, 40_000) % 50
    counted[1] += step
    return {
        "w": torch.randn(3, 5),
        "half/of": torch.ones(7).bfloat16() * step,
        "counted": counted,
        "frozen": torch.arange(5000.0),
        "step": torch.tensor(step),
        "none": torch.zeros(0, 4),
    }


@pytest.fixture(scope="module", params=KINDS)
def step(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    directory, incremental = tmp_path_factory.mktemp(request.param), request.param == "incremental"
    saver = Saver(
        directory,
        alone(),
        background=False,
        level=int(request.param == "compressed"),
        incremental=IncrementalWriter(SMALL) if incremental else None,
        origin=Origin(*identify_code(), config="c", model="m", attempt=1),
    )
    for number in (1, 2):
        state = tensors(number)
        saver.save(number, whole(state), {"n": number})
        for it in saver.wait():
            it.wait()
    return directory / "step-2", state


def column(code: Any) -> list[int]:
    if isinstance(code, list):
        return code
    ways = product(*(range(count) for count, _ in code["loops"]))
    return [code["from"] + sum(i * stride for i, (_, stride) in zip(way, code["loops"], strict=True)) for way in ways]


def body_of(path: Path) -> dict[str, Any]:
    text = (path / "manifest.json").read_text()
    found = re.fullmatch(r'(.*),"checksum":"xxh3_128:([0-9a-f]{32})"\}\n', text)
    assert found is not None
    assert xxhash.xxh3_128_hexdigest(found[1].encode() + b"}") == found[2]
    body = json.loads(text)
    assert (
        text
        == json.dumps({**body, "checksum": 0}, separators=(",", ":")).replace(
            '"checksum":0', f'"checksum":"xxh3_128:{found[2]}"'
        )
        + "\n"
    )
    assert list(body) == [*sorted(body.keys() - {"checksum"}), "checksum"]
    return dict(body)


def image_of(path: Path, body: dict[str, Any], file: int) -> tuple[bytes, bytes, bytes]:
    """Return (the image of a file, its seal, the parts of its table)."""
    name, size, digests = body["files"][file]
    data, table = (path / name).read_bytes(), (path / (name + ".digests")).read_bytes()
    assert digests == "xxh3_128:" + xxhash.xxh3_128_hexdigest(table)
    assert (table[:8], *struct.unpack("<QQ", table[8:24])) == (b"HPCTDIG2", size, 131072)
    count = -(-size // 131072)
    blocks = struct.unpack(f"<{count}Q", table[40 : 40 + 8 * count])
    assert [xxhash.xxh3_64_intdigest(data[at : at + 131072]) for at in range(0, size, 131072)] == list(blocks)
    whole = (body.get("inflated") or [None] * 9)[file]
    if whole is None:
        assert len(table) == 40 + 8 * count
        return data, table[24:40], b""
    image = bytearray(whole)
    for begin, size, at, stored, inflated, item in struct.iter_unpack("<6q", table[40 + 8 * count :]):
        part = data[at : at + stored]
        if inflated:
            planes = np.frombuffer(zlib.decompress(part), np.uint8).reshape(item, -1)
            part = planes.T.tobytes()[:size]
        image[begin : begin + size] = part
    return bytes(image), table[24:40], table[40 + 8 * count :]


def pieces_of(body: dict[str, Any]) -> Iterator[tuple[int, list[tuple[Any, ...]], bool]]:
    """Yield (file, (tensor, dtype, tensor's shape, offset, shape, place) of its rows, whether they are all of it)."""
    kind_of = column(body["kinds"]["of"])
    for layout in body["layouts"]:
        cut_of = column(layout["cuts"]["of"])
        for member, file in enumerate(column(layout["files"])):
            rows = []
            for tensor, place, cut in zip(column(layout["tensors"]), column(layout["places"]), cut_of, strict=True):
                shape, offsets = layout["cuts"]["are"][cut]
                offset = [column(dimension)[member] for dimension in offsets]
                rows.append((body["tensors"][tensor], *body["kinds"]["are"][kind_of[tensor]], offset, shape, place))
            yield file, rows, "within" not in layout


def test_a_reader_of_the_document_reads_it(step: tuple[Path, State]) -> None:
    path, state = step
    body = body_of(path)
    found = {name: torch.zeros_like(it) for name, it in state.items()}
    for file, rows, is_all in pieces_of(body):
        image, seal, parts = image_of(path, body, file)
        for name, dtype, whole_shape, offset, shape, place in rows:
            tensor = found[name]
            assert (str(tensor.dtype), list(tensor.shape)) == ("torch." + dtype, whole_shape)
            data = bytearray(image[place : place + prod(shape) * tensor.itemsize])
            if data:
                where = tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))
                tensor[where] = torch.frombuffer(data, dtype=tensor.dtype).reshape(shape)
        if is_all:
            codes = b"".join(
                struct.pack("<Q", xxhash.xxh3_64_intdigest(json.dumps([*row[1:5]]).encode())) for row in rows
            )
            places = b"".join(struct.pack("<q", row[5]) for row in rows)
            names = "\0".join(row[0] for row in rows).encode()
            expected = xxhash.xxh3_128_digest(codes + places + names)
            assert seal == (xxhash.xxh3_128_digest(expected + parts) if parts else expected)
    assert {name: it.tolist() for name, it in found.items()} == {name: it.tolist() for name, it in state.items()}


def table_after(words: str) -> set[str]:
    """Return the names in the first column of the first table after some words of the document."""
    text = DOCUMENT.read_text().partition(words)[2]
    rows = text[text.index("\n|") :].partition("\n\n")[0].splitlines()
    return {name for row in rows if (name := row.split("|")[1].strip(" `") if "|" in row else "")} - {"---", "key"}


def test_every_key_is_described_and_every_description_is_of_a_key(step: tuple[Path, State]) -> None:
    path, _ = step
    body = body_of(path)
    described = table_after("## The manifest")
    optional = {"written_at", "inflated", "index", "origin", "times"}
    assert body.keys() <= described
    assert described - optional <= body.keys()
    of_layout = table_after("A *layout* describes")
    assert all(layout.keys() <= of_layout and of_layout - {"within"} <= layout.keys() for layout in body["layouts"])
    text = DOCUMENT.read_text()
    for of in (Origin, SaveTimes):
        assert all(f"`{it.name}`" in text for it in fields(of) if it.name != "commit")


def test_its_numbers_are_those_of_the_code() -> None:
    text = DOCUMENT.read_text()
    numbers = {
        f"This is format version {manifest.FORMAT_VERSION};",
        f"| `block` | integer | {BLOCK_BYTES} |",
        f"| `algorithm` | text | `{BLOCK_DIGEST_ALGORITHM}` |",
        f"at most 2^{(manifest.MAX_MANIFEST_BYTES).bit_length() - 1} bytes, a mark {step_directory._MAX_REASON_BYTES};",
        f"from 0 to 2^{integer_columns.LARGEST_INTEGER.bit_length() - 1} ",
        f"at most {manifest_encoding.MAX_DIMENSIONS} dimensions",
        f"2^{integer_columns._FREE.bit_length() - 1} numbers plus one for each byte",
        f"at most {manifest._MAX_INFLATION} bytes for each byte",
        f"`whole` is at most {compressed_chunks.CHUNK_BYTES}",
        f"chunks of at most {compressed_chunks.CHUNK_BYTES} bytes",
        f"A dataset of {compressed_chunks.MINIMUM_CHUNKED_BYTES} bytes and more",
        *(f"`{name}`" for name in compressed_chunks.PART_DTYPE.names or ()),
    }
    assert {it for it in numbers if it not in text} == set()
