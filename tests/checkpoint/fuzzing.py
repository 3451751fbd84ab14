"""Fuzz small checkpoint steps: change every file in many ways, and load the result.

It runs as a program in a process of its own, so that its parent notices a crash or a hang.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import json
import logging
import os
import random
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoint_helpers import State, alone, same_bits, whole

from hpc_train.checkpoint import CheckpointError, Saver, load_step, resume_from_checkpoint, verify_step
from hpc_train.checkpoint.format.block_digests import digest_blocks
from hpc_train.checkpoint.format.manifest import read_manifest
from hpc_train.checkpoint.load.verified_reader import read_digest_table
from hpc_train.checkpoint.save.incremental.incremental_writer import IncrementalWriter, SharingLimits
from hpc_train.checkpoint.storage.file_system import checksum_bytes
from hpc_train.cli.checkpoint.convert import reshard_command
from hpc_train.interfaces import TensorShard

SECONDS = 2
LIMIT = 120
"""Seconds after which a case ends the process, because an endless loop in C never comes back to a signal handler."""
MEMORY = 64 << 20
STEP = 2
_HEADER = 24 + 16
NUMBERS = (
    0,
    1,
    -1,
    2,
    7,
    8,
    255,
    4096,
    65536,
    1 << 17,
    1 << 31,
    (1 << 32) - 1,
    10**10,
    1 << 50,
    1 << 62,
    (1 << 63) - 1,
)
HUGE = (1 << 63, 1 << 64, 10**30, -(1 << 63))
VALUES: tuple[Any, ...] = (
    *NUMBERS,
    *HUGE,
    0.5,
    1e300,
    True,
    False,
    None,
    "",
    "a",
    "w",
    "\0",
    "..",
    "/",
    [],
    {},
    [[]],
    [0],
)
DTYPES = ("float32", "float64", "int8", "bool", "bfloat16", "complex128", "nn", "float8_e4m3fn")


def tensors(step: int) -> State:
    """Return tensors. Several are of the same shape and type, so that one can be mistaken for another."""
    draw = torch.Generator().manual_seed(step)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    return {
        "w.0": some(8, 6),
        "w.1": some(8, 6),
        "b.0": some(8).bfloat16(),
        "b.1": some(8).bfloat16(),
        "ids": torch.arange(40) + step,
        "step": torch.tensor(step),
        "frozen": torch.arange(8192, dtype=torch.float32).reshape(8, 1024) % 7,
        "none": torch.zeros(0, 3),
    }


@dataclass
class Base:
    """An undamaged step: its files in memory, and its tensors."""

    name: str
    directory: Path
    tensors: State
    files: dict[str, bytes] = field(default_factory=dict)
    structure: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """Spans of each shard file that belong to no tensor."""
    step: int = STEP

    @property
    def path(self) -> Path:
        return self.directory / f"step-{self.step}"

    @property
    def shards(self) -> list[str]:
        return [name for name in self.files if name.endswith(".h5") and name != "index.h5"]

    def remember(self) -> Base:
        self.files = {
            path.relative_to(self.path).as_posix(): path.read_bytes() for path in self.path.rglob("*") if path.is_file()
        }
        for name in self.files:  # so that no file is shared with another step any more
            self.put(name, self.files[name])
        manifest = read_manifest(self.path, self.step)
        for file in manifest.files:
            table = read_digest_table(self.path, file)
            if table.parts is not None:
                taken = [(int(at), int(at + stored)) for _, _, at, stored, _, _ in table.parts.tolist()]
            else:
                taken = _data(manifest, file.name)
            self.structure[file.name] = _between(sorted(taken), file.bytes)
        return self

    def put(self, name: str, data: bytes) -> None:
        path = self.path / name
        path.unlink(missing_ok=True)
        path.write_bytes(data)


def _data(manifest: Any, name: str) -> list[tuple[int, int]]:
    """Return the spans of all tensors in a file, including those that the step no longer uses (their pages)."""
    index = [file.name for file in manifest.files].index(name)
    sizes = {tensor.name: tensor.itemsize for tensor in manifest.step_layout.tensors}
    return [
        (part.place, part.place + part.rectangle.volume * sizes[tensor])
        for tensor, parts in manifest.step_layout.parts().items()
        for part in parts
        if part.file == index
    ]


def _between(taken: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    found, at = [], 0
    for begin, end in [*taken, (size, size)]:
        if begin > at:
            found.append((at, begin))
        at = max(at, end)
    return found


def make_bases(where: Path) -> list[Base]:
    """Make steps: plain, of two files, compressed, sharing with an earlier one; step 1 is sound."""
    bases = []
    for name in ("plain", "split", "compressed", "shared"):
        directory, level = where / name, int(name == "compressed")
        sharing = IncrementalWriter(SharingLimits(least=0, run=1024)) if name == "shared" else None
        saver = Saver(directory, alone(), background=False, level=level, incremental=sharing)
        for step in (1, STEP):
            saver.save(step, whole(tensors(step)), {"consumed": step})
            for save in saver.wait():
                save.wait()
        if name == "split":
            reshard_command(str(directory / f"step-{STEP}"), str(where / "other"), 2, 0, True)
            (directory / f"step-{STEP}").rename(where / "whole")
            (where / "other" / f"step-{STEP}").rename(directory / f"step-{STEP}")
        bases.append(Base(name, directory, tensors(STEP)))
    for base in bases:
        base.remember()
    return bases


# ---- changes


def seal(base: Base, body: dict[str, Any], draw: random.Random) -> bytes:
    """Return the text of a manifest with the right checksum."""
    body.pop("checksum", None)
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return text[:-1] + f',"checksum":"{checksum_bytes(text)}"}}\n'.encode()


def spots(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to every value inside a JSON value."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from spots(value, (*path, key))


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def change_tree(tree: Any, draw: random.Random) -> None:
    """Change one place of a JSON value."""
    ways = list(spots(tree))
    path = draw.choice(ways)
    holder, key = at(tree, path[:-1]), path[-1]
    value = holder[key]
    kind = draw.randrange(9)
    if kind <= 2 and type(value) is int:
        holder[key] = value + draw.choice((1, -1, 2, 4, -4, 8, 48, 192, 4096, -4096, 1 << 40))
    elif kind == 3:
        other = draw.choice(ways)
        holder[key] = copy.deepcopy(at(tree, other))
    elif kind == 4 and isinstance(holder, list) and len(holder) > 1:
        other = draw.randrange(len(holder))
        holder[key], holder[other] = holder[other], holder[key]
    elif kind == 5 and isinstance(holder, list):
        holder.insert(draw.randrange(len(holder) + 1), copy.deepcopy(value))
    elif kind == 6:
        del holder[key]
    elif kind == 7 and isinstance(holder, dict):
        holder[draw.choice(("within", "inflated", "written_at", "extra", "x"))] = copy.deepcopy(draw.choice(VALUES))
    elif kind == 8 and isinstance(value, str):
        holder[key] = draw.choice((*DTYPES, "w.0", "w.1", "b.1", value + "x", value[:-1], "a" * 70_000))
    else:
        holder[key] = copy.deepcopy(draw.choice(VALUES))


def change_bytes(data: bytes, draw: random.Random, spans: list[tuple[int, int]] | None = None) -> bytes:
    """Change one place of some bytes. spans: where that may be; the length then stays the same."""
    low, high = draw.choice(spans) if spans else (0, max(1, len(data)))
    if spans and high - low > 4096 and draw.random() < 0.7:
        high = low + 4096
    begin, found = draw.randrange(low, high), bytearray(data)
    size = min(draw.choice((1, 1, 2, 4, 8, 8, 8, 64)), high - begin)
    kind = draw.randrange(5 if spans else 8)
    if kind == 0:
        found[begin] ^= 1 << draw.randrange(8)
    elif kind == 1:
        found[begin : begin + size] = draw.randbytes(size)
    elif kind == 2:
        found[begin : begin + size] = draw.choice((b"\0", b"\xff", b"\x7f")) * size
    elif kind == 3:
        number = draw.choice(NUMBERS) % (1 << 64)
        found[begin : begin + size] = struct.pack("<Q", number)[:size].ljust(size, b"\0")
    elif kind == 4:
        other = draw.randrange(low, high)
        found[begin : begin + size] = found[other : other + size].ljust(size, b"\0")[:size]
    elif kind == 5:
        del found[begin : begin + size]
    elif kind == 6:
        found[begin:begin] = draw.randbytes(size)
    else:
        del found[begin:]
    return bytes(found)


def manifest_tree(base: Base, draw: random.Random) -> dict[str, bytes]:
    body = json.loads(base.files["manifest.json"])
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        change_tree(body, draw)
    return {"manifest.json": seal(base, body, draw)}


def manifest_bytes(base: Base, draw: random.Random) -> dict[str, bytes]:
    data = change_bytes(base.files["manifest.json"], draw)
    end = data.rfind(b',"checksum":')
    if end > 0 and draw.random() < 0.8:
        data = data[:end] + f',"checksum":"{checksum_bytes(data[:end] + b"}")}"}}\n'.encode()
    return {"manifest.json": data}


def deep(base: Base, draw: random.Random) -> dict[str, bytes]:
    number = draw.choice((900, 5000, 200_000))
    return {"manifest.json": draw.choice((b"[", b'{"a":', b'{"extra":[')) * number}


def table(base: Base, draw: random.Random) -> dict[str, bytes]:
    """Change a table of digests and parts, and its checksum in the manifest."""
    name = draw.choice(base.shards)
    data = base.files[name + ".digests"]
    words = [(at, at + 8) for at in range(0, len(data) - 7, 8)]
    data = change_bytes(data, draw, words if draw.random() < 0.7 else None)
    return with_table(base, name, data, draw) | {name + ".digests": data}


def with_table(base: Base, name: str, data: bytes, draw: random.Random, size: int | None = None) -> dict[str, bytes]:
    body = json.loads(base.files["manifest.json"])
    for row in body["files"]:
        if row[0] == name:
            row[2] = checksum_bytes(data)
            row[1] = row[1] if size is None else size
    return {"manifest.json": seal(base, body, draw)}


def shard(base: Base, draw: random.Random) -> dict[str, bytes]:
    name = draw.choice(base.shards)
    return {name: change_bytes(base.files[name], draw)}


def structure(base: Base, draw: random.Random) -> dict[str, bytes]:
    """Change HDF5's own bytes, and make all digests again."""
    name = draw.choice(base.shards)
    data = base.files[name]
    for _ in range(draw.choice((1, 1, 2, 4))):
        data = change_bytes(data, draw, base.structure[name])
    return with_digests(base, name, data, draw)


