"""`hpc-train topology` as a user meets it: what it prints, its JSON, its exit codes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_train.cli.main import main

CONF = """\
SwitchName=leaf1 Nodes=n[1-4]
SwitchName=leaf2 Nodes=n[5-8]
SwitchName=leaf3 Nodes=n[9-12]
SwitchName=spine Switches=leaf[1-3]
"""
SMALL = (
    "cluster=dgx_h100",
    "cluster.node.gpus=2",
    "cluster.node.nvlink_domain_gpus=2",
    "cluster.fabric.oversubscription=8",
)
MODEL = ("model=llama_125m", "parallel.tp=2")


@pytest.fixture(autouse=True)
def _outside_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURMD_NODENAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def conf(tmp_path: Path) -> str:
    path = tmp_path / "topology.conf"
    path.write_text(CONF)
    return str(path)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """The JSON of a command that succeeds."""
    assert main(["topology", *words, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return json.loads(printed.out)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line of a command that is the user's mistake."""
    assert main(["topology", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("hpc-train: ")
    assert printed.err.count("\n") == 1
    return printed.err


def test_read_prints_the_contract(conf: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "read", conf)
    assert set(found) == {"kind", "nodes", "links", "switches"}
    assert found["links"] == []
    assert {"name": "spine", "level": 1, "nodes": [], "switches": ["leaf1", "leaf2", "leaf3"]} in found["switches"]
    assert {"name": "leaf2", "level": 0, "nodes": ["n5", "n6", "n7", "n8"], "switches": []} in found["switches"]


def test_read_prints_a_tree(conf: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "read", conf]) == 0
    out = capsys.readouterr().out
    assert "leaf3: n[9-12] (4 nodes)" in out
    assert "\x1b" not in out


def test_read_takes_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(CONF.encode())))
    assert len(told(capsys, "read", "-")["switches"]) == 4
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"\xff\x00 hello")))
    assert "standard input: not a topology" in refused(capsys, "read", "-")


def test_read_refuses_in_one_line(tmp_path: Path, conf: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "letter.txt"
    text.write_text("Dear all,\nthe cluster is down.\n")
    assert "letter.txt: not a topology" in refused(capsys, "read", str(text))
    assert "No such file" in refused(capsys, "read", str(tmp_path / "none"))
    assert f"{tmp_path}: a directory; name one of its files" in refused(capsys, "read", str(tmp_path))
    assert "--format paper: choose one of" in refused(capsys, "read", conf, "--format", "paper")


def test_show_a_described_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "show", "cluster=gb200_nvl72", "cluster.nodes=20")
    assert [len(node["gpus"]) for node in found["nodes"]] == [4] * 20
    assert found["nodes"][0]["gpus"][0]["name"] == "NVIDIA GB200"
    cliques = {gpu["clique"] for node in found["nodes"] for gpu in node["gpus"]}
    assert len(cliques) == 2
    assert len(found["links"]) == 20 * 6
    assert [len(switch["nodes"]) for switch in found["switches"]] == [20]


def test_show_the_groups_of_a_described_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    switches = told(capsys, "show", "cluster=frontier", "cluster.nodes=200")["switches"]
    assert [(it["name"], it["level"], len(it["switches"])) for it in switches if it["level"]] == [
        ("group1", 1, 8),
        ("group2", 1, 5),
    ]
    assert sum(len(it["nodes"]) for it in switches) == 200


def test_show_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "show")
    [node] = found["nodes"]
    assert node["name"]
    assert found["switches"] == []


def test_show_a_file(conf: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "show", f"cluster.topology={conf}") == told(capsys, "read", conf)


def test_show_the_job_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_job(tmp_path, monkeypatch, "n[5-6,9]")
    found = told(capsys, "show")
    assert [node["name"] for node in found["nodes"]] == ["n6"]
    held = {switch["name"]: switch["nodes"] for switch in found["switches"]}
    assert held == {"leaf2": ["n5", "n6"], "leaf3": ["n9"], "spine": []}
    [spine] = [switch for switch in found["switches"] if switch["name"] == "spine"]
    assert spine["switches"] == ["leaf2", "leaf3"]


