"""One rank of `bench checkpoint`: takes all operations of all sides in turn and leaves what it measured."""

from __future__ import annotations

import gc
import json
import logging
import random
import shutil
import sys
import warnings
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from xxhash import xxh3_64_intdigest

from hpc_train.api import World
from hpc_train.bench.checkpoint import checkpointers, resharding, sides
from hpc_train.bench.checkpoint.meter import Taken, barrier, forget, gathered, of_all, timed
from hpc_train.bench.checkpoint.result import (
    COLD,
    OPERATIONS,
    RAW_DIRECT,
    RESHARDINGS,
    SAVE,
    STALL,
    VERIFY,
    WARM,
    Options,
    Samples,
    Setting,
    lines,
    load_average,
)
from hpc_train.bench.checkpoint.sides import Side
from hpc_train.bench.checkpoint.state import State, bytes_of, flat, make_state
from hpc_train.checkpoint.storage.kind import file_system
from hpc_train.errors import EXIT_DONE

SETTING = "setting.json"
_Taken = dict[str, dict[str, list[Taken]]]
"""By operation, side and round."""
_PLAIN = tuple(operation for operation in OPERATIONS if operation not in RESHARDINGS)


def main(rank: int, ranks: int, options: Options, directory: Path, meeting: Path) -> int:
    """Measure in `directory`, an empty one; rank 0 leaves the result in `meeting`."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # those of the other sides, about how they are called
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    gc.freeze()  # so that collecting before each operation does not look at all modules
    with _together(rank, ranks, meeting) as world:
        setting = measure(world, options, directory)
        if rank == 0:
            (meeting / SETTING).write_text(json.dumps(asdict(setting)))
    return EXIT_DONE


def measure(world: World, options: Options, directory: Path) -> Setting:
    """All rounds; every rank calls it and gets the result."""
    before = load_average()
    setting = _measure_as_saved(world, options, directory)
    moved = resharding.measure(world, options, directory)
    return replace(setting, lines=setting.lines + moved, load_average=(before, load_average()))


def _measure_as_saved(world: World, options: Options, directory: Path) -> Setting:
    """What saves, and what loads on the ranks that saved; nothing of it stays in memory."""
    chosen = options.sides if any(it in _PLAIN for it in options.operations) else ()
    share = int(options.gib * 2**30) // world.size
    tensors = max(1, options.tensors // world.size) if options.tensors else None
    state = make_state(share, tensors, world.rank)
    found, missing = _sides(directory, world, state, chosen)
    rounds = _Rounds(world, directory, found, options.operations)
    rounds.warm_up(state)
    for number in range(options.rounds):
        rounds.take(number)
    gib = float(gathered(bytes_of(state)).sum()) / 2**30
    return Setting(
        directory=str(directory.parent),
        file_system=file_system(directory).kind,
        ranks=world.size,
        tensors=len(state) * world.size,
        gib=gib,
        lines=lines(rounds.measured(), gib),
        missing=missing,
        load_average=(0.0, 0.0),
    )


class _Rounds:
    """The sides, and what was measured so far."""

    def __init__(self, world: World, directory: Path, found: list[Side], operations: tuple[str, ...]) -> None:
        self._world, self._directory, self._sides = world, directory, found
        self._taken: _Taken = {operation: {} for operation in _PLAIN if operation in operations}

    def warm_up(self, state: State) -> None:
        """Every side once, untimed, to see that what it loads is what was saved."""
        for side in self._sides:
            for save in (_both(side), side.save):
                if save is not None:
                    self._empty(side)
                    save()
            barrier()
            if side.load is not None and _loads(self._taken):
                _check(side, state)

    def take(self, number: int) -> None:
        """One round: every operation of every side, each time in another order."""
        for operation in self._taken:
            able = [side for side in self._sides if _work(side, operation) is not None]
            random.Random(f"{number} {operation}").shuffle(able)
            for side in able:
                self._prepare(side, operation)
                self._taken[operation].setdefault(side.name, []).append(self._timed(side, operation))

    def measured(self) -> dict[str, dict[str, Samples]]:
        """By operation and side."""
        return {
            operation: {side.name: of_all(by_side[side.name]) for side in self._sides if side.name in by_side}
            for operation, by_side in self._taken.items()
            if by_side
        }

    def _timed(self, side: Side, operation: str) -> Taken:
        """The rest of an asynchronous save is waited for, untimed."""
        work = _work(side, operation)
        assert work is not None
        return timed(work, lambda rest: rest() if operation == STALL else None)

    def _prepare(self, side: Side, operation: str) -> None:
        if operation in (SAVE, STALL):
            self._empty(side)
        elif operation in (COLD, WARM, VERIFY):
            barrier()
            if self._world.rank == 0:
                forget(self._folder(side)) if operation == COLD else _touch(self._folder(side))

    def _empty(self, side: Side) -> None:
        barrier()
        if self._world.rank == 0:
            shutil.rmtree(self._folder(side), ignore_errors=True)
            self._folder(side).mkdir()
        barrier()

    def _folder(self, side: Side) -> Path:
        return self._directory / side.name


def _loads(operations: Container[str]) -> bool:
    return COLD in operations or WARM in operations


def _work(side: Side, operation: str) -> Callable[[], object] | None:
    by_operation: dict[str, Callable[[], object] | None] = {
        SAVE: side.save,
        STALL: side.begin,
        COLD: side.load,
        WARM: None if side.name == RAW_DIRECT else side.load,  # it would read from the disk again
        VERIFY: side.verify,
    }
    return by_operation[operation]


def _both(side: Side) -> Callable[[], object] | None:
    begin = side.begin
    return None if begin is None else lambda: begin()()


def _check(side: Side, state: State) -> None:
    """That it loads what was saved."""
    assert side.load is not None
    saved = [xxh3_64_intdigest(flat(tensor)) for tensor in state.values()]
    for tensor in state.values() if side.name != RAW_DIRECT else ():  # which loads to a place of its own
        tensor.zero_()
    side.load()
    for (name, tensor), digest in zip(state.items(), saved, strict=True):
        assert xxh3_64_intdigest(flat(tensor)) == digest, (side.name, name)


def _sides(directory: Path, world: World, state: State, wanted: tuple[str, ...]) -> tuple[list[Side], dict[str, str]]:
    """Those that are wanted and work here, and why the others do not."""
    found, missing = [], {}
    ways: list[tuple[str, Callable[[Path], Side]]] = [
        ("hpc_train", lambda at: checkpointers.hpc_train(at, world, state)),
        ("raw_direct", lambda at: sides.raw_direct(at, world.rank, state)),
        ("raw_buffered", lambda at: sides.raw_buffered(at, world.rank, state)),
        ("torch_save", lambda at: sides.torch_save(at, world.rank, state)),
        ("safetensors", lambda at: sides.safetensors(at, world.rank, state)),
        ("dcp", lambda at: checkpointers.torch_dcp(at, world, state)),
        ("dcp_async", lambda at: checkpointers.torch_dcp_async(at, world, state, cached=False)),
        ("dcp_async_cached", lambda at: checkpointers.torch_dcp_async(at, world, state, cached=True)),
    ]
    for name, make in ways:
        if name not in wanted:
            continue
        (directory / name).mkdir(exist_ok=True)
        try:
            found.append(make(directory / name))
        except (OSError, ImportError) as error:
            missing[name] = str(error)
    return found, missing


def _touch(folder: Path) -> None:
    """All files below it, into the page cache."""
    block = bytearray(sides.CHUNK)
    for path in sorted(it for it in folder.rglob("*") if it.is_file()):
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass


@contextmanager
def _together(rank: int, ranks: int, meeting: Path) -> Iterator[World]:
    """A job of processes of this machine; checkpoints never look at a mesh."""
    with ExitStack() as stack:
        if ranks > 1:
            store = dist.FileStore(str(meeting / "store"), ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
            stack.callback(dist.destroy_process_group)
        yield World(rank, ranks, rank, torch.device("cpu"), cast(Any, None), rank, ranks)


if __name__ == "__main__":
    _rank, _ranks, _options, _directory, _meeting = sys.argv[1:]
    sys.exit(main(int(_rank), int(_ranks), Options(**json.loads(_options)), Path(_directory), Path(_meeting)))
