"""Every rank gets its own whole cores, next to its GPU where it has one; and a process really is held to them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.placement.node.cpu_binding import (
    CpuBinding,
    NodeProcessors,
    RankSeat,
    assign_cpus,
    bind_process,
    parse_cpus,
    prefer_numa_memory,
    read_processors,
)
from hpc_train.units import format_ranges

GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236, "ppc64le": 260}


def machine(sockets: int, cores: int, threads: int) -> NodeProcessors:
    """`cores` a socket; the second hardware threads are numbered after all first ones, as Linux does on x86."""
    total = sockets * cores
    siblings = {cpu: frozenset(range(cpu % total, total * threads, total)) for cpu in range(total * threads)}
    numa = {node: frozenset(cpu for cpu in siblings if cpu % total // cores == node) for node in range(sockets)}
    return NodeProcessors(numa, siblings)


def seats(count: int, allowed: str, *near: str) -> list[RankSeat]:
    return [RankSeat(parse_cpus(allowed), parse_cpus(near[index]) if near else frozenset()) for index in range(count)]


def lists(bindings: list[CpuBinding]) -> list[str]:
    return [format_ranges(binding.cpus) for binding in bindings]


def test_without_gpus_the_node_is_shared_out_by_whole_cores() -> None:
    found = assign_cpus(seats(4, "0-31"), machine(2, 8, 2))
    assert lists(found) == ["0-3,16-19", "4-7,20-23", "8-11,24-27", "12-15,28-31"]
    assert [(it.cores, it.memory) for it in found] == [(4, 0), (4, 0), (4, 1), (4, 1)]


def test_a_rank_stays_next_to_its_gpu() -> None:
    near = ["8-15,24-31", "8-15,24-31", "0-7,16-23", "0-7,16-23"]
    found = assign_cpus(seats(4, "0-31", *near), machine(2, 8, 2))
    assert lists(found) == ["8-11,24-27", "12-15,28-31", "0-3,16-19", "4-7,20-23"]
    assert [it.memory for it in found] == [1, 1, 0, 0]
    assert {it.reason for it in found} == {"next to its GPU"}


def test_only_what_the_launcher_allows_is_shared() -> None:
    found = assign_cpus(seats(2, "2-5", "0-7", "0-7"), machine(2, 8, 1))
    assert lists(found) == ["2-3", "4-5"]


def test_uneven_shares_differ_by_one_core() -> None:
    found = assign_cpus(seats(3, "0-7"), machine(1, 8, 1))
    assert lists(found) == ["0-1", "2-4", "5-7"]


def test_hardware_threads_are_shared_where_cores_are_too_few() -> None:
    found = assign_cpus(seats(2, "0-1"), machine(1, 1, 2))
    assert lists(found) == ["0", "1"]
    assert [it.cores for it in found] == [1, 1]


def test_processors_that_are_all_away_from_the_gpu_are_shared_and_said_to_be() -> None:
    found = assign_cpus(seats(2, "0-3", "8-15", "8-15"), machine(2, 8, 1))
    assert lists(found) == ["0-1", "2-3"]
    assert all("no CPU next to the GPU" in it.reason for it in found)


def test_what_the_launcher_has_bound_already_is_left() -> None:
    found = assign_cpus([RankSeat(parse_cpus("0-3")), RankSeat(parse_cpus("4-7"))], machine(1, 8, 1))
    assert [(it.cpus, it.reason) for it in found] == [
        ((), "not bound: the launcher has given each rank its own processors")
    ] * 2


def test_more_ranks_than_processors_are_not_bound() -> None:
    found = assign_cpus(seats(3, "0-1"), machine(1, 2, 1))
    assert {(it.cpus, it.reason) for it in found} == {((), "not bound: 3 ranks share 2 CPUs")}


def test_sets_that_overlap_in_part_are_left() -> None:
    found = assign_cpus([RankSeat(parse_cpus("0-3")), RankSeat(parse_cpus("2-5"))], machine(1, 8, 1))
    assert {it.cpus for it in found} == {()}


def test_one_rank_has_all_that_is_allowed() -> None:
    (only,) = assign_cpus(seats(1, "0-15"), machine(2, 8, 1))
    assert (format_ranges(only.cpus), only.memory) == ("0-15", None)


@given(
    sockets=st.integers(1, 4),
    cores=st.integers(1, 8),
    threads=st.integers(1, 2),
    ranks=st.integers(1, 12),
    gpus=st.booleans(),
)
def test_shares_are_disjoint_near_and_even(sockets: int, cores: int, threads: int, ranks: int, gpus: bool) -> None:
    here = machine(sockets, cores, threads)
    everything = frozenset(here.siblings)
    near = [here.numa[rank % sockets] if gpus else frozenset[int]() for rank in range(ranks)]
    found = assign_cpus([RankSeat(everything, its) for its in near], here)
    if not all(it.cpus for it in found):
        assert all("ranks share" in it.reason for it in found)
        return
    used = [cpu for it in found for cpu in it.cpus]
    assert len(used) == len(set(used))
    assert all(set(it.cpus) <= (its or everything) for it, its in zip(found, near, strict=True))
    for its in set(near):
        sizes = [it.cores for it, of in zip(found, near, strict=True) if of == its]
        assert max(sizes) - min(sizes) <= 1
        assert sum(len(it.cpus) for it, of in zip(found, near, strict=True) if of == its) == len(its or everything)


def test_this_machine_is_read() -> None:
    here = read_processors()
    assert os.sched_getaffinity(0) <= set(here.siblings)
    assert all(cpu in threads for cpu, threads in here.siblings.items())


def test_a_tree_of_sysfs_is_read(tmp_path: Path) -> None:
    for cpu, siblings in ((0, "0,2"), (1, "1,3"), (2, "0,2"), (3, "1,3")):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    for node, cpus in (("node0", "0,2"), ("node1", "1,3"), ("node2", "")):  # the last is memory alone
        (tmp_path / f"sys/devices/system/node/{node}").mkdir(parents=True)
        (tmp_path / f"sys/devices/system/node/{node}/cpulist").write_text(f"{cpus}\n")
    here = read_processors(tmp_path)
    assert here == machine(2, 1, 2)
    assert lists(assign_cpus(seats(2, "0-3"), here)) == ["0,2", "1,3"]


def test_a_machine_that_tells_nothing_is_shared_out_all_the_same(tmp_path: Path) -> None:
    assert lists(assign_cpus(seats(2, "0-3"), read_processors(tmp_path))) == ["0-1", "2-3"]


@given(st.frozensets(st.integers(0, 300)))
def test_lists_of_processors_are_written_and_read(cpus: frozenset[int]) -> None:
    assert parse_cpus(format_ranges(cpus)) == cpus


def masks_of_threads() -> set[str]:
    lines = [(task / "status").read_text().splitlines() for task in Path("/proc/self/task").iterdir()]
    return {line.split()[1] for text in lines for line in text if line.startswith("Cpus_allowed_list")}


def bound_process(cpu: int) -> tuple[set[str], set[str]]:
    """Masks of all threads of a process that had one before it was bound, and of one that came later."""
    stop = threading.Event()
    early = threading.Thread(target=stop.wait)
    early.start()
    bind_process(CpuBinding((cpu,), 1, None, ""))
    bound = masks_of_threads()
    late = threading.Thread(target=stop.wait)
    late.start()
    after = masks_of_threads()
    stop.set()
    return bound, after


@pytest.mark.parametrize("cpu", sorted(os.sched_getaffinity(0)))
def test_a_process_is_held_to_its_processor_with_all_its_threads(cpu: int) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(bound_process, (cpu,)) == ({str(cpu)}, {str(cpu)})


def memory_policy() -> tuple[str | None, int, int]:
    """(what prefer_memory said, mode, mask) of a process that prefers NUMA node 0, as the kernel tells."""
    problem = prefer_numa_memory(0)
    mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(GET_MEMPOLICY[platform.machine()], ctypes.byref(mode), mask, 16 * 64, None, 0)
    return problem, mode.value, mask[0]


def test_memory_is_preferred_where_the_kernel_lets_it() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        problem, mode, mask = pool.apply(memory_policy)
    if problem is None:
        assert (mode, mask) == (1, 1)
    else:
        assert problem in {"Operation not permitted", "Function not implemented"}
        assert mode != 1