def test_place_an_allocation_in_its_order(conf: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("place", *SMALL, *MODEL, f"cluster.topology={conf}", "--nodes", "n[5,1,6,2]")
    found = told(capsys, *words)
    assert found["world"] == 8
    assert sorted(found["rank_to_slot"]) == list(range(8))
    assert found["rank_to_slot"][:2] == [0, 1]
    assert leaf_changes(found["nodes"]) == 2
    slots = [["n5", "n1", "n6", "n2"].index(name) * 2 + local for name in found["nodes"] for local in (0, 1)]
    assert found["rank_to_slot"] == slots
    assert found["cost"]["placed"] < found["cost"]["identity"]
    assert set(found["per_axis"]["tp"]) == {"identity", "placed"}
    assert found["seconds"] >= 0
    assert found["notes"] == []


def test_blocks_are_nvlink_domains_where_the_cluster_has_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two blocks, in turns: a tp group of two trays fits into a domain, and only then NVLink carries it."""
    (tmp_path / "topology.conf").write_text("BlockName=b1 Nodes=t[1-4]\nBlockName=b2 Nodes=t[5-8]\nBlockSizes=4\n")
    long = ("model=llama_8b", "parallel.tp=8", "train.sequence_length=65536")
    words = ("place", *long, f"cluster.topology={tmp_path}/topology.conf")
    nodes = ("--nodes", "t[1,5,2,6,3,7,4,8]")
    found = told(capsys, *words, "cluster=gb200_nvl72", *nodes)
    assert found["straddling"]["tp"]["domain"] == {"groups": 4, "identity": 4, "placed": 0}
    assert found["per_axis"]["tp"]["identity"] > 3 * found["per_axis"]["tp"]["placed"]
    one_node_domains = told(capsys, *words, "cluster=dgx_h100", "parallel.tp=16", *nodes)
    assert "domain" not in one_node_domains["straddling"]["tp"]


def test_place_says_so_where_nothing_is_to_be_gained(conf: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("place", *SMALL, *MODEL, f"cluster.topology={conf}", "--nodes", "n[1-4]")
    found = told(capsys, *words)
    assert found["rank_to_slot"] == list(range(8))
    assert found["reason"].startswith("no gain expected")
    assert main(["topology", *words]) == 0
    assert "no gain expected" in capsys.readouterr().out


def test_place_prints_what_each_axis_costs(conf: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "place", *SMALL, *MODEL, f"cluster.topology={conf}", "--shuffle", "3"]) == 0
    out = capsys.readouterr().out
    assert "12 nodes x 2 ranks" in out  # a degree is what is left: all nodes of the file
    assert "shuffled with seed 3" in out
    assert "3 leaves" in out
    for word in ("dp_replicate", "tp", "launcher's order", "placed", "faster", "order of nodes: n["):
        assert word in out


def test_a_shuffle_is_repeatable_and_costs_what_placement_wins_back(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "place",
        "cluster=dgx_h100",
        "cluster.nodes=64",
        "cluster.fabric.oversubscription=4",
        "parallel.tp=8",
        "model=llama_8b",
    )
    sorted_, once, again, other = (
        told(capsys, *words, *more) for more in ((), ("--shuffle", "1"), ("--shuffle", "1"), ("--shuffle", "2"))
    )
    for found in (once, again):
        found.pop("seconds")
    assert once == again
    assert once["nodes"] != other["nodes"]
    assert once["cost"]["identity"] > 1.5 * sorted_["cost"]["identity"]
    assert once["cost"]["placed"] == pytest.approx(sorted_["cost"]["placed"], rel=0.02)


def test_place_inside_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_job(tmp_path, monkeypatch, "n[9,1,10,2]")
    found = told(capsys, "place", *SMALL, "model=llama_125m")
    assert leaf_changes(found["nodes"]) == 2 < leaf_changes(["n9", "n1", "n10", "n2"])
    assert found["source"] == "Slurm"
    assert found["notes"] == []


def test_a_node_that_slurm_says_nothing_of_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_job(tmp_path, monkeypatch, "n[1,77]")
    [note] = told(capsys, "place", *SMALL, "model=llama_125m")["notes"]
    assert note.startswith("Slurm does not say where n77 is")


def test_place_inside_a_job_whose_slurm_knows_no_switches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_job(tmp_path, monkeypatch, "n[1-3]", topology="")
    found = told(capsys, "place", *SMALL, "model=llama_125m")
    assert found["rank_to_slot"] == list(range(6))
    assert found["notes"]


def test_place_on_nodes_of_the_described_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    """Nodes 1-32 are one leaf, 33-64 the next."""
    words = ("place", "cluster=dgx_h100", "cluster.fabric.oversubscription=4", "model=llama_8b", "parallel.tp=8")
    found = told(capsys, *words, "--nodes", "node[0001,0033,0002,0034]")
    second = [name in ("node0033", "node0034") for name in found["nodes"]]
    assert sum(a != b for a, b in zip(second, second[1:] + second[:1], strict=True)) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--nodes", "a[1-3]"), "node a1: nothing says where it is"),
        (("--nodes", "node[0001-"), "host list"),
        (("--nodes", "node1,node2,node1"), "node1 is in it twice"),
        (("--nodes", ""), "no node in it"),
        (("--nodes", "node0002,node2"), "same node"),
        (("parallel.tp=5",), "do not divide"),
        (("cluster.topology=/nowhere/topology.conf",), "No such file"),
        (("--picture", "ranks.gif"), "must end in"),
        (("--picture", "/nowhere/ranks.svg"), "no folder /nowhere"),
        (("--axis", "width", "--picture", "TMP/a.svg"), "'width' is not a mesh axis"),
        (("--axis", "pp", "--picture", "TMP/a.svg"), "has one rank"),
        (("cluster=dgx_h10",), "dgx_h100"),
    ],
)
def test_place_refuses_in_one_line(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word.replace("TMP", str(tmp_path)) for word in words]
    assert said in refused(capsys, "place", "cluster=dgx_h100", "cluster.nodes=2", *given)
    assert list(tmp_path.iterdir()) == []


def test_a_file_without_switches_places_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hosts").write_text("n1\nn2\n")
    said = refused(capsys, "place", "cluster=dgx_h100", f"cluster.topology={tmp_path}/hosts")
    assert "needs switches with nodes on them" in said


def test_more_nodes_than_the_file_has(conf: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "has 12 nodes, and the run needs 13" in refused(
        capsys, "place", *SMALL, f"cluster.topology={conf}", "cluster.nodes=13"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("model=llama_tiny", "parallel.pp=16"), "16 stages for a model of 4 blocks"),
        (("model=vit_tiny", "parallel.cp=4"), "parallel.cp=4"),
    ],
)
def test_models_that_cannot_be_cut_so_are_refused(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, "place", "cluster=dgx_h100", "cluster.nodes=2", *words)


NVIDIA_SMI = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV12\t0-7\nGPU1\tNV12\t X \t0-7\n"


def test_a_file_of_one_node_is_no_topology_of_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "topo.txt"
    file.write_text(NVIDIA_SMI)
    assert main(["topology", "read", str(file)]) == 0
    capsys.readouterr()
    run = ("launch=slurm", "cluster=slurm", f"cluster.topology={file}", f"run_dir={tmp_path}/run")
    assert main(["submit", "--dry-run", *run]) == 2
    printed = capsys.readouterr().err
    assert "cluster.topology needs switches with nodes on them" in printed
    assert printed.count("\n") == 1


def leaf_changes(nodes: list[str]) -> int:
    """Edges of the ring over these nodes that leave a leaf of CONF."""
    leaves = [(int(name[1:]) - 1) // 4 for name in nodes]
    return sum(a != b for a, b in zip(leaves, leaves[1:] + leaves[:1], strict=True))


def in_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: str, topology: str | None = None) -> None:
    """A shell of a Slurm job on node n6, whose scontrol knows the switches of CONF."""
    levels = (("leaf1", "n[1-4]"), ("leaf2", "n[5-8]"), ("leaf3", "n[9-12]"))
    rows = [f"SwitchName={name} Level=0 LinkSpeed=1 Nodes={held}" for name, held in levels]
    rows.append("SwitchName=spine Level=1 LinkSpeed=1 Nodes=n[1-12] Switches=leaf[1-3]")
    command = tmp_path / "bin" / "scontrol"
    command.parent.mkdir()
    said = "\n".join(rows) + "\n" if topology is None else topology
    (tmp_path / "said").write_text(said)
    command.write_text(f"#!/bin/sh\n[ \"$*\" = 'show topology' ] && cat '{tmp_path}/said'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", nodes)
    monkeypatch.setenv("SLURMD_NODENAME", "n6")
