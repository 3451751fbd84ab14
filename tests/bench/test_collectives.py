"""`bench collectives`: its definitions, its data, its own algorithms and its fit. How fast anything is is not asked."""

from __future__ import annotations

import json
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from queue import Queue

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.bench.collectives.backends import OWN_ALGORITHMS, TorchBackend, TorchConnection, is_started_by_mpi
from hpc_train.bench.collectives.cases import (
    UNTOUCHED_VALUE,
    CaseMaker,
    DataPattern,
    MeasurementCell,
    ProbeCell,
    count_wrong_elements,
)
from hpc_train.bench.collectives.collectives import (
    EXIT_WRONG_DATA,
    CollectivesResult,
    LevelFit,
    Measurement,
    make_calibration,
    report_result,
)
from hpc_train.bench.collectives.collectives_output import format_nccl_tests, plot_bandwidths, print_collectives_result
from hpc_train.bench.collectives.definitions import (
    OPERATIONS,
    CollectiveShape,
    compute_algorithm_bandwidth,
    find_operation,
    make_shape,
)
from hpc_train.bench.collectives.measure import BenchJob, fit_latency_bandwidth, measure_with_backends
from hpc_train.bench.collectives.options import CollectivesOptions, parse_size
from hpc_train.bench.collectives.rank_groups import (
    LevelProbe,
    describe_unprobed,
    make_probes,
    make_rank_levels,
)
from hpc_train.cluster.calibration import read_calibration
from hpc_train.config.compose import compose
from hpc_train.config.parallel import AXES, Degrees, ParallelConfig, resolve_degrees
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.placement.fabric import build_levels
from hpc_train.testing import run_ranks
from hpc_train.traffic.rank_groups import WORLD_AXIS, compute_bus_factor, list_groups_of_rank

NAMES = [it.name for it in OPERATIONS]
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "ranks", "size", "seconds", "algbw", "busbw"),
    [
        # By hand from nccl-tests' doc/PERFORMANCE.md: size / time, times 2 (n - 1) / n, (n - 1) / n or 1.
        ("all_reduce", 4, 4_000_000, 0.001, 4e9, 6e9),
        ("all_reduce", 8, 8_000, 0.00001, 8e8, 1.4e9),
        ("all_gather", 4, 4_000_000, 0.001, 4e9, 3e9),
        ("reduce_scatter", 2, 1_000, 0.001, 1e6, 5e5),
        ("all_to_all", 8, 16_000, 0.002, 8e6, 7e6),
        ("broadcast", 8, 16_000, 0.002, 8e6, 8e6),
        ("reduce", 8, 16_000, 0.002, 8e6, 8e6),
        ("send_recv", 8, 16_000, 0.002, 8e6, 8e6),
    ],
)
def test_bandwidths_are_those_of_nccl_tests(
    name: str, ranks: int, size: int, seconds: float, algbw: float, busbw: float
) -> None:
    assert compute_algorithm_bandwidth(size, seconds) == pytest.approx(algbw)
    assert compute_algorithm_bandwidth(size, seconds) * compute_bus_factor(
        find_operation(name).name, ranks
    ) == pytest.approx(busbw)


@pytest.mark.parametrize(
    ("name", "ranks", "size", "count", "sent", "received", "bytes_"),
    [
        ("all_reduce", 3, 1000, 250, 250, 250, 1000),
        ("send_recv", 3, 1000, 250, 250, 250, 1000),
        ("all_gather", 3, 1000, 83, 83, 249, 996),
        ("reduce_scatter", 3, 1000, 83, 249, 83, 996),
        ("all_to_all", 3, 1000, 83, 249, 249, 996),
        ("all_gather", 8, 4, 1, 1, 8, 32),
    ],
)
def test_size_is_the_larger_buffer_and_count_what_a_rank_gives_to_a_part(
    name: str, ranks: int, size: int, count: int, sent: int, received: int, bytes_: int
) -> None:
    shape = make_shape(find_operation(name), ranks, size)
    assert (shape.count, shape.sent, shape.received, shape.size) == (count, sent, received, bytes_)