def cut_off(base: Base, draw: random.Random) -> dict[str, bytes]:
    """Make a file shorter or longer, and everything else agree with that."""
    name = draw.choice(base.shards)
    data = base.files[name]
    data = data[: draw.randrange(len(data))] if draw.random() < 0.6 else data + bytes(draw.choice((1, 4096, 200_000)))
    return with_digests(base, name, data, draw)


def with_digests(base: Base, name: str, data: bytes, draw: random.Random) -> dict[str, bytes]:
    old = base.files[name + ".digests"]
    parts = old[_HEADER + 8 * -(-len(base.files[name]) // (128 << 10)) :]
    head = old[:8] + struct.pack("<Q", len(data)) + old[16:_HEADER]
    digests = np.asarray(digest_blocks(memoryview(data)), dtype="<u8").tobytes()
    of_file = head + digests + parts
    return {name: data, name + ".digests": of_file} | with_table(base, name, of_file, draw, len(data))


def index(base: Base, draw: random.Random) -> dict[str, bytes]:
    return {"index.h5": change_bytes(base.files["index.h5"], draw)} if "index.h5" in base.files else deep(base, draw)


WAYS: tuple[tuple[Callable[[Base, random.Random], dict[str, bytes]], int], ...] = (
    (manifest_tree, 50),
    (manifest_bytes, 10),
    (deep, 1),
    (table, 12),
    (shard, 6),
    (structure, 16),
    (cut_off, 3),
    (index, 2),
)


# ---- what must hold


class TooSlow(BaseException):
    """A case took too long. Not an Exception, so that no handler takes it for damage."""


def run_case(bases: list[Base], seed: int) -> tuple[str, str]:
    """Run a case; returns (what was done, what became of it). Raises AssertionError for what must not happen."""
    draw = random.Random(seed)
    base = draw.choice(bases)
    way = draw.choices([name for name, _ in WAYS], [weight for _, weight in WAYS])[0]
    changed = way(base, draw)
    for name, data in changed.items():
        base.put(name, data)
    where = f"{base.name}: {way.__name__}"
    try:
        size = sum(map(len, base.files.values()))
        before = memory_now()
        outcome = look(base, draw.random() < 0.05)
        grown = peak() - before - size
        assert grown <= MEMORY, f"{where}: {grown >> 20} MiB"
        return where, outcome
    except AssertionError as error:
        raise AssertionError(f"{where}: {error}") from error
    finally:
        for name in changed:
            base.put(name, base.files[name])


def look(base: Base, also_resume: bool) -> str:
    pieces = [
        TensorShard(shard.name, shard.shape, shard.dtype, shard.offset, torch.full_like(shard.local, 77))
        for shard in whole(base.tensors)
    ]
    found: str | None = None
    try:
        within_time(lambda: load_step(base.directory, base.step, pieces, alone()))
    except CheckpointError as error:
        found = str(error)
        assert "MemoryError" not in found, found
        assert "\n" not in found, found
        assert len(found) < 20_000, f"a line of {len(found)} characters"
    else:
        for piece in pieces:
            assert same_bits(piece.local, base.tensors[piece.name]), f"{piece.name} has other values"
    problems = within_time(lambda: verify_step(base.directory, base.step))
    if found is not None:
        assert problems, f"verify finds nothing, and load says: {found}"
    if also_resume and base.tensors.keys() == tensors(1).keys():
        resumed = within_time(lambda: resume_from_checkpoint(base.directory, "auto", pieces, alone()))
        assert resumed is not None
        same = tensors(resumed.step)
        assert all(same_bits(piece.local, same[piece.name]) for piece in pieces), "resume gives other values"
    return "refused" if found else "as saved, and found" if problems else "as saved"


def within_time(work: Callable[[], Any]) -> Any:
    """Call `work` for at most SECONDS of this process's time, whatever else the machine does."""

    def late(number: int, frame: object) -> None:
        raise TooSlow

    signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    try:
        return work()
    except TooSlow as error:
        raise AssertionError(f"more than {SECONDS} s") from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)


def limit_case(seconds: float = LIMIT) -> None:
    """End the process with a traceback unless this is called again within so many seconds.

    A thread of faulthandler's own watches: signal handlers and Python's threads wait while C code holds the
    interpreter.
    """
    faulthandler.dump_traceback_later(seconds, exit=True)


def memory_now() -> int:
    """Return the resident bytes, and count the peak from now on (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) << 10


def main() -> None:
    """Print JSON: the number of cases by outcome, and the failures with their seeds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("where", type=Path)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    faulthandler.enable()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    bases = make_bases(arguments.where)
    for base in bases:
        assert look(base, True) == "as saved", base.name
    now = _status("VmSize") + (4 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (now, now))
    counts: dict[str, int] = {}
    failures, started = [], time.monotonic()
    for seed in range(arguments.first, arguments.first + arguments.cases):
        os.write(2, f"\r{seed} ".encode())
        limit_case()
        try:
            where, outcome = run_case(bases, seed)
            key = f"{where.partition(': ')[2]}: {outcome}"
            counts[key] = counts.get(key, 0) + 1
        except Exception as error:
            failures.append([seed, f"{type(error).__name__}: {error}"[:500]])
            if len(failures) >= 50:
                break
    faulthandler.cancel_dump_traceback_later()
    print(json.dumps({"counts": counts, "failures": failures, "seconds": time.monotonic() - started}))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
