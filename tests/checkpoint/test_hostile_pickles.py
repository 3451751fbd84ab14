"""No importer runs code from a file, or believes a size before it is checked."""

from __future__ import annotations

import copyreg
import os
import pickle
import resource
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_commands import Terminal
from drawn import draw
from hostile_pickles import bombs, programs
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hpc_train.checkpoint.convert.formats import torch_files
from hpc_train.checkpoint.convert.formats.dcp import DcpTensors, parse_dcp_metadata
from hpc_train.checkpoint.convert.tensor_sources import make_blank_shard
from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch warns in a single process
STATE = {"w": torch.arange(12.0).reshape(3, 4), "model": {"b": torch.ones(5)}}
ROOM = 1 << 30
"""Bytes of address space that a reader may use beyond what the process has."""
Write = Callable[[Path, bytes], None]


@pytest.fixture
def terminal(capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(capsys)


@contextmanager
def little_memory() -> Iterator[None]:
    """Limit the address space: a reader that allocates what a file claims gets a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def write_dcp(folder: Path) -> Path:
    """Write a sound checkpoint of torch.distributed.checkpoint."""
    dcp.save(dict(STATE), storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return folder


def as_zip(path: Path, data: bytes) -> None:
    """Write the pickle as that of a torch.save archive."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/data/0", bytes(64))
        archive.writestr("archive/byteorder", b"little")


def as_legacy(path: Path, data: bytes) -> None:
    """Write the pickle as that of a file from before torch 1.6."""
    head = [0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True}]
    path.write_bytes(b"".join(pickle.dumps(it, 2) for it in head) + data + pickle.dumps([], 2))


def as_first(path: Path, data: bytes) -> None:
    """Write the pickle as the first bytes of a file without any format."""
    path.write_bytes(data)


WAYS: dict[str, Write] = {"zip": as_zip, "legacy": as_legacy, "raw": as_first}


def refuse(read: Callable[[], object]) -> None:
    """Check that `read` raises an error of one printable line, and nothing else."""
    with pytest.raises((UserError, CheckpointError)) as caught:
        read()
    assert "\n" not in str(caught.value)
    assert str(caught.value).isprintable()


def read_or_refuse(read: Callable[[], Any]) -> Any:
    """Return the result of `read`, as the file may be harmless after all; None if it is refused, in one line."""
    try:
        return read()
    except (UserError, CheckpointError) as error:
        if "\n" in str(error):
            raise AssertionError("more than one line") from error
        return None


@pytest.mark.parametrize("way", WAYS)
def test_no_program_runs_from_a_file_of_torch_save(tmp_path: Path, way: str) -> None:
    canary, file = tmp_path / "canary", tmp_path / "file.pt"
    for name, data in programs(canary).items():
        WAYS[way](file, data)
        assert not read_or_refuse(lambda: torch_files.read_torch_file(file)), name
        assert not canary.exists(), name


def test_no_program_runs_from_dcp_metadata(tmp_path: Path) -> None:
    canary, folder = tmp_path / "canary", write_dcp(tmp_path / "dcp")
    sound, expected = (folder / ".metadata").read_bytes(), parse_dcp_metadata(folder)
    for name, data in programs(canary).items():
        (folder / ".metadata").write_bytes(data)
        refuse(lambda: parse_dcp_metadata(folder))
        assert not canary.exists(), name
        (folder / ".metadata").write_bytes(data[:-1] + b"0" + sound[2:])  # followed by sound metadata
        assert read_or_refuse(lambda: parse_dcp_metadata(folder)) in (None, expected), name
        assert not canary.exists(), name


def test_no_program_runs_from_dcp_data(tmp_path: Path) -> None:
    canary, folder = tmp_path / "canary", write_dcp(tmp_path / "dcp")
    names = {"w": "w"}
    expected = parse_dcp_metadata(folder)
    (chunk,) = expected["w"].chunks
    file = folder / chunk.file
    sound = file.read_bytes()
    for name, data in programs(canary).items():
        as_zip(tmp_path / "one", data)
        archive = (tmp_path / "one").read_bytes()
        comment = chunk.size - len(archive)  # pads the item to the length that the metadata says
        content = archive[:-2] + struct.pack("<H", comment) + bytes(comment)
        file.write_bytes(sound[: chunk.begin] + content + sound[chunk.begin + chunk.size :])
        stored = DcpTensors(folder, expected, names, {"w": torch.float32})
        (tensor,) = stored.tensors
        refuse(lambda stored=stored, tensor=tensor: stored.fill([make_blank_shard(tensor, tensor.rectangle)]))  # type: ignore[misc]
        assert not canary.exists(), name


