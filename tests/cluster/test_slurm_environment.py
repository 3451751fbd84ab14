"""Dumps of Slurm's environment, host lists and host files: nodes in order."""

from __future__ import annotations

import pytest

from hpc_train.cluster.readers.formats import read_topology_text
from hpc_train.cluster.readers.slurm.slurm_environment import parse_tasks_per_node
from hpc_train.cluster.spec import Cluster
from hpc_train.cluster.switch_tree import find_paths as paths
from hpc_train.errors import UserError


def names(cluster: Cluster) -> list[str]:
    return [it.name for it in cluster.nodes]


def test_a_dump_of_one_node() -> None:
    text = """\
PATH=/usr/bin
SLURM_JOB_NODELIST=n[7-8,03],x1
SLURM_NODELIST=n[7-8,03],x1
SLURM_STEP_NODELIST=n8
SLURM_NNODES=1
SLURM_TASKS_PER_NODE=4,2(x3)
SLURM_TOPOLOGY_ADDR=s0.s5.n8
SLURM_TOPOLOGY_ADDR_PATTERN=switch.switch.node
SLURMD_NODENAME=n8
"""
    read = read_topology_text(text, "env")
    assert read.kind == "slurm_environment"
    assert names(read) == ["n7", "n8", "n03", "x1"]
    assert paths(read) == {"n7": (), "n8": ("s0", "s5"), "n03": (), "x1": ()}


def test_a_dump_of_several_nodes_as_srun_labels_it() -> None:
    text = (
        '0: declare -x SLURM_NODELIST="10.0.0.[1-2]"\n'
        "0: SLURM_TOPOLOGY_ADDR=b0.10.0.0.1\n"
        "1: export SLURM_NODELIST='10.0.0.[1-2]'\r\n"
        "1: SLURM_TOPOLOGY_ADDR=b1.10.0.0.2\n"
        "1: SLURM_TOPOLOGY_ADDR_PATTERN=block.node\n"
    )
    assert paths(read_topology_text(text, "env")) == {"10.0.0.1": ("b0",), "10.0.0.2": ("b1",)}


@pytest.mark.parametrize(
    ("text", "tasks"),
    [("4", [4]), ("34,26,2(x2)", [34, 26, 2, 2]), ("8(x3),1", [8, 8, 8, 1]), ("2(x2), 1", [2, 2, 1])],
)
def test_tasks_per_node(text: str, tasks: list[int]) -> None:
    assert parse_tasks_per_node(text) == tasks


@pytest.mark.parametrize("text", ["", "4,", "4(x)", "4(x2", "4x2", "-1", "1(x999999999)", "٣"])
def test_tasks_per_node_refuses(text: str) -> None:
    with pytest.raises(UserError, match="SLURM_TASKS_PER_NODE="):
        parse_tasks_per_node(text)


def test_a_host_list_keeps_order_and_duplicates() -> None:
    read = read_topology_text("# from squeue\nn[3,1-2],login,n1\n", "hosts")
    assert read.kind == "hostlist"
    assert names(read) == ["n3", "n1", "n2", "login", "n1"]


def test_a_host_file_keeps_order_and_duplicates() -> None:
    text = "# hosts\nn2 slots=8 max_slots=16\nn1:4   # four\nn[5-6]\n\n10.0.0.1\nn2\n"
    read = read_topology_text(text, "hosts")
    assert read.kind == "hostfile"
    assert names(read) == ["n2", "n1", "n5", "n6", "10.0.0.1", "n2"]


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("SLURM_NODELIST=n[1-\n", 1, "bracket"),
        ("SLURM_JOBID=7\nSLURM_NODE", 2, "cut short"),
        ("SLURM_NODELIST=n1\nSLURM_NODELIST=n2\n", 2, "one job"),
        ("SLURM_NODELIST=n[1-3]\nSLURM_NNODES=4\n", 2, "3 nodes"),
        ("SLURM_NODELIST=n[1-2]\nSLURM_TASKS_PER_NODE=4(x2\n", 2, "expected tasks of each node"),
        ("SLURM_NODELIST=n1\nSLURM_TOPOLOGY_ADDR=a.n2\n", 2, "no node of the job"),
        ("SLURM_JOBID=7\n", 0, "no SLURM_JOB_NODELIST"),
        ("n[3-1]\n", 1, "backwards"),
        ("\nblock{b1}\n", 2, "slurmctld"),
        ("n[1-3\n", 1, "bracket"),
        ("n1\nn2\nn3 slots 8\nn4\n", 3, "expected HOST"),
    ],
)
def test_refuses_with_file_and_line(text: str, line: int, why: str) -> None:
    with pytest.raises(UserError, match=why) as caught:
        read_topology_text(text, "FILE")
    assert str(caught.value).startswith(f"FILE:{line}: " if line else "FILE: ")
