"""What doctor says of the ranks of a job, from what they report."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.cluster.calibration import Calibration, LevelConstants, write_calibration
from hpc_train.config.compose import compose
from hpc_train.config.parallel import resolve_degrees
from hpc_train.doctor import agreement as checks
from hpc_train.doctor.agreement import RankReport, RankSpeed, describe_mpi_view
from hpc_train.doctor.findings import Finding, Status, pass_check
from hpc_train.doctor.speeds import (
    MIN_DIFFERENCE,
    AxisReduction,
    check_outliers,
    check_reductions,
    check_speeds,
    predict_seconds,
)
from hpc_train.interfaces import Task
from hpc_train.resilience.preflight import find_outliers

NODES, EACH = 3, 4


def _reports() -> list[RankReport]:
    """Of a healthy job."""
    found = []
    for rank in range(NODES * EACH):
        node, first = rank // EACH, rank % EACH == 0
        found.append(
            RankReport(
                rank,
                f"n{node}",
                {"Python": "3.12.1", "torch": "2.13.0", "hpc_train": "0.1.0"},
                "abc",
                "ib0",
                f"10.0.0.{node + 1}",
                gpus=4,
                findings=[pass_check("python", "Python 3.12.1")] if first else [],
                nvlinks=[12] * 4 if first else [],
                rates=[200.0] * 4 if first else [],
            )
        )
    return found


def _status(reports: list[RankReport], name: str) -> tuple[Status, str]:
    (found,) = (it for it in checks.check_agreement(reports, "slurm", needs_mpi=False) if it.name == name)
    return found.status, found.text


def test_a_healthy_job() -> None:
    found = list(checks.check_agreement(_reports(), "slurm", needs_mpi=False))
    assert {it.status for it in found} == {"ok"}
    assert found[0].text == "12 ranks on 3 nodes, started by slurm"
    assert [it.text for it in found if it.name == "python"] == ["Python 3.12.1"], "three nodes say it once"


def _but(rank: int, **changes: object) -> list[RankReport]:
    reports = _reports()
    reports[rank] = replace(reports[rank], **changes)  # type: ignore[arg-type]
    return reports


@pytest.mark.parametrize(
    ("reports", "name", "status", "word"),
    [
        (
            _but(5, versions={"Python": "3.12.1", "torch": "2.12.0", "hpc_train": "0.1.0"}),
            "torch",
            "bad",
            "n1:5 has 2.12",
        ),
        (_but(7, config="xyz"), "config", "bad", "7 has xyz"),
        (_but(4, nvlinks=[12, 11, 12, 12]), "nvlinks of nodes", "bad", "n1 has 11,12,12,12"),
        (_but(8, rates=[200.0] * 3), "nics of nodes", "bad", "n2 has 200,200,200"),
        (_but(11, gpus=3), "gpus of ranks", "bad", "n2 has 3"),
        (_but(11, slurm="the Slurm step has 24 tasks"), "slurm view", "bad", "24 tasks"),
        (_but(2, mpi="MPI sees process 0 of 1"), "mpi view", "warn", "0 of 1"),
        (_but(3, address="127.0.0.1", interface="lo"), "network", "bad", "cannot reach n0"),
        (_but(3, address="192.168.0.1", interface="eth0"), "network", "warn", "eth0 on 1 nodes"),
        (_but(3, address="", interface=""), "network", "bad", "n0"),
    ],
)
def test_a_rank_that_is_unlike_the_others(reports: list[RankReport], name: str, status: Status, word: str) -> None:
    found, text = _status(reports, name)
    assert found == status
    assert word in text


def test_mpi_is_needed_by_what_uses_it() -> None:
    reports = _but(2, mpi="MPI sees process 0 of 1")
    assert checks.check_mpi_view(reports, needed=True).status == "bad"
    assert checks.check_mpi_view(_reports(), needed=True).status == "ok"


@pytest.mark.parametrize(
    ("hosts", "status", "word"),
    [
        (["a", "a", "b", "b"], "ok", "2 ranks of each node"),
        (["a", "b", "a", "b"], "warn", "jump between nodes 3 times"),
        (["a", "a", "a", "b"], "warn", "some nodes have 1 ranks, others 3: b"),
        (["a"], "ok", "1 ranks"),
    ],
)
def test_the_order_of_ranks(hosts: list[str], status: Status, word: str) -> None:
    found = checks.check_contiguous(hosts)
    assert found.status == status
    assert word in found.text


TASK = Task(1, 4, 1, 0, 1, "slurm", "n0")


def test_srun_without_mpi_leaves_every_rank_alone() -> None:
    line = describe_mpi_view(TASK, {"SLURM_STEP_ID": "0"}, timedelta(seconds=1))
    assert line is not None
    assert "0 of 1" in line
    assert describe_mpi_view(TASK, {}, timedelta(seconds=1)) is None, "torchrun has nothing to do with MPI"
    assert describe_mpi_view(replace(TASK, processes=1), {"SLURM_STEP_ID": "0"}, timedelta(seconds=1)) is None


# speed


def find_slow(seconds: list[float]) -> list[int]:
    return find_outliers(seconds, MIN_DIFFERENCE)


def test_slow_ranks() -> None:
    assert find_slow([1.0, 1.01, 0.99, 1.0, 1.02, 1.5, 1.0, 0.98]) == [5]
    assert find_slow([1.0, 1.01, 0.99, 1.0, 1.02, 0.5, 1.0, 0.98]) == [], "a fast one is no harm"
    assert find_slow([1.0, 1.0, 1.0, 1.05]) == [], "5 % is none, however steady the others are"
    assert find_slow([1.0, 1.0, 1.0, 1.2]) == [3]
    assert find_slow([1.0, 1.4, 0.7, 1.2, 0.8, 1.5]) == [], "all differ"
    assert find_slow([1.0, 9.0]) == [], "of two, nobody can say which is odd"


@given(st.lists(st.floats(1e-6, 1e3), min_size=3, max_size=60))
def test_outliers_do_not_depend_on_the_unit_and_are_fewer_than_half(seconds: list[float]) -> None:
    found = find_slow(seconds)
    assert len(found) < len(seconds) / 2
    assert all(seconds[index] > sorted(seconds)[len(seconds) // 2 - 1] for index in found)
    assert find_slow([value * 1024.0 for value in seconds]) == found


NAMES = [f"rank {rank}" for rank in range(4)]


@pytest.mark.parametrize(
    ("seconds", "firm", "status"),
    [
        ([1.0, 1.0, 1.01, 1.0], True, "ok"),
        ([1.0, 1.0, 1.01, 1.2], True, "warn"),
        ([1.0, 1.0, 1.01, 1.5], True, "bad"),
        ([1.0, 1.0, 1.01, 9.0], False, "warn"),
    ],
)
def test_a_slow_gpu_is_broken_and_a_slow_cpu_may_be_busy(seconds: list[float], firm: bool, status: Status) -> None:
    found = check_outliers("matrix product", NAMES, seconds, firm)
    assert found.status == status
    assert ("rank 3" in found.text) == (status != "ok")


def test_speeds_of_all_ranks() -> None:
    reports = _reports()
    even = [RankSpeed(0.01, 0.001, "cuda")] * len(reports)
    assert [it.status for it in check_speeds(reports, even)] == ["ok", "ok"]
    odd = [*even[:-1], RankSpeed(0.01, 0.002, "cuda")]
    product, copy = check_speeds(reports, odd)
    assert (product.status, copy.status) == ("ok", "bad")
    assert "rank 11 on n2 2.00 x" in copy.text
    (mixed,) = check_speeds(reports, [*even[:-1], RankSpeed(0.01, 0.001, "cpu")])
    assert mixed.status == "bad"


def _reduction(seconds: float, predicted: float | None, failed: str = "") -> Finding:
    (found,) = check_reductions([AxisReduction("tp", 4, 1 << 22, seconds, 1e9, predicted, failed)])
    return found


def test_reductions_beside_their_prediction() -> None:
    assert _reduction(0.01, None).status == "ok"
    assert "bench collectives" in _reduction(0.01, None).text
    assert _reduction(0.01, 0.009).status == "ok"
    found = _reduction(0.05, 0.01)
    assert found.status == "warn"
    assert "5.0 x the predicted 10 ms" in found.text
    assert _reduction(0.0, None, "rank 3: NCCL error").status == "bad"


def test_a_prediction_needs_a_calibration(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    levels = (LevelConstants("inside", 1e-5, 4e9), LevelConstants("node", 1e-4, 1e8))
    write_calibration(file, Calibration("mine", "gloo", "2026-01-01T00:00:00Z", levels))
    hosts = ["a", "a", "b", "b"]
    plain, known = compose(()), compose((f"cluster.calibration={file}",))
    degrees = resolve_degrees(plain.parallel, 4)
    told = predict_seconds(known, degrees, hosts, "dp_replicate", 1 << 22, "cpu")
    assert told is not None
    assert told > 1.5 * (1 << 22) / 1e8, "2 (n - 1) / n of the buffer over the link between nodes"
    assert predict_seconds(plain, degrees, hosts, "dp_replicate", 1 << 22, "cpu") is None
    assert predict_seconds(known, degrees, ["a", "b", "a", "b"], "dp_replicate", 1 << 22, "cpu") is None
    assert predict_seconds(known, degrees, ["a", "a", "a", "b"], "dp_replicate", 1 << 22, "cpu") is None
