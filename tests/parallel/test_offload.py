"""Offload: the same numbers to the bit, and the memory really is somewhere else."""

from __future__ import annotations

import ctypes
import gc
import re
import resource
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from drawn import draw
from outcome import RATES, Held, Outcome, engine_steps, held
from plain_setup import Layout, engine_of, global_batch, model, share
from torch import nn

from hpc_train._torch.rehearsal import MemorylessMode, storage_address, tensors_in
from hpc_train.checkpoint import load_step, save_step
from hpc_train.config.compose import compose
from hpc_train.config.model import TransformerConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import Engine, MicroBatch, StepBatch, World
from hpc_train.models.registry import build_model as build_model
from hpc_train.parallel.apply import build
from hpc_train.parallel.memory import parameter_offload
from hpc_train.parallel.memory.parameter_offload import FileMemory, OffloadedOptimizer, is_memory_file_system
from hpc_train.parallel.rules.check import check_support
from hpc_train.testing import run_ranks
from hpc_train.training.optimizer import make_optimizer

PLACES = {
    "optimizer in a file": ("parallel.offload.optimizer=file",),
    "optimizer in CPU memory": ("parallel.offload.optimizer=cpu",),
    "parameters in a file": ("parallel.offload.parameters=file",),
    "parameters in CPU memory": ("parallel.offload.parameters=cpu",),
    "both in files": ("parallel.offload.optimizer=file", "parallel.offload.parameters=file"),
}
LAYOUTS = {
    "zero1-3": Layout(3, ("parallel=zero1",)),
    "zero2-2x2": Layout(4, ("parallel=zero2", "parallel.dp_replicate=2", "parallel.dp_shard=2")),
    "zero3-3": Layout(3, ("parallel=fsdp",)),
}
KINDS = {"zero1-3": "untied", "zero2-2x2": "half_frozen", "zero3-3": "half_frozen"}
"""The model of each layout."""


def _configs(layout: Layout, folder: Path) -> dict[str, RunConfig]:
    where = f"parallel.offload.dir={folder}"
    return {
        name: layout.config(*options, *([where] if any("file" in option for option in options) else []))
        for name, options in {"none": (), **PLACES}.items()
    }


def _in_every_place(world: World, kind: str, configs: dict[str, RunConfig], folder: Path) -> dict[str, Outcome]:
    seen = {
        name: engine_steps(engine_of(kind, config, world), world, config, kind, "two", (0, 1))
        for name, config in configs.items()
    }
    assert list(folder.iterdir()) == [], "the files have no name that could be left behind"
    return seen


def _same(got: Outcome, wanted: Outcome) -> None:
    assert (got.losses, got.norms) == (wanted.losses, wanted.norms)
    pairs = [(got.state, wanted.state), *zip(got.gradients, wanted.gradients, strict=True)]
    for mine, theirs in pairs:
        assert_same_bits(mine, theirs)


def assert_same_bits(got: list[Held], wanted: list[Held]) -> None:
    """The same rectangles with the same values."""
    assert [(h.name, h.offset, h.replica) for h in got] == [(h.name, h.offset, h.replica) for h in wanted]
    for mine, theirs in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(mine.local, theirs.local)