def test_the_extension_registry_is_not_used(tmp_path: Path) -> None:
    """Not even if the process has registered a function, and Python has cached it."""
    canary = tmp_path / "canary"
    copyreg.add_extension("posix", "system", 1)
    try:
        data = programs(canary)["EXT1"]
        pickle.loads(b"\x80\x02\x82\x01.")  # now it is in the cache, and find_class is not called for it
        as_zip(tmp_path / "file.pt", data)
        refuse(lambda: torch_files.read_torch_file(tmp_path / "file.pt"))
        folder = write_dcp(tmp_path / "dcp")
        (folder / ".metadata").write_bytes(data)
        refuse(lambda: parse_dcp_metadata(folder))
    finally:
        copyreg.remove_extension("posix", "system", 1)
        copyreg.clear_extension_cache()
    assert not canary.exists()


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_the_command_refuses_them_in_one_line(tmp_path: Path, terminal: Terminal, form: str) -> None:
    canary, run = tmp_path / "canary", tmp_path / "run"
    chosen = programs(canary)
    names = ["os.system, protocol 0", "os.system, protocol 5", "INST", "OBJ", "EXT1", "PERSID", "NEWOBJ_EX"]
    names += [name for name in chosen if name.startswith("STACK_GLOBAL torch.distributed")]
    folder = write_dcp(tmp_path / "dcp")
    for name in names:
        if form == "torch":
            as_zip(tmp_path / "file.pt", chosen[name])
            terminal.refused("import", tmp_path / "file.pt", run, "--format", form)
        else:
            (folder / ".metadata").write_bytes(chosen[name])
            terminal.refused("import", folder, run, "--format", form)
        assert not canary.exists(), name
        assert not run.exists()


DEEP = {"deep lists", "deep dictionaries"}
"""As deep tuples, which `make test` has."""


@pytest.mark.parametrize("name", draw(bombs(), bombs().keys() - DEEP))
def test_bombs_end_at_once(tmp_path: Path, name: str) -> None:
    data, folder = bombs()[name], write_dcp(tmp_path / "dcp")
    (folder / ".metadata").write_bytes(data)
    with little_memory():
        refuse(lambda: parse_dcp_metadata(folder))
        for write in WAYS.values():
            write(tmp_path / "file.pt", data)
            assert not read_or_refuse(lambda: torch_files.read_torch_file(tmp_path / "file.pt"))


def rebuilt(
    size: Any, stride: Any, offset: int = 0, count: int = 16, key: str = "0", storage: str = "FloatStorage"
) -> bytes:
    """Return the pickle of {"w": a tensor in the storage `key` of 64 bytes}."""

    def number(value: int) -> bytes:
        return b"\x8a\x10" + value.to_bytes(16, "little", signed=True)

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    def numbers(values: Any) -> bytes:
        return b"(" + b"".join(number(it) for it in values) + b"t"

    identifier = (
        b"(" + text("storage") + f"ctorch\n{storage}\n".encode() + text(key) + text("cpu") + number(count) + b"tQ"
    )
    args = b"(" + identifier + number(offset) + numbers(size) + numbers(stride) + b"\x89ccollections\nOrderedDict\n)Rt"
    return b"\x80\x02}" + text("w") + b"ctorch._utils\n_rebuild_tensor_v2\n" + args + b"Rs."


def test_a_tensor_is_within_its_storage_and_its_storage_within_the_file(tmp_path: Path) -> None:
    file = tmp_path / "file.pt"
    as_zip(file, rebuilt((4, 4), (4, 1)))
    assert torch_files.read_torch_file(file)["w"].shape == (4, 4)
    wrong: dict[str, bytes] = {
        "too long": rebuilt((17,), (1,)),
        "behind": rebuilt((4,), (1,), offset=13),
        "before": rebuilt((4,), (1,), offset=-1),
        "backwards": rebuilt((4,), (-1,), offset=8),
        "strided past": rebuilt((2,), (16,)),
        "huge": rebuilt((1 << 40, 1 << 40), (1, 1)),
        "huge product": rebuilt((1 << 62, 4), (0, 0)),
        "expanded": rebuilt((1 << 50,), (0,)),
        "negative": rebuilt((-4,), (1,)),
        "of other dimensions": rebuilt((4, 4), (1,)),
        "of many dimensions": rebuilt((1,) * 1000, (1,) * 1000),
        "storage past the record": rebuilt((4,), (1,), count=1 << 40),
        "negative storage": rebuilt((4,), (1,), count=-16),
        "no such storage": rebuilt((4,), (1,), key="1"),
        "storage outside": rebuilt((4,), (1,), key="../data.pkl"),
        "larger elements": rebuilt((16,), (1,), storage="DoubleStorage"),
        "no storage class": rebuilt((4,), (1,), storage="Size"),
    }
    for data in wrong.values():
        as_zip(file, data)
        with little_memory():
            refuse(lambda: torch_files.read_torch_file(file))


