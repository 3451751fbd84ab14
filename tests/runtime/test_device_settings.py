"""What a rank sets before it uses its device, and when it collects garbage."""

from __future__ import annotations

import ctypes
import gc
import platform
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hpc_train.config.compose import compose
from hpc_train.errors import UserError
from hpc_train.garbage_collection import collect_at_steps
from hpc_train.interfaces import Task, World
from hpc_train.runtime.device_settings import (
    LAZY_GLOO_FROM,
    choose_allocator_settings,
    choose_gloo_settings,
    choose_group_options,
    keep_memory_of_steps,
    separate_ranks_on_one_gpu,
)
from hpc_train.step_clock import StepPart
from hpc_train.testing import run_ranks
from hpc_train.training.records.nvtx_ranges import PartRanges

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Cycle:
    """Only a collection frees it."""

    def __init__(self) -> None:
        self.me = self


def _collected_at(every: int, steps: int) -> list[int]:
    """The steps after which something was collected."""
    seen: list[int] = []
    now = 0

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            seen.append(now)

    gc.collect()
    gc.callbacks.append(note)
    try:
        with collect_at_steps(every) as end_step:
            seen.clear()
            for now in range(1, steps + 1):
                waste = [Cycle() for _ in range(2000)]
                del waste
                end_step(now)
    finally:
        gc.callbacks.remove(note)
    return seen


def test_garbage_is_collected_at_the_same_steps_on_every_rank() -> None:
    frozen = gc.get_freeze_count()
    assert _collected_at(5, 14) == [5, 10]
    assert gc.isenabled()
    assert (gc.get_freeze_count() > 0) == (frozen > 0)


def test_python_collects_when_it_wants_to_with_0() -> None:
    with collect_at_steps(0) as end_step:
        assert gc.isenabled()
        end_step(1)


def test_the_collector_is_given_back_where_a_step_fails() -> None:
    with pytest.raises(ValueError, match="step"), collect_at_steps(3):
        raise ValueError("step")
    assert gc.isenabled()


def _connections(world: World) -> tuple[int, int]:
    def sockets() -> int:
        links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return sum(link.startswith("socket:") for link in links)

    def settled() -> int:
        """Count the sockets once no more come: a peer may have connected that this rank has not accepted yet."""
        count, since = sockets(), time.monotonic()
        while time.monotonic() < since + 0.3:
            if sockets() != count:
                count, since = sockets(), time.monotonic()
            time.sleep(0.02)
        return count

    dist.barrier()
    before = settled()
    group = dist.new_group(list(range(world.size)))
    made = settled() - before
    dist.barrier()  # none exchanges numbers before all have counted
    numbers = torch.full((1000,), float(world.rank))
    dist.all_reduce(numbers, group=group)
    assert numbers[0] == sum(range(world.size))
    return made, settled() - before


def test_ranks_of_a_large_job_connect_when_they_exchange_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group connects all with all, unless told otherwise: at 2,048 ranks, 2,047 sockets a rank and group."""
    ranks = 6
    assert min(made for made, _ in run_ranks(_connections, ranks)) >= ranks - 1
    (setting,) = choose_gloo_settings(LAZY_GLOO_FROM)
    monkeypatch.setenv(setting.name, setting.value)
    for made, used in run_ranks(_connections, ranks):
        assert made <= 1
        assert used < ranks - 1
    assert not choose_gloo_settings(LAZY_GLOO_FROM - 1)


def test_the_allocator_grows_its_segments_unless_the_user_or_the_site_says_otherwise() -> None:
    assert not choose_allocator_settings(CPU, {})
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert not choose_allocator_settings(GPU, {name: "max_split_size_mb:128"})
    wanted = [] if torch.version.hip else ["expandable_segments:True"]
    assert [setting.value for setting in choose_allocator_settings(GPU, {})] == wanted


def test_a_group_is_bound_to_its_gpu_where_torch_splits_both_halves() -> None:
    assert choose_group_options(CPU) == {}
    bound = torch.__version__ >= torch.torch_version.TorchVersion("2.13")
    assert choose_group_options(GPU) == ({"device_id": GPU} if bound else {})


def test_products_of_float32_are_a_setting() -> None:
    with pytest.raises(UserError, match=r"precision.matmul=high: is for products of float32"):
        compose(["precision=fp64", "precision.matmul=high"])
    assert compose([]).precision.matmul == "highest"


class Written:
    """Stands for torch.cuda.nvtx, which needs CUDA."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.seen: list[str] = []

    def range_push(self, msg: str) -> None:
        self.open.append(msg)
        self.seen.append(msg)

    def range_pop(self) -> None:
        self.open.pop()


def test_one_range_is_open_at_a_time() -> None:
    ranges = Written()
    marks = PartRanges(ranges)
    for part in (StepPart.FORWARD, StepPart.BACKWARD, StepPart.REST, StepPart.CLIP, StepPart.UPDATE):
        marks.enter(part)
        assert len(ranges.open) == (part is not StepPart.REST)
    marks.enter(StepPart.REST)
    assert ranges.seen == ["forward", "backward", "clip", "update"]
    assert not ranges.open


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have allocators of their own")
@pytest.mark.parametrize(
    ("device", "env", "changed"),
    [
        (CPU, {"GLIBC_TUNABLES": "glibc.cpu.x86_shstk=on"}, True),
        (GPU, {}, False),
        (CPU, {"MALLOC_TRIM_THRESHOLD_": "131072"}, False),
        (CPU, {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}, False),
        (CPU, {"LD_PRELOAD": "libjemalloc.so"}, False),
    ],
)
def test_a_rank_on_a_cpu_keeps_what_a_step_frees_unless_the_user_has_set_otherwise(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, env: dict[str, str], changed: bool
) -> None:
    library, seen = ctypes.CDLL(None), []

    def mallopt(parameter: int, value: int) -> int:
        seen.append((parameter, value))
        return int(library.mallopt(parameter, value))

    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=mallopt))
    keep_memory_of_steps(device, env)
    assert seen == [(-3, 32 << 20), (-1, 1 << 30)] * changed


def _make_task(process: int, store: dist.Store, host: str = "node1") -> Task:
    return Task(
        process=process, processes=4, local=process, node=0, nodes=1, launcher="testing", host=host, store=store
    )


def test_ranks_that_share_a_gpu_are_hosts_of_their_own_for_nccl(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first rank on a GPU stays on its host. When ranks start again on the same store, nothing changes."""
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid=f"gpu-{device.index}"))
    store = dist.HashStore()
    for _ in range(2):
        ids = []
        for process, index in enumerate((0, 1, 0, 1)):
            env: dict[str, str] = {}
            separate_ranks_on_one_gpu(_make_task(process, store), torch.device("cuda", index), env)
            ids.append(env.get("NCCL_HOSTID"))
        assert ids == [None, None, "node1-2", "node1-3"]
    assert "several ranks share a GPU" in caplog.text
    env = {}
    separate_ranks_on_one_gpu(_make_task(3, store, "node2"), torch.device("cuda", 0), env)
    assert not env, "the same number on another node is another GPU"
