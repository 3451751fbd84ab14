"""Real files of Slurm clusters, kept beside the checkout where there are any: facts counted by hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpc_train.cluster.readers.formats import read_topology_file
from hpc_train.cluster.switch_tree import find_paths as paths

SAMPLES = Path(__file__).parents[2].parent / "shared/data/topology/slurm"


@dataclass(frozen=True)
class Facts:
    kind: str
    nodes: int
    switches: int
    node: str
    path: tuple[str, ...]


FACTS = {
    "env_unl_tasks_per_node.txt": Facts("slurm_environment", 4, 2, "c3005", ("s0", "s5")),
    "nrel_eagle_job_env.txt": Facts("slurm_environment", 3, 2, "r9i1n11", ("root", "r9")),
    "scontrol_show_topology_block_gb300.txt": Facts("slurm_block", 4, 3, "10.140.79.152", ("gb300_b[0-1]", "gb300_b1")),
    "scontrol_show_topology_leonardo.txt": Facts("slurm_tree", 180, 2, "lrdn0014", ("isw-L2-CELLG1", "isw10100")),
    "scontrol_show_topology_nebius.txt": Facts("slurm_tree", 4, 6, "worker-payg-0", ("root", "unknown")),
    "slurm_testcase1_tree.conf": Facts("slurm_tree", 10000, 529, "peta14999", ("root", "im0", "grp22", "leaf349")),
    "slurm_testcase3_tree.conf": Facts("slurm_tree", 400, 23, "peta10200", ("root", "grp11", "leaf110")),
    "slurm_topology_yaml_man_example.yaml": Facts("slurm_tree", 4, 3, "node03", ("sw_root", "s2")),
    "topograph_block_rack.conf": Facts("slurm_block", 96, 12, "srv4208", ("rack42",)),
    "topograph_model_large.yaml": Facts("topograph", 96, 19, "srv3204", ("core", "spine-3", "leaf-3-2")),
    "topograph_model_nvl72.yaml": Facts("topograph", 72, 7, "node2101", ("core", "spine-2", "leaf-2-1")),
    "topograph_tree_dotted_names.conf": Facts(
        "slurm_tree", 96, 19, "srv5108", ("switch.3.1", "switch.2.5", "switch.1.9")
    ),
}


def test_samples_say_what_was_counted_by_hand() -> None:
    for name, facts in FACTS.items():
        if not (SAMPLES / name).exists():
            continue
        read = read_topology_file(SAMPLES / name)
        found = (read.kind, len(read.nodes), len(read.switches), paths(read)[facts.node])
        assert found == (facts.kind, facts.nodes, facts.switches, facts.path), name