def results(shape: CollectiveShape, sent: Sequence[Tensor]) -> list[Tensor]:
    """What every rank receives, by the plain meaning of the operation."""
    ranks, total = shape.ranks, torch.stack(list(sent)).sum(0)
    match shape.operation.name:
        case "all_reduce" | "reduce":
            return [total] * ranks
        case "all_gather":
            return [torch.cat(list(sent))] * ranks
        case "reduce_scatter":
            return list(total.chunk(ranks))
        case "broadcast":
            return [sent[0]] * ranks
        case "all_to_all":
            return [torch.cat([each.chunk(ranks)[rank] for each in sent]) for rank in range(ranks)]
        case _:
            return [sent[rank - 1] for rank in range(ranks)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_what_is_expected_is_the_meaning_of_the_operation(name: str, ranks: int) -> None:
    shape = make_shape(find_operation(name), ranks, 4 * 60)
    pattern = DataPattern(shape.elements, CPU)
    found = results(shape, [pattern.sent(shape, rank) for rank in range(ranks)])
    for rank in range(ranks):
        expected = pattern.expected(shape, rank)
        if name == "reduce" and rank:
            assert expected is None
        else:
            assert expected is not None
            assert count_wrong_elements(found[rank], expected) == 0


def _missing(shape: CollectiveShape, sent: list[Tensor]) -> list[Tensor]:
    """The last rank has sent what it should not: the first's values."""
    return results(shape, [*sent[:-1], sent[0]])


def _shifted(shape: CollectiveShape, sent: list[Tensor]) -> list[Tensor]:
    return [it.roll(1) for it in results(shape, sent)]


def _one_off(shape: CollectiveShape, sent: list[Tensor]) -> list[Tensor]:
    return [torch.cat([it[:-1], it[-1:] + 1]) for it in results(shape, sent)]


def _stale(shape: CollectiveShape, sent: list[Tensor]) -> list[Tensor]:
    return [torch.full_like(it, UNTOUCHED_VALUE) for it in results(shape, sent)]


def _others(shape: CollectiveShape, sent: list[Tensor]) -> list[Tensor]:
    """Every rank has what the next one should have."""
    found = results(shape, sent)
    return found[1:] + found[:1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fault", [_missing, _shifted, _one_off, _stale, _others])
def test_every_operation_is_found_out(
    name: str, fault: Callable[[CollectiveShape, list[Tensor]], list[Tensor]]
) -> None:
    if fault is _others and name in ("all_reduce", "all_gather", "broadcast", "reduce"):
        fault = _one_off  # all ranks have the same there
    if fault is _missing and name == "broadcast":
        fault = _stale  # only the first rank's values count
    shape = make_shape(find_operation(name), 4, 4 * 400)
    pattern = DataPattern(shape.elements, CPU)
    found = fault(shape, [pattern.sent(shape, rank) for rank in range(4)])
    wrong = sum(count_wrong_elements(found[rank], pattern.expected(shape, rank)) for rank in range(4))
    assert wrong > 0


def test_sums_are_exact_over_thousands_of_ranks() -> None:
    shape = make_shape(find_operation("all_reduce"), 30_000, 4 * 1000)
    expected = DataPattern(1000, CPU).expected(shape, 0)
    assert expected is not None
    assert expected.max() < 2**24


class QueueWire:
    """Ranks that are threads of one process."""

    def __init__(self, size: int, index: int, queues: dict[tuple[int, int], Queue[Tensor]]) -> None:
        self.size, self.index, self._queues = size, index, queues

    def exchange(self, sent: Tensor | None, to: int, received: Tensor | None, source: int) -> None:
        if sent is not None:
            self._queues[self.index, to].put(sent.clone())
        if received is not None:
            received.copy_(self._queues[source, self.index].get(timeout=20))


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("elements", [1, 6, 64])
def test_our_ring_and_tree_add_up_in_place(algorithm: str, ranks: int, elements: int) -> None:
    queues: dict[tuple[int, int], Queue[Tensor]] = defaultdict(Queue)
    for pair in [(a, b) for a in range(ranks) for b in range(ranks)]:
        queues[pair] = Queue()
    shape = make_shape(find_operation("all_reduce"), ranks, 4 * elements)
    pattern = DataPattern(elements, CPU)
    buffers = [pattern.sent(shape, rank).clone() for rank in range(ranks)]
    threads = [
        threading.Thread(
            target=OWN_ALGORITHMS[algorithm],
            args=(QueueWire(ranks, rank, queues), buffers[rank], torch.empty(elements)),
        )
        for rank in range(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    expected = pattern.expected(shape, 0)
    assert all(count_wrong_elements(buffer, expected) == 0 for buffer in buffers)
    assert all(queue.empty() for queue in queues.values()), "nothing was sent that nobody wanted"


def test_groups_are_those_of_the_mesh() -> None:
    config = ParallelConfig(tp=2, dp_shard=2)

    def on_rank(world: World) -> list[tuple[str, list[int], list[int]]]:
        return [
            (group.axis, list(group.ranks), dist.get_process_group_ranks(world.mesh.get_group(group.axis)))
            for group in list_groups_of_rank(resolve_degrees(config, world.size), world.rank)
            if group.axis != WORLD_AXIS
        ]

    for groups in run_ranks(on_rank, 4, parallel=config):
        assert [axis for axis, _, _ in groups] == ["dp_shard", "tp"]
        assert all(ours == theirs for _, ours, theirs in groups)


def test_the_world_is_measured_unless_an_axis_is_all_of_it() -> None:
    assert [it.axis for it in list_groups_of_rank(Degrees(1, 4, 1, 1, 1), 0)] == ["dp_replicate"]
    two = list_groups_of_rank(Degrees(2, 1, 1, 1, 3), 5)
    assert [(it.axis, it.ranks, it.index, it.groups) for it in two] == [
        ("pp", (2, 5), 1, 3),
        ("tp", (3, 4, 5), 2, 2),
        ("world", (0, 1, 2, 3, 4, 5), 5, 1),
    ]


@pytest.mark.parametrize(("latency", "bandwidth"), [(5e-6, 25e9), (1e-3, 1.2e7), (0.0, 1e9)])
def test_the_fit_finds_the_constants_again(latency: float, bandwidth: float) -> None:
    sizes = [1 << power for power in range(10, 27, 2)]
    noise = np.random.default_rng(3).normal(1, 0.03, len(sizes))
    line = fit_latency_bandwidth(
        sizes, [(latency + size / bandwidth) * factor for size, factor in zip(sizes, noise, strict=True)]
    )
    assert line is not None
    assert line.latency == pytest.approx(latency, rel=0.1, abs=0.1 * sizes[0] / bandwidth)
    assert line.bandwidth == pytest.approx(bandwidth, rel=0.05)
    assert 0 < line.error < 0.2


def test_the_fit_is_exact_without_noise_never_negative_and_says_when_it_cannot_tell() -> None:
    line = fit_latency_bandwidth([1000, 2000, 4000], [0.003, 0.005, 0.009])
    assert line is not None
    assert (line.latency, line.bandwidth) == (pytest.approx(0.001), pytest.approx(5e5))
    assert line.error == pytest.approx(0, abs=1e-9)
    below = fit_latency_bandwidth([1000, 2000], [0.001, 0.003])
    assert below is not None
    assert below.latency == 0
    assert fit_latency_bandwidth([1000, 4000], [0.002, 0.001]) is None
    assert fit_latency_bandwidth([1000], [0.002]) is None


def ranked(hosts: Sequence[str], paths: dict[str, tuple[str, ...]]) -> list[LevelProbe]:
    nodes = list(dict.fromkeys(hosts))
    return make_probes(make_rank_levels(hosts, nodes, build_levels(nodes, paths)))


def test_probes_leave_a_group_of_their_level_and_of_no_higher_one() -> None:
    hosts = ["a", "a", "b", "b", "c", "c", "d", "d"]
    found = ranked(hosts, {"a": ("s", "x"), "b": ("s", "x"), "c": ("s", "y"), "d": ("s", "y")})
    assert found == [
        LevelProbe("inside", (1, 0, 3, 2, 5, 4, 7, 6), 1),
        LevelProbe("node", (2, 3, 0, 1, 6, 7, 4, 5), 2),
        LevelProbe("leaf", (4, 5, 6, 7, 0, 1, 2, 3), 4),
    ]


def test_uneven_levels_are_probed_by_their_largest_pairs() -> None:
    hosts = ["a", "b", "c", "d", "e"]
    leaves = {"a": ("x",), "b": ("y",), "c": ("x",), "d": ("y",), "e": ("z",)}
    assert ranked(hosts, leaves) == [
        LevelProbe("node", (2, 3, 0, 1, 4), 1),
        LevelProbe("leaf", (1, 0, 3, 2, 4), 2),
    ], "one pair of nodes in each of x and y; x and y by both their nodes, z by none"
    assert ranked(["a", "a", "a"], {}) == [LevelProbe("inside", (1, 0, 2), 1), LevelProbe("inside", (2, 1, 0), 1)]
    assert [probe.level for probe in ranked(["a", "b"], {})] == ["node"], "nothing is known above"


def test_what_cannot_be_probed_is_said() -> None:
    levels = make_rank_levels(["a", "b"], ["a", "b"], build_levels(["a", "b"], {"a": ("x",), "b": ("x",)}))
    assert [line.partition(":")[0] for line in describe_unprobed(levels, make_probes(levels))] == [
        "level inside",
        "level leaf",
    ]
    alone = make_rank_levels(["a", "a"], ["a"], build_levels(["a"]))
    assert describe_unprobed(alone, make_probes(alone)) == []


class Liar:
    """A library that loses the last element of what the second rank receives."""

    name, device, in_place = "gloo", CPU, TorchBackend.in_place

    def __init__(self, world: World) -> None:
        self._honest, self._rank = TorchBackend(world), world.rank

    def connect(self, group: object) -> LyingConnection:
        return LyingConnection(self._honest.connect(group), self._rank == 1)  # type: ignore[arg-type]

    def finish(self) -> None:
        self._honest.finish()


class LyingConnection:
    def __init__(self, honest: TorchConnection, lies: bool) -> None:
        self._honest, self._lies = honest, lies
        self.wire = honest.wire

    def call(self, what: object, sent: Tensor, received: Tensor) -> Callable[[], None]:
        honest = self._honest.call(what, sent, received)  # type: ignore[arg-type]

        def call() -> None:
            honest()
            if self._lies:
                received[-1] = 0

        return call


def job_of(world: World) -> BenchJob:
    hosts = ["here"] * world.size
    degrees = resolve_degrees(ParallelConfig(), world.size)
    return BenchJob(world, degrees, 1, tuple(make_rank_levels(hosts, ["here"], build_levels(["here"]))), "as it came")


def test_a_library_that_lies_is_an_error_and_leaves_no_calibration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = {"smallest": "1K", "largest": "4K", "rounds": 2, "iterations": 1}
    options = CollectivesOptions(**few, operations=("all_reduce", "all_to_all"), algorithms=("library", "ring"))  # type: ignore[arg-type]

    def on_rank(world: World) -> CollectivesResult:
        return measure_with_backends(compose([]), options, job_of(world), [Liar(world)])

    result = run_ranks(on_rank, 2)[0]
    assert {(row.operation, row.algorithm): row.wrong for row in result.measurements} == {
        ("all_reduce", "library"): 1,
        ("all_reduce", "ring"): 0,
        ("all_to_all", "library"): 1,
    }
    assert result.wrong == 4, "an element of each of two sizes"
    out = tmp_path / "calibration.json"
    assert report_result(result, replace(options, out=str(out), output="plain")) == EXIT_WRONG_DATA
    said = capsys.readouterr()
    assert "# Out of bounds values : 4 FAILED" in said.out
    assert len(said.err.splitlines()) == 1
    assert "all_reduce library of gloo on dp_replicate, all_to_all library of gloo" in said.err
    assert not out.exists()


def test_messages_of_probes_are_checked_too() -> None:
    def on_rank(world: World) -> tuple[int, int]:
        maker, backend = CaseMaker(world.rank, world.size, 64), TorchBackend(world)
        probe = ProbeCell(LevelProbe("node", (1, 0, 2), 1), backend, make_shape(find_operation("send_recv"), 2, 256))
        case = maker.probe(probe)
        case.fill()
        before = case.wrong()
        case.call()
        return before, case.wrong()

    assert run_ranks(on_rank, 3) == [(64, 0), (64, 0), (0, 0)], "the third has no partner"


def test_a_case_may_be_called_again_and_again() -> None:
    def on_rank(world: World) -> list[int]:
        maker, backend = CaseMaker(world.rank, world.size, 64), TorchBackend(world)
        group = list_groups_of_rank(resolve_degrees(ParallelConfig(), world.size), world.rank)[0]
        wrong = []
        for name in NAMES:
            case = maker.case(
                MeasurementCell(group, backend, "library", make_shape(find_operation(name), world.size, 240))
            )
            for _ in range(2):
                case.fill()
                case.call()
                wrong.append(case.wrong())
        return wrong

    assert run_ranks(on_rank, 3) == [[0] * 2 * len(NAMES)] * 3


def row(**changes: object) -> Measurement:
    usual = Measurement(
        "tp", 2, 2, "all_reduce", "library", "gloo", 1024, 256, "float", "sum", True, 2e-5, (1e-5, 3e-5), 0.05, 0.05, 0
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


@pytest.fixture
def result() -> CollectivesResult:
    rows = [
        row(),
        row(size=4096, count=1024),
        row(algorithm="ring"),
        row(axis="world", groups=1, ranks=4, operation="all_gather", redop="none", in_place=False, size=996),
    ]
    fits = (
        LevelFit("inside", "gloo", 1, (1024, 4096), (1e-5, 2e-5), 7e-6, 3e8, 0.01),
        LevelFit("node", "gloo", 2, (1024, 4096), (2e-5, 1e-5), None, None, None),
        LevelFit("inside", "mpi", 1, (1024, 4096), (1e-6, 2e-6), 6e-7, 3e9, 0.01),
    )
    degrees = dict.fromkeys(AXES, 1) | {"dp_replicate": 2, "tp": 2}
    return CollectivesResult(
        "mine", "cpu", 4, 2, degrees, "as it came", 5, "2026-01-02T03:04:05+00:00", tuple(rows), fits, 0, ("a note",)
    )


def test_plain_lines_have_the_columns_of_nccl_tests(result: CollectivesResult) -> None:
    lines = format_nccl_tests(result).splitlines()
    numbers = [line.split() for line in lines if not line.startswith("#")]
    assert numbers[0] == ["1024", "256", "float", "sum", "20.00", "0.05", "0.05", "0"]
    assert len(numbers) == 4
    heads = [line.split() for line in lines if "#wrong" in line]
    assert heads[0] == ["#", "size", "count", "type", "redop", "time", "algbw", "busbw", "#wrong"]
    for words in (
        "# all_reduce ring (ours, over point to point) gloo, tp: 2 groups of 2 ranks, in place",
        "# all_gather library gloo, world: 1 group of 4 ranks, out of place",
        "# level inside gloo: latency 7.00 us, bandwidth 0.3 GB/s, pairs 1, fit within 1.0%",
        "# Out of bounds values : 0 OK",
        "# a note",
    ):
        assert words in lines


def test_the_table_names_axes_algorithms_and_levels(
    result: CollectivesResult, capsys: pytest.CaptureFixture[str]
) -> None:
    print_collectives_result(result)
    said = capsys.readouterr().out
    for words in ("tp: 2 x 2 ranks", "world: 1 x 4 ranks", "ring (ours)", "996", "4K", "inside", "unknown", "a note"):
        assert words in said


@pytest.mark.parametrize(("name", "begins"), [("bus.png", b"\x89PNG"), ("bus.svg", b"<?xml")])
def test_the_plot_is_a_picture(result: CollectivesResult, tmp_path: Path, name: str, begins: bytes) -> None:
    plot_bandwidths(result, tmp_path / name)
    content = (tmp_path / name).read_bytes()
    assert content.startswith(begins)
    assert len(content) > 5000


def test_the_calibration_has_the_levels_of_the_first_backend(result: CollectivesResult, tmp_path: Path) -> None:
    out = tmp_path / "calibration.json"
    assert report_result(result, CollectivesOptions(out=str(out), output="json")) == 0
    found = read_calibration(out)
    assert found == make_calibration(result)
    assert (found.cluster, found.backend, [it.level for it in found.levels]) == ("mine", "gloo", ["inside"])
    assert json.loads(result.to_json())["measurements"][0]["busbw"] == 0.05


def test_a_calibration_without_a_level_is_refused(result: CollectivesResult, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no bandwidth can be fitted to times of these sizes; use a larger --max"):
        report_result(
            replace(result, fits=result.fits[1:2]), CollectivesOptions(out=str(tmp_path / "c.json"), output="plain")
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("said", "size"), [("4", 4), ("512", 512), ("1K", 1024), ("64m", 64 << 20), ("1GB", 1 << 30), ("2kb", 2048)]
)
def test_sizes_may_have_units(said: str, size: int) -> None:
    assert parse_size("--min", said) == size


@pytest.mark.parametrize("said", ["3", "", "1T", "-4K", "1.5M", "K", "٣K", "9" * 30, "1 K"])
def test_other_sizes_are_refused(said: str) -> None:
    with pytest.raises(UserError, match=r"--max .*: must be a size of at least 4 bytes"):
        parse_size("--max", said)


def test_sizes_rise_by_the_factor() -> None:
    assert CollectivesOptions("1K", "20K", 4).sizes == [1024, 4096, 16384]
    assert len(CollectivesOptions().sizes) == round(math.log(64 * 1024, 4)) + 1


def test_mpi_is_only_asked_where_an_mpi_launcher_started_the_ranks() -> None:
    assert is_started_by_mpi({"PMIX_RANK": "0"})
    assert is_started_by_mpi({"OMPI_COMM_WORLD_RANK": "1"})
    assert not is_started_by_mpi({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "PMI_RANK": "1"})
