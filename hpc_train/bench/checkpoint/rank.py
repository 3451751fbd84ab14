"""Run one rank of `bench checkpoint`: time all operations of all sides in turn, and write the result."""

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

from hpc_train.bench.checkpoint import resharding, sides
from hpc_train.bench.checkpoint.checkpoint import (
    LOAD_COLD,
    LOAD_WARM,
    OPERATIONS,
    RAW_DIRECT,
    RESHARDINGS,
    SAVE,
    STALL,
    VERIFY,
    CheckpointBenchOptions,
    Samples,
    SettingResult,
    read_load_average,
    summarise_operations,
)
from hpc_train.bench.checkpoint.sides import (
    CheckpointSide,
    OperationCost,
    Tensors,
    bytes_of_tensor,
    combine_ranks,
    count_bytes,
    drop_page_cache,
    gather_values_of_ranks,
    make_tensors,
    time_operation,
    wait_for_all,
)
from hpc_train.checkpoint.storage.file_system import detect_file_system
from hpc_train.errors import EXIT_DONE
from hpc_train.interfaces import World

SETTING_FILE = "setting.json"
_RoundSample = dict[str, dict[str, list[OperationCost]]]
"""Costs by operation, side and round."""
_SAME_LAYOUT_OPERATIONS = tuple(operation for operation in OPERATIONS if operation not in RESHARDINGS)


