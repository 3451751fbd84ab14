"""Inputs that every reader must survive: byte order marks, foreign line ends, cut files, oversized files."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path

import pytest
from fake_fabric import rail_fabric, three_levels
from hypothesis import given, settings
from hypothesis import strategies as st
from render_rocm_smi import Spec, render_text

from hpc_train.cluster.readers import formats
from hpc_train.cluster.readers.formats import read_topology_file, read_topology_text
from hpc_train.cluster.readers.infiniband import ibnetdiscover_text
from hpc_train.cluster.spec import Cluster
from hpc_train.errors import UserError

IBSTATUS = "".join(
    f"Infiniband device 'mlx5_{n}' port 1 status:\n\tdefault gid:\t fe80::1\n\tbase lid:\t 0x1\n\tsm lid:\t\t 0x1\n"
    "\tstate:\t\t 4: ACTIVE\n\tphys state:\t 5: LinkUp\n\trate:\t\t 400 Gb/sec (4X NDR)\n\tlink_layer:\t InfiniBand\n\n"
    for n in range(3)
)
ROCM = render_text(Spec(tuple(range(8)), ("XGMI",) * 28, (0,) * 8))
TEXTS = {
    "ibstatus": IBSTATUS,
    "topology.conf": "SwitchName=l1 Nodes=n[1-2]\nSwitchName=l2 Nodes=n[3-4]\nSwitchName=s Switches=l[1-2]\n",
    "topology.yaml": "- topology: t\n  tree:\n    switches:\n      - switch: l1\n        nodes: n[1-2]\n",
    "ibnetdiscover": rail_fabric(2, 2, 2, 1).dump(),
    "rocm-smi": ROCM,
    "nvidia-smi": "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV12\t0-7\nGPU1\tNV12\t X \t0-7\n",
    "hostfile": "n1 slots=8\nn2 slots=8\n",
    "environment": "SLURM_JOB_NODELIST=n[1-2]\nSLURM_NNODES=2\n",
    "p2p": "\tGPU0\tGPU1\nGPU0\tX\tOK\nGPU1\tOK\tX\n",
    "nvlink": "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n",
    "NCCL log": "n1:7:8 [0] NCCL INFO comm 0x1 rank 0 nranks 1 cudaDev 0 busId 1000 - Init COMPLETE\n",
    "NCCL graph": '<graphs version="1">\n<graph typeintra="NVL" typeinter="PIX">\n<channel><gpu dev="0"/></channel>\n'
    "</graph>\n</graphs>\n",
    "nccl": '<system version="1">\n<cpu numaid="0" affinity="ff">\n</cpu>\n</system>\n',
}


def read_bytes(tmp_path: Path, content: bytes) -> Cluster:
    (tmp_path / "file").write_bytes(content)
    return read_topology_file(tmp_path / "file")


@pytest.mark.parametrize("name", TEXTS)
def test_marks_and_line_ends_change_nothing(name: str, tmp_path: Path) -> None:
    text = TEXTS[name]
    expected = read_bytes(tmp_path, text.encode())
    for variant in (text, text.replace("\n", "\r\n"), text.replace("\n", "\r")):
        for encoding in ("utf-8", "utf-8-sig", "utf-16"):
            assert read_bytes(tmp_path, variant.encode(encoding)) == expected, encoding
    assert expected.nodes


def test_a_mark_does_not_cost_the_first_device(tmp_path: Path) -> None:
    (node,) = read_bytes(tmp_path, IBSTATUS.encode("utf-8-sig")).nodes
    assert [nic.device for nic in node.nics] == ["mlx5_0", "mlx5_1", "mlx5_2"]


@given(st.floats(0.05, 0.97))
@settings(max_examples=60)
def test_a_log_of_rocm_smi_that_is_cut_is_refused(share: float) -> None:
    with pytest.raises(UserError) as raised:
        read_topology_text(ROCM[: int(len(ROCM) * share)], "rocm.txt")
    assert "\n" not in str(raised.value)


def test_a_section_of_rocm_smi_alone_says_what_it_lacks() -> None:
    whole = render_text(Spec((0, 1), ("XGMI",), (0, 0)), sections=("weight",))
    cluster = read_topology_text(whole, "rocm.txt")
    assert cluster.links == ()
    assert "no link types" in cluster.notes[0]


def test_an_output_of_rocm_smi_that_lost_its_link_types_is_refused() -> None:
    text = render_text(Spec((0, 1), ("XGMI",), (0, 0)), sections=("weight", "hops", "numa"))
    with pytest.raises(UserError, match="but no section 'Link Type between two GPUs'"):
        read_topology_text(text, "rocm.txt")


def test_large_files_are_one_line(tmp_path: Path) -> None:
    file = tmp_path / "large"
    with file.open("wb") as sparse:
        sparse.truncate(formats.MAX_FILE_BYTES + 1)
    with pytest.raises(UserError, match="larger than 128 MiB; not a topology file"):
        read_topology_file(file)
    for name, most in (("nvidia_smi", 4), ("slurm_topology_conf", 8), ("ibstat", 4), ("slurm_topology_yaml", 8)):
        with pytest.raises(UserError, match=f"expected at most {most} MiB"):
            read_topology_text("#\n" * (5 << 20), "large", name)


@pytest.mark.parametrize("unit", ["\n", " ", "\t \n", "==(", "a", "[", "{", "x=", "- ", "'", '"# ', "<!-- "])
def test_no_text_makes_a_reader_slower_than_its_length(unit: str) -> None:
    """A reader that scans the rest of the text from every position does not finish these within an hour."""
    with pytest.raises(UserError):
        read_topology_text(unit * ((1 << 19) // len(unit)), "odd")


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="not a regular file"):
        read_topology_file(tmp_path / "pipe")


@pytest.mark.parametrize("text", [b"", b"6,1042,58,-;mlx5_core: Port module event\n"])
def test_a_file_that_waits_for_more_text_is_not_waited_for(
    text: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As /proc/kmsg: of size 0, and a reader waits where its text ends. A pipe with a writer does the same."""
    reader, writer = os.pipe()
    monkeypatch.setattr(formats, "open_to_read", lambda path: os.fdopen(reader, "rb"))
    try:
        os.write(writer, text)
        with pytest.raises(UserError, match="kmsg: not a topology in a known format"):
            read_topology_file(tmp_path / "kmsg")
    finally:
        os.close(writer)