def test_archives_that_claim_too_much(tmp_path: Path) -> None:
    data, file = rebuilt((4, 4), (4, 1)), tmp_path / "file.pt"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:  # 256 MiB in a few kilobytes
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/data/0", bytes(256 << 20))
    refuse(lambda: torch_files.read_torch_file(file))
    as_zip(file, data)
    sound = file.read_bytes()
    for place in range(sound.index(b"PK\x01\x02"), len(sound) - 4, 2):
        for value in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x80", b"\xff\xff\xff\x7f"):
            file.write_bytes(sound[:place] + value + sound[place + 4 :])
            with little_memory():
                read_or_refuse(lambda: torch_files.read_torch_file(file))
    for size in range(0, len(sound), 7):
        file.write_bytes(sound[:size])
        refuse(lambda: torch_files.read_torch_file(file))


def shared_tensor(names: bytes) -> bytes:
    """Return a pickle with a tensor in memo 0 and, after it, what `names` makes of it."""
    made = rebuilt((4, 4), (4, 1))
    return b"\x80\x02" + made[made.index(b"ctorch._utils") : -2] + b"q\x000" + names + b"."


def integers(count: int, value: bytes) -> bytes:
    """Return opcodes that set the keys 0 to count - 1 of a dictionary."""
    return b"(" + b"".join(b"J" + struct.pack("<i", key) + value for key in range(count)) + b"u"


def test_what_a_pickle_names_again_and_again_is_bounded(tmp_path: Path) -> None:
    """A few kilobytes must not become gigabytes of names, nor hours of looking at entries."""
    file = tmp_path / "file.pt"
    as_zip(file, shared_tensor(b"}" + integers(1000, b"h\x00")))
    assert len(torch_files.read_torch_file(file)) == 1000  # tied weights
    long_name = b"}X" + struct.pack("<I", 4000) + b"k" * 4000
    odd_keys = b"}q\x01(" + b")N" * 50_000 + b"u0"
    attacks = {
        "long names": shared_tensor(long_name + b"}" + integers(1000, b"h\x00") + b"s"),
        "many names": shared_tensor(b"}" + integers(40_000, b"h\x00")),
        "entries that are left out": b"\x80\x02" + odd_keys + b"}" + integers(50_000, b"h\x01") + b".",
    }
    for data in attacks.values():
        as_zip(file, data)
        refuse(lambda: torch_files.read_torch_file(file))


@pytest.mark.parametrize("other", ["archive/data/0", "another/data/0", "another/data.pkl"])
def test_two_records_of_one_name_are_refused(tmp_path: Path, other: str) -> None:
    """Readers differ in which of the two they take, so that what was looked at may not be what is loaded."""
    with zipfile.ZipFile(tmp_path / "file.pt", "w") as archive:
        archive.writestr("archive/data.pkl", rebuilt((4, 4), (4, 1)))
        archive.writestr("archive/data/0", bytes(64))
        if other == "archive/data/0":
            with pytest.warns(UserWarning, match="Duplicate name"):
                archive.writestr(other, b"\x01" * 64)
        else:
            archive.writestr(other, b"\x01" * 64)
    refuse(lambda: torch_files.read_torch_file(tmp_path / "file.pt"))


def test_chunks_that_many_tensors_share_are_bounded(tmp_path: Path) -> None:
    folder = write_dcp(tmp_path / "dcp")
    metadata = dcp.FileSystemReader(folder).read_metadata()
    empty = ChunkStorageMetadata(torch.Size([0]), torch.Size([0]))
    chunks = [empty] * 2000
    place = next(iter(metadata.storage_data.values()))
    for index in range(20):
        name = f"e{index}"
        metadata.state_dict_metadata[name] = TensorStorageMetadata(
            TensorProperties(torch.float32), torch.Size([0]), chunks
        )
        metadata.storage_data[MetadataIndex(name, torch.Size([0]))] = place
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)
    refuse(lambda: parse_dcp_metadata(folder))


def test_random_bytes_are_one_line(tmp_path: Path, terminal: Terminal) -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (0, 1, 7, 100, 5000, 1 << 20):
        content = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).numpy().tobytes()
        for begin in (b"", b"PK\x03\x04", b"\x80\x02", b"\x80\x04\x95"):
            (tmp_path / "rnd.bin").write_bytes(begin + content)
            terminal.refused("import", tmp_path / "rnd.bin", tmp_path / "run", "--format", "torch")
            terminal.refused("import", tmp_path / "rnd.bin", tmp_path / "run", "--format", "safetensors")