@pytest.mark.parametrize("name", draw(LAYOUTS, ["zero2-2x2", "zero3-3"]))
def test_offload_changes_no_bit(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    configs = _configs(layout, tmp_path)
    parallel = configs["none"].parallel
    for rank in run_ranks(_in_every_place, layout.ranks, KINDS[name], configs, tmp_path, parallel=parallel):
        for place in PLACES:
            _same(rank[place], rank["none"])


def _saved(world: World, config: RunConfig, folder: Path) -> list[Held]:
    engine = engine_of("untied", config, world)
    engine_steps(engine, world, config, "untied", "one", (0,))
    save_step(folder, 1, engine.shards(), {}, world).wait()
    return _next_step(engine, world)


def _resumed(world: World, config: RunConfig, folder: Path) -> list[Held]:
    engine = engine_of("untied", config, world)
    load_step(folder, 1, engine.shards(), world)
    return _next_step(engine, world)


def _next_step(engine: Engine, world: World) -> list[Held]:
    engine.forward_backward(share(global_batch("untied", 1), world))
    engine.update(RATES[1])
    return held(engine.shards())


def test_a_checkpoint_moves_into_files_and_out_of_them(tmp_path: Path) -> None:
    layout = LAYOUTS["zero3-3"]
    configs = _configs(layout, tmp_path)
    memory, files = configs["none"], configs["both in files"]
    for source, target in ((memory, files), (files, memory)):
        folder = tmp_path / f"saved-{source is files}"
        wanted = run_ranks(_saved, 3, source, folder, parallel=source.parallel)
        got = run_ranks(_resumed, 3, target, folder, parallel=target.parallel)
        for mine, theirs in zip(got, wanted, strict=True):
            assert_same_bits(mine, theirs)


LARGE = partial(
    TransformerConfig, name="large", vocab_size=2048, layers=4, hidden=256, heads=4, feed_forward=1024, init_std=0.02
)


def _large(world: World, config: RunConfig) -> Engine:
    with torch.device("meta"):
        module = build_model(LARGE())
    return build(module, lambda split: make_optimizer(split, config.optim), config, world)


def _mappings() -> dict[str, int]:
    """Bytes of this process's memory by kind, and of them those of offload's files."""
    totals = {"Anonymous": 0, "file Size": 0, "file Rss": 0, "file Anonymous": 0}
    ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            ours = "hpc_train-offload-" in line or re.search(r"/#\d+ \(deleted\)$", line) is not None
        elif match := re.match(r"^(Size|Rss|Anonymous): +(\d+) kB", line):
            name, size = match[1], int(match[2]) * 1024
            totals["Anonymous"] += size if name == "Anonymous" else 0
            totals[f"file {name}"] += size if ours else 0
    return totals


def _now() -> dict[str, int]:
    """What this process really needs: garbage and the allocator's free pages are given back first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _mappings()


def _memory(world: World, config: RunConfig) -> tuple[int, int, dict[str, int]]:
    """(bytes of this rank's parameters, anonymous memory that the engine took, all its memory after two steps)."""
    before = _now()["Anonymous"]
    engine = _large(world, config)
    grown = _now()["Anonymous"] - before
    tokens = torch.arange(64).view(2, 32)
    for _ in range(2):
        engine.forward_backward(StepBatch([MicroBatch(tokens, tokens)]))
        assert engine.update(1e-3)
    parameters = sum(piece.local.nbytes for piece in engine.shards() if not piece.name.startswith("optim."))
    return parameters, grown, _now()


STATES = {"optimizer in a file": 2, "parameters in a file": 1, "both in files": 3}
"""What goes into files, in multiples of the bytes of the parameters; without offload all three are in memory."""


@pytest.mark.parametrize("place", draw(STATES, ["both in files"]))
def test_what_is_in_files_is_in_no_anonymous_memory(place: str, tmp_path: Path) -> None:
    where = (f"parallel.offload.dir={tmp_path}", "train.global_batch=8", "model=llama_tiny")
    config = compose(("parallel=fsdp", *PLACES[place], *where))
    for parameters, grown, after in run_ranks(_memory, 2, config, parallel=config.parallel):
        assert abs(grown - (3 - STATES[place]) * parameters) < parameters / 3
        assert after["file Size"] >= STATES[place] * parameters
        assert after["file Anonymous"] == 0
        assert after["file Rss"] < after["file Size"] / 50, "the pages of what was updated are given back"


def test_without_offload_all_of_it_is_in_anonymous_memory() -> None:
    config = compose(("parallel=fsdp", "train.global_batch=8", "model=llama_tiny"))
    for parameters, grown, after in run_ranks(_memory, 2, config, parallel=config.parallel):
        assert abs(grown - 3 * parameters) < parameters / 3
        assert after["file Size"] == 0


def _updated(world: World, apart: bool, folder: Path | None) -> list[Held]:
    """Two updates by a PlacedOptimizer of small parts; apart: on another device, as torch sees it."""
    config = LAYOUTS["zero3-3"].config()
    files = FileMemory(str(folder)) if folder else None

    def place(split: nn.Module) -> torch.optim.Optimizer:
        device = torch.device("cpu:0" if apart else "cpu")
        return OffloadedOptimizer(make_optimizer(split, config.optim), device, files, files is not None, part_mib=1e-3)

    engine = build(model("untied"), place, config, world)
    return engine_steps(engine, world, config, "untied", "one", (0, 1)).state


def test_parameters_that_live_elsewhere_get_the_same_update(tmp_path: Path) -> None:
    def update_in_each_place(world: World) -> tuple[list[Held], list[list[Held]]]:
        return _updated(world, False, None), [_updated(world, True, folder) for folder in (None, tmp_path)]

    for wanted, others in run_ranks(update_in_each_place, 3, parallel=LAYOUTS["zero3-3"].config().parallel):
        for found in others:
            assert_same_bits(found, wanted)


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    files = FileMemory(str(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))  # the kernel refuses as it does where no room is left
    try:
        with pytest.raises(UserError, match=f"parallel.offload.dir={tmp_path}: File too large, for 4 MiB more") as said:
            files.copy_to_file(torch.zeros(2**20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(said.value)


def test_a_file_keeps_values_whose_pages_were_given_back(tmp_path: Path) -> None:
    files = FileMemory(str(tmp_path))
    values = [torch.randn(1000 + size, dtype=dtype) for size in range(3) for dtype in (torch.float32, torch.float64)]
    copies = [files.copy_to_file(value) for value in values]
    for copy, value in zip(copies, values, strict=True):
        torch.testing.assert_close(copy, value, rtol=0, atol=0)
        copy.add_(1)
        files.release_pages(copy)
    for copy, value in zip(copies, values, strict=True):
        torch.testing.assert_close(copy, value + 1, rtol=0, atol=0)
    assert not files.contains(values[0])


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="absent: no such folder on this node"):
        FileMemory(str(tmp_path / "absent"))


def test_a_file_system_in_memory_is_known(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"1 0 8:0 / / rw - ext4 /dev/sda rw\n2 1 0:1 / {tmp_path}/a rw - tmpfs tmpfs rw\n"
        f"3 2 8:1 / {tmp_path}/a/b rw - xfs /dev/sdb rw\n"
    )
    assert is_memory_file_system(tmp_path / "a" / "c", mounts)
    assert not is_memory_file_system(tmp_path / "a" / "b" / "c", mounts)
    assert not is_memory_file_system(tmp_path / "ab", mounts)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("parallel=ddp", "parallel.offload.optimizer=cpu"), "parallel.offload.optimizer=cpu: only what the zero"),
        (("parallel=ddp", "parallel.offload.parameters=file"), "parallel.offload.parameters=file: only what the zero"),
        (("parallel=fsdp", "parallel.offload.dir=/tmp"), "parallel.offload.dir=/tmp: has no effect, nothing is"),
        (
            ("parallel=fsdp", "parallel.offload.dir=/tmp", "parallel.offload.optimizer=cpu"),
            "parallel.offload.dir=/tmp: has no effect",
        ),
    ],
)
def test_an_offload_without_effect_is_refused(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        check_support(compose(("model=llama_tiny", *overrides)), 2)
    assert "\n" not in str(caught.value)


GPU = torch.device("cuda", 0)
"""A device that Pretending knows only by name, so its memory is told apart from the host's on any machine."""


@pytest.mark.parametrize("optimizer", ["none", "cpu"])
@pytest.mark.parametrize("parameters", ["none", "cpu"])
def test_a_gpu_holds_nothing_of_what_is_offloaded(parameters: str, optimizer: str) -> None:
    """No parameter copy and no optimizer state is on the GPU: live memory by device, before and after updates."""
    made = (f"parallel.offload.parameters={parameters}", f"parallel.offload.optimizer={optimizer}")
    config = compose(("parallel=fsdp", "optim.implementation=foreach", *made))
    held: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def see(out: Any, _: Any) -> None:
        for tensor in tensors_in(out):
            if tensor.device.type == "cuda":
                storage = tensor.untyped_storage()
                held[storage_address(storage)] = weakref.ref(storage), storage.nbytes()

    def on_gpu() -> int:
        gc.collect()
        return sum(size for storage, size in held.values() if storage() is not None)

    world = cast(World, SimpleNamespace(device=GPU))
    with MemorylessMode(see):
        home = parameter_offload.get_parameter_device(config, GPU)
        part = nn.Module()
        part.weight = nn.Parameter(torch.zeros(256, 64, device=home))
        made_optimizer = parameter_offload.offload_optimizer(
            lambda split: make_optimizer(split, config.optim), config, world, None
        )(part)
        size = part.weight.nbytes
        assert on_gpu() == (size if parameters == "none" else 0)
        if parameters == "none" and optimizer == "cpu":
            return  # a CPU-only torch cannot fake the copies of an update
        part.weight.grad = torch.zeros(256, 64, device=home)
        made_optimizer.step()
        made_optimizer.zero_grad()
        assert on_gpu() >= 3 * size if parameters == "none" else on_gpu() == 0