def test_groups_that_are_not_read_are_said() -> None:
    """Four switches of one level are cabled to one another, as inside a dragonfly group."""
    fabric = rail_fabric(4, 2, 1, 0)
    leaves = [device for device in fabric.devices if device.letter == "S"]
    for number, leaf in enumerate(leaves):
        for other in leaves[number + 1 :]:
            fabric.cable(leaf, other)
    (note,) = read_topology_text(fabric.dump(), "dump").notes
    assert "4 of 4 switches are cabled to others of their own level, as in a dragonfly or torus" in note


@pytest.mark.parametrize("piece", [1, 7, 100])
def test_a_dump_is_read_alike_in_pieces_of_any_length(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = three_levels().dump()
    whole, cut = read_topology_text(text, "dump"), text[:-40]
    with pytest.raises(UserError) as refused:
        read_topology_text(cut, "dump")
    monkeypatch.setattr(ibnetdiscover_text, "_PIECE", piece)
    assert read_topology_text(text, "dump") == whole
    with pytest.raises(UserError, match=re.escape(str(refused.value))):
        read_topology_text(cut, "dump")


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_of_cycles_is_left_as_it_was(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        read_topology_text(three_levels().dump(), "dump")
        with pytest.raises(UserError):
            read_topology_text(three_levels().dump()[:-40], "dump")
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
