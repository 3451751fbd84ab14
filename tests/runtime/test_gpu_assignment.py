"""Which GPU a local rank takes in a job: what processes say of their node, the decision, and what follows from it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from fact_helpers import facts_of
from test_arrange import Job, arranged, config_of

from hpc_train.cluster.spec import Cluster, Gpu, Link, Node
from hpc_train.config.cluster import ClusterConfig
from hpc_train.config.run import RunConfig
from hpc_train.interfaces import Task
from hpc_train.placement.node.cpu_binding import parse_cpus
from hpc_train.runtime.arrange_ranks import find_assignment_problem
from hpc_train.runtime.binding import survey_node
from hpc_train.runtime.gpu_assignment import GpuAssignment, assign_gpus, seat_ranks
from hpc_train.runtime.host_info import ProcessInfo
from hpc_train.runtime.rank_assignment import RankAssignment, decide_assignment, hash_assignment

PCI = [f"0000:{bus:02x}:00.0" for bus in (7, 11, 72, 76)]
BRIDGED = {(0, 2), (1, 3)}
"""NVLink bridges join cards of different sockets; the launcher's order makes pairs of 0 and 1, and of 2 and 3."""


def config_with(tp: int = 2, **launch: object) -> RunConfig:
    config = config_of(**launch)
    config.parallel.strategy, config.parallel.tp, config.parallel.dp_replicate = "zero3", tp, 1
    config.parallel.dp_shard = -1
    config.model.hidden, config.model.heads = 1024, 16  # type: ignore[union-attr]
    return config


def describe(bridged: set[tuple[int, int]]) -> Cluster:
    links = tuple(
        Link("n", f"GPU{a}", f"GPU{b}", "NV12" if (a, b) in bridged else "SYS")
        for a, b in itertools.combinations(range(4), 2)
    )
    return Cluster("machine", (Node("n", tuple(Gpu(f"GPU{n}", pci=pci) for n, pci in enumerate(PCI))),), links)


def node_facts(nodes: int = 1, bridged: set[tuple[int, int]] = BRIDGED) -> list[list[ProcessInfo]]:
    """What the processes of nodes of four GPUs say, from what such a node is described as."""
    survey = survey_node(lambda: describe(bridged))
    infos = [
        replace(
            info,
            gpu=PCI[info.local],
            near=f"{2 * info.local}-{2 * info.local + 1}",
            visible_gpus=4,
            gpu_links=survey.gpu_links if info.local == 0 else {},
        )
        for info in facts_of(nodes, 4)
    ]
    return [infos[start : start + 4] for start in range(0, len(infos), 4)]


@pytest.mark.parametrize("nodes", [1, 2])
def test_pairs_of_tp_take_the_bridges(nodes: int) -> None:
    found = assign_gpus(config_with(), node_facts(nodes))
    assert {frozenset(found.gpus[:2]), frozenset(found.gpus[2:])} == {frozenset({0, 2}), frozenset({1, 3})}
    assert found.reason is not None
    assert "groups take the wider links of a node" in found.reason


def test_the_processors_are_those_next_to_the_gpu_that_a_rank_takes() -> None:
    (node,) = node_facts()
    seats = seat_ranks(node, (0, 2, 1, 3))
    assert [seat.near for seat in seats] == [parse_cpus(text) for text in ("0-1", "4-5", "2-3", "6-7")]
    assert [seat.near for seat in seat_ranks(node, ())] == [parse_cpus(text) for text in ("0-1", "2-3", "4-5", "6-7")]
    assert all(seat.allowed == parse_cpus("0-7") for seat in seats)


def change(nodes: list[list[ProcessInfo]], node: int, local: int, **values: object) -> list[list[ProcessInfo]]:
    nodes[node][local] = replace(nodes[node][local], **values)  # type: ignore[arg-type]
    return nodes


