"""Logs of NCCL_DEBUG=INFO: hosts in the order of ranks, GPUs, NICs, transports, and which ranks are missing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reader_outcome import check, outcome

from hpc_train.cluster.readers.formats import read_topology_file
from hpc_train.cluster.readers.node.nccl_log import matches_nccl_log, read_nccl_log
from hpc_train.cluster.spec import Cluster

SAMPLES = Path(__file__).parents[2].parent / "shared/data/topology/nccl-log"
NICS = "NET/IB : Using [0]mlx5_0:1/IB/SHARP [1]mlx5_3:1/IB [RO]; OOB eno1:10.0.0.1<0>"


def render(hosts: list[str], gpus: int, physical: bool = True, masked: bool = False) -> list[str]:
    """The lines of a job's ranks, `gpus` on each host, in one ring; masked: each process sees its GPU as device 0."""
    world = len(hosts) * gpus
    lines = []
    for rank in range(world):
        host, local = hosts[rank // gpus], rank % gpus
        device = 0 if masked else local
        own = f"{host}:{100 + local}:{200 + local} [{device}] NCCL INFO "
        nvml = f" nvmlDev {local}" if physical else ""
        comm = f"comm 0x5f rank {rank} nranks {world} cudaDev {device}{nvml} busId {local + 1:x}b000 commId 0x9 - Init"
        other = (rank + 1) % world
        pair = f"Channel 00/0 : {rank}[{device}] -> {other}[0]"
        near = other // gpus == rank // gpus
        lines += [own + NICS, f"{own}{comm} START", f"{own}{comm} COMPLETE"]
        lines += [own + pair + (" via P2P/IPC" if near else f" [send] via NET/IB/{local % 2}(0)/GDRDMA")]
        lines += [own + f"Channel 00/02 : {'   '.join(map(str, range(world)))}"] if rank == 0 else []
        lines += [f"{rank}: a line of somebody else", f"{own}Trees [0] -1/-1/-1->{rank}->0"]
    return lines


def read(lines: list[str]) -> Cluster:
    text = "\n".join(lines)
    assert matches_nccl_log(text)
    cluster = check(outcome(read_nccl_log, text))
    assert cluster is not None
    return cluster


def test_a_job_of_two_hosts() -> None:
    cluster = read(render(["zeta", "alpha"], 4))
    assert [node.name for node in cluster.nodes] == ["zeta", "alpha"], "in the order of ranks, not of names"
    for node in cluster.nodes:
        assert [(gpu.id, gpu.pci) for gpu in node.gpus] == [(f"GPU{n}", f"0000:{n + 1}b:00.0") for n in range(4)]
        assert [(nic.device, nic.layer) for nic in node.nics] == [("mlx5_0", "infiniband"), ("mlx5_3", "infiniband")]
    assert {(link.a, link.b, link.kind) for link in cluster.links if link.node == "zeta"} == {
        ("GPU0", "GPU1", "P2P"),
        ("GPU1", "GPU2", "P2P"),
        ("GPU2", "GPU3", "P2P"),
        ("GPU3", "NIC1", "GDRDMA"),
    }
    assert cluster.notes[1:] == ("NCCL's rings over all 8 ranks: 1 in this log; channel 00 is 0 1 2 3 4 5 6 7",)


@pytest.mark.parametrize("label", ["", "[3]: ", " 7: ", "[2026-11-25 10:00:00] 12: ", "<1,3>: "])
@pytest.mark.parametrize("physical", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_the_same_in_any_order_with_any_label(label: str, physical: bool, masked: bool) -> None:
    expected = read(render(["n1", "n2"], 4))
    lines = [label + line for line in render(["n1", "n2"], 4, physical, masked)]
    random.Random(4).shuffle(lines)
    cluster = read(lines)
    assert cluster.nodes == expected.nodes
    assert set(cluster.links) == set(expected.links)


def test_ranks_that_are_missing_are_named() -> None:
    lines = [line for line in render(["n1", "n2", "n3"], 2) if line.startswith(("n1:100", "n3:"))]
    cluster = read(lines)
    assert [(node.name, len(node.gpus)) for node in cluster.nodes] == [("n1", 1), ("n3", 2)]
    assert "3 of 6 ranks are not in this log (1, 2, 3)" in cluster.notes[1]


def test_a_log_without_ranks_says_so() -> None:
    cluster = read([line for line in render(["n2", "n10"], 2) if "comm" not in line and "Channel" not in line])
    assert [(node.name, len(node.gpus)) for node in cluster.nodes] == [("n2", 2), ("n10", 2)]
    assert any("no line tells the ranks" in note for note in cluster.notes)


OTHER = f"n1:1:1 [0] NCCL INFO {NICS}".replace("_3", "_4")
REFUSED = {
    "of two jobs": ("rank 0 of 4 on n1 and on m1", [*render(["n1"], 4), *render(["m1"], 4)]),
    "with other adapters": ("other adapters than", [*render(["n1"], 1), OTHER]),
    "with an impossible rank": ("rank 9 of 4", [line.replace("rank 1 ", "rank 9 ") for line in render(["n1"], 4)]),
    "without hosts": ("no line of NCCL with a host", ["NCCL INFO Bootstrap"]),
    "with unknown adapters": ("adapters not understood", ["n1:1:1 [0] NCCL INFO NET/IB : Using [0]mlx5_0"]),
}  # fmt: skip


@pytest.mark.parametrize("case", list(REFUSED))
def test_a_log_is_refused(case: str) -> None:
    message, lines = REFUSED[case]
    result = outcome(read_nccl_log, "\n".join(lines))
    assert isinstance(result, str)
    assert message in result
    check(result)


@settings(max_examples=200)
@given(st.data())
def test_damaged_logs_give_a_part_or_one_line(data: st.DataObject) -> None:
    text = "\n".join(render(["n1", "n2"], 2))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        text = text[:at] + data.draw(st.text(max_size=4)) + text[at + data.draw(st.integers(0, 40)) :]
    matches_nccl_log(text)
    check(outcome(read_nccl_log, text))


def test_real_logs() -> None:
    expected = {"nccl_h100_2x4": (2, 4, 4), "nccl_h200_2x8": (2, 8, 10), "nccl_v100_n1": (1, 4, 4)}
    for name, (hosts, gpus, nics) in expected.items() if SAMPLES.exists() else ():
        cluster = read_topology_file(SAMPLES / f"{name}.log")
        assert cluster.kind == "nccl_log"
        assert [(len(node.gpus), len(node.nics)) for node in cluster.nodes] == [(gpus, nics)] * hosts
        assert not any("not in this log" in note for note in cluster.notes)