def test_damaged_dcp_metadata_is_refused(tmp_path: Path) -> None:
    folder = write_dcp(tmp_path / "dcp")
    sound = (folder / ".metadata").read_bytes()
    generator = torch.Generator().manual_seed(1)
    for place in torch.randint(0, len(sound), (1000,), generator=generator).tolist():
        (folder / ".metadata").write_bytes(sound[:place] + bytes([sound[place] ^ 0x11]) + sound[place + 1 :])
        found = read_or_refuse(lambda: parse_dcp_metadata(folder)) or {}
        assert all(it.begin + it.size <= 1 << 20 for tensor in found.values() for it in tensor.chunks)


def test_dcp_metadata_that_leads_elsewhere(tmp_path: Path) -> None:
    folder = write_dcp(tmp_path / "dcp")
    reader = dcp.FileSystemReader(folder)
    (tmp_path / "elsewhere").write_bytes((folder / "__0_0.distcp").read_bytes())

    def changed(change: Callable[[Any], None]) -> None:
        known = reader.read_metadata()
        change(known)
        with (tmp_path / "changed").open("wb") as file:
            pickle.dump(known, file)
        (tmp_path / "changed").replace(folder / ".metadata")
        refuse(lambda: parse_dcp_metadata(folder))

    def places(**fields: object) -> Callable[[Any], None]:
        def change(known: Any) -> None:
            for it in known.storage_data.values():
                it.__dict__.update(fields)

        return change

    sound = (folder / ".metadata").read_bytes()
    changes: list[Callable[[Any], None]] = [
        places(relative_path="../elsewhere"),
        places(relative_path=str(tmp_path / "elsewhere")),
        places(relative_path="a\0b"),
        places(relative_path="none.distcp"),
        places(offset=1 << 62),
        places(offset=-1),
        places(length=1 << 62),
        places(length=4),
        places(offset="0"),
        places(transform_descriptors=["zstd"]),
        lambda known: known.storage_data.clear(),
        lambda known: known.__dict__.update(storage_data=None),
        lambda known: known.state_dict_metadata["w"].__dict__.update(size=torch.Size([1 << 40, 1 << 20])),
        lambda known: known.state_dict_metadata["w"].__dict__.update(size=torch.Size([3, 5])),
        lambda known: known.state_dict_metadata["w"].__dict__.update(chunks=[]),
        lambda known: known.state_dict_metadata["w"].chunks.append(known.state_dict_metadata["w"].chunks[0]),
    ]
    for change in changes:
        changed(change)
        (folder / ".metadata").write_bytes(sound)
    assert parse_dcp_metadata(folder).keys() == {"w", "model.b"}


def test_only_regular_files_are_opened(tmp_path: Path, terminal: Terminal) -> None:
    os.mkfifo(tmp_path / "pipe")
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in (".metadata", "config.json", "model.safetensors"):
        os.mkfifo(folder / name)
    for form, path in (("torch", tmp_path / "pipe"), ("safetensors", tmp_path / "pipe"), ("hf", folder)):
        terminal.refused("import", path, tmp_path / "run", "--format", form)
    for form in ("dcp", "safetensors"):
        terminal.refused("import", folder, tmp_path / "run", "--format", form)
    terminal.refused("import", Path("/dev/zero"), tmp_path / "run", "--format", "torch")
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/dev/zero")
    terminal.refused("import", folder, tmp_path / "run", "--format", "hf")


def test_hostile_json_of_other_libraries(tmp_path: Path, terminal: Terminal) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    deep = "[" * 300_000 + "]" * 300_000
    llama = '{"model_type":"llama","vocab_size":9,"hidden_size":8,"intermediate_size":8,"num_hidden_layers":%s,'
    llama += '"num_attention_heads":%s,"rms_norm_eps":1e-5,"max_position_embeddings":8}'
    texts = [deep, "[]", "3", '{"model_type":[]}', llama % (10**12, 2), llama % (1, 0), llama % ("1e400", 2)]
    for text in [*texts, llama % (1, 10**30)]:
        (tmp_path / "config.json").write_text(text)
        terminal.refused("import", tmp_path, tmp_path / "run", "--format", "hf")
    for text in (deep, "[]", '{"weight_map":3}', '{"weight_map":{"w":"../../etc/passwd"}}', '{"weight_map":{"w":3}}'):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        terminal.refused("import", tmp_path, tmp_path / "run", "--format", "safetensors")