STAYS = {
    "launcher's order is asked for": (config_with(placement="launcher"), node_facts()),
    "neighbours are bridged": (config_with(), node_facts(bridged={(0, 1), (2, 3)})),
    "one group has them all": (config_with(tp=4), node_facts()),
    "a task sees one GPU": (config_with(), change(node_facts(), 0, 2, visible_gpus=1)),
    "a GPU is not known": (config_with(), change(node_facts(), 0, 3, gpu=None)),
    "two ranks share a GPU": (config_with(), change(node_facts(), 0, 3, gpu=PCI[2])),
    "links are not known": (config_with(), change(node_facts(), 0, 0, gpu_links={})),
}


@pytest.mark.parametrize("case", list(STAYS))
def test_the_launchers_gpus_stay_where(case: str) -> None:
    assert assign_gpus(*STAYS[case]) == GpuAssignment()


def test_nodes_that_differ_keep_their_order_and_say_so() -> None:
    nodes = [*node_facts(), *node_facts(bridged={(0, 1), (2, 3)})]
    found = assign_gpus(config_with(), nodes)
    assert found.gpus == ()
    assert found.reason == "local rank n takes GPU n: the nodes' GPUs are not joined alike"


def test_degrees_that_do_not_fit_are_no_reason_to_fail() -> None:
    found = assign_gpus(config_with(tp=3), node_facts())
    assert found.gpus == ()
    assert found.reason is not None
    assert found.reason.startswith("local rank n takes GPU n: ")


def test_a_plan_that_gives_a_gpu_twice_is_objected_to() -> None:
    infos = facts_of(1, 4)
    plan = decide_assignment(RunConfig(), infos, 4, lambda _config, _nodes: None)  # type: ignore[arg-type,return-value]
    task = Task(0, 4, 0, 0, 1, "slurm", "n0")

    def problem(assignment: RankAssignment) -> str | None:
        return find_assignment_problem(assignment.to_text(), hash_assignment(assignment.to_text()), task)

    assert problem(replace(plan, gpus=[0, 2, 1, 3])) is None
    assert problem(replace(plan, gpus=[0, 0, 1, 3])) == "the plan gives two local ranks the same GPU"


def site(environment: dict[str, str | None]) -> RunConfig:
    config = config_of(bind=False, placement="launcher")
    config.cluster = ClusterConfig(name="here", environment=environment)
    config.cluster.fabric.interface = "lo"
    return config


def test_what_is_set_can_be_refused_and_replaced_by_the_site(tmp_path: Path) -> None:
    topology = tmp_path / "topo.xml"
    topology.write_text('<system version="1"/>')
    config = site({"NCCL_SOCKET_IFNAME": None, "NCCL_TOPO_FILE": str(topology), "FI_PROVIDER": "cxi"})
    (tmp_path / "store").mkdir()
    found = arranged(Job(tmp_path / "store", config=config, env={"FI_PROVIDER": "mine"}))
    for outcome in found:
        assert outcome.refused is None
        assert outcome.env["NCCL_TOPO_FILE"] == str(topology)
        assert "NCCL_SOCKET_IFNAME" not in outcome.env
        assert "FI_PROVIDER" not in outcome.env, "what the user has set stays"
    lines = found[0].lines
    assert f"set NCCL_TOPO_FILE={topology} (cluster.environment)" in lines
    assert "did not set NCCL_SOCKET_IFNAME, as cluster.environment asks" in lines
    assert "kept your FI_PROVIDER" in lines


def test_a_topology_file_that_is_not_there_is_refused_on_every_process(tmp_path: Path) -> None:
    config = site({"NCCL_TOPO_FILE": str(tmp_path / "none.xml")})
    found = arranged(Job(tmp_path, config=config))
    assert {outcome.refused for outcome in found} == {
        f"cluster.environment: NCCL_TOPO_FILE={tmp_path}/none.xml is not a file on n0; "
        "expected NCCL's topology XML there"
    }