def main(rank: int, ranks: int, options: CheckpointBenchOptions, directory: Path, meeting: Path) -> int:
    """Measure in the empty folder `directory`; rank 0 writes the result to `meeting`. Returns the exit code."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # the other libraries warn about how they are called
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    gc.freeze()  # so that the collection before each operation does not scan all modules
    with _join_ranks(rank, ranks, meeting) as world:
        setting = measure_operations(world, options, directory)
        if rank == 0:
            (meeting / SETTING_FILE).write_text(json.dumps(asdict(setting)))
    return EXIT_DONE


def measure_operations(world: World, options: CheckpointBenchOptions, directory: Path) -> SettingResult:
    """Run all rounds; every rank gets the result. A collective."""
    before = read_load_average()
    setting = _measure_same_layout(world, options, directory)
    moved = resharding.measure_resharding(world, options, directory)
    return replace(setting, lines=setting.lines + moved, load_average=(before, read_load_average()))


def _measure_same_layout(world: World, options: CheckpointBenchOptions, directory: Path) -> SettingResult:
    """Time saves, and loads by the ranks that saved; frees all tensors at the end."""
    chosen = options.sides if any(name in _SAME_LAYOUT_OPERATIONS for name in options.operations) else ()
    share = int(options.gib * 2**30) // world.size
    tensors = max(1, options.tensors // world.size) if options.tensors else None
    state = make_tensors(share, tensors, world.rank)
    working, missing = _make_sides(directory, world, state, chosen)
    rounds = _Rounds(world, directory, working, options.operations)
    rounds.warm_up(state)
    for number in range(options.rounds):
        rounds.take(number)
    gib = float(gather_values_of_ranks(count_bytes(state)).sum()) / 2**30
    return SettingResult(
        directory=str(directory.parent),
        file_system=detect_file_system(directory).kind,
        ranks=world.size,
        tensors=len(state) * world.size,
        gib=gib,
        lines=summarise_operations(rounds.measured(), gib),
        missing=missing,
        load_average=(0.0, 0.0),
    )


class _Rounds:
    """Runs rounds of all sides and collects the costs."""

    def __init__(self, world: World, directory: Path, sides: list[CheckpointSide], operations: tuple[str, ...]) -> None:
        self._world, self._directory, self._sides = world, directory, sides
        self._taken: _RoundSample = {operation: {} for operation in _SAME_LAYOUT_OPERATIONS if operation in operations}

    def warm_up(self, state: Tensors) -> None:
        """Run every side once, untimed, and check that it loads what it saved."""
        for side in self._sides:
            for save in (_get_background_save(side), side.save):
                if save is not None:
                    self._empty(side)
                    save()
            wait_for_all()
            if side.load is not None and _includes_loads(self._taken):
                _check_load(side, state)

    def take(self, number: int) -> None:
        """Run every operation of every side once, in an order that differs from round to round."""
        for operation in self._taken:
            able = [side for side in self._sides if _name_operation(side, operation) is not None]
            random.Random(f"{number} {operation}").shuffle(able)
            for side in able:
                self._prepare(side, operation)
                self._taken[operation].setdefault(side.name, []).append(self._time_operation(side, operation))

    def measured(self) -> dict[str, dict[str, Samples]]:
        """Combine the costs of all ranks into samples by operation and side. A collective."""
        return {
            operation: {side.name: combine_ranks(by_side[side.name]) for side in self._sides if side.name in by_side}
            for operation, by_side in self._taken.items()
            if by_side
        }

    def _time_operation(self, side: CheckpointSide, operation: str) -> OperationCost:
        """Time one operation; the rest of an asynchronous save is waited for, untimed."""
        work = _name_operation(side, operation)
        assert work is not None
        return time_operation(work, lambda rest: rest() if operation == STALL else None)

    def _prepare(self, side: CheckpointSide, operation: str) -> None:
        if operation in (SAVE, STALL):
            self._empty(side)
        elif operation in (LOAD_COLD, LOAD_WARM, VERIFY):
            wait_for_all()
            if self._world.rank == 0:
                drop_page_cache(self._get_folder(side)) if operation == LOAD_COLD else _read_into_page_cache(
                    self._get_folder(side)
                )

    def _empty(self, side: CheckpointSide) -> None:
        wait_for_all()
        if self._world.rank == 0:
            shutil.rmtree(self._get_folder(side), ignore_errors=True)
            self._get_folder(side).mkdir()
        wait_for_all()

    def _get_folder(self, side: CheckpointSide) -> Path:
        return self._directory / side.name


def _includes_loads(operations: Container[str]) -> bool:
    return LOAD_COLD in operations or LOAD_WARM in operations


def _name_operation(side: CheckpointSide, operation: str) -> Callable[[], object] | None:
    by_operation: dict[str, Callable[[], object] | None] = {
        SAVE: side.save,
        STALL: side.begin,
        LOAD_COLD: side.load,
        LOAD_WARM: None if side.name == RAW_DIRECT else side.load,  # direct reads never use the page cache
        VERIFY: side.verify,
    }
    return by_operation[operation]


def _get_background_save(side: CheckpointSide) -> Callable[[], object] | None:
    begin = side.begin
    return None if begin is None else lambda: begin()()


def _check_load(side: CheckpointSide, state: Tensors) -> None:
    """Check that a side loads what it saved."""
    assert side.load is not None
    saved = [xxh3_64_intdigest(bytes_of_tensor(tensor)) for tensor in state.values()]
    for tensor in state.values() if side.name != RAW_DIRECT else ():  # which loads into a buffer of its own
        tensor.zero_()
    side.load()
    for (name, tensor), digest in zip(state.items(), saved, strict=True):
        assert xxh3_64_intdigest(bytes_of_tensor(tensor)) == digest, (side.name, name)


def _make_sides(
    directory: Path, world: World, state: Tensors, wanted: tuple[str, ...]
) -> tuple[list[CheckpointSide], dict[str, str]]:
    """Return the chosen sides that work here, and the reasons why others do not."""
    working, missing = [], {}
    ways: list[tuple[str, Callable[[Path], CheckpointSide]]] = [
        ("hpc_train", lambda at: sides.make_hpc_train(at, world, state)),
        ("raw_direct", lambda at: sides.make_raw_direct(at, world.rank, state)),
        ("raw_buffered", lambda at: sides.make_raw_buffered(at, world.rank, state)),
        ("torch_save", lambda at: sides.make_torch_save(at, world.rank, state)),
        ("safetensors", lambda at: sides.make_safetensors(at, world.rank, state)),
        ("dcp", lambda at: sides.make_dcp(at, world, state)),
        ("dcp_async", lambda at: sides.make_dcp_async(at, world, state, cached=False)),
        ("dcp_async_cached", lambda at: sides.make_dcp_async(at, world, state, cached=True)),
    ]
    for name, make in ways:
        if name not in wanted:
            continue
        (directory / name).mkdir(exist_ok=True)
        try:
            working.append(make(directory / name))
        except (OSError, ImportError) as error:
            missing[name] = str(error)
    return working, missing


def _read_into_page_cache(folder: Path) -> None:
    """Read all files below a folder into the page cache."""
    block = bytearray(sides.CHUNK_BYTES)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass


@contextmanager
def _join_ranks(rank: int, ranks: int, meeting: Path) -> Iterator[World]:
    """Join the local ranks into a job; yields its world, without a mesh, which checkpoints do not use."""
    with ExitStack() as stack:
        if ranks > 1:
            store = dist.FileStore(str(meeting / "store"), ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
            stack.callback(dist.destroy_process_group)
        yield World(
            rank=rank,
            size=ranks,
            local_rank=rank,
            device=torch.device("cpu"),
            mesh=cast(Any, None),
            dp_index=rank,
            dp_size=ranks,
        )


if __name__ == "__main__":
    _rank, _ranks, _options, _directory, _meeting = sys.argv[1:]
    sys.exit(
        main(int(_rank), int(_ranks), CheckpointBenchOptions(**json.loads(_options)), Path(_directory), Path(_meeting))
    )
