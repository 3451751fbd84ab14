"""What a rank's variables become: the NIC next to its GPU or processors, the user's values, and the site's."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from fact_helpers import facts_of

from hpc_train.cluster.spec import Nic
from hpc_train.cluster.sysfs import read_numa_nodes
from hpc_train.interfaces import Task
from hpc_train.placement.communication_environment import VariableSetting
from hpc_train.placement.node.cpu_binding import parse_cpus
from hpc_train.runtime.binding import NodeSurvey
from hpc_train.runtime.host_info import ProcessInfo
from hpc_train.runtime.rank_environment import RankEnvironment, choose_gpu_nic_settings, choose_mpi_nic_settings

GPUS = ("0000:07:00.0", "0000:0b:00.0")
VARIABLES = {f"mlx5_{n}": {"UCX_NET_DEVICES": f"mlx5_{n}:1", "FI_VERBS_DEVICE_NAME": f"mlx5_{n}"} for n in range(2)}
NIC = [VariableSetting("UCX_NET_DEVICES", "mlx5_1:1", "near")]


def members(nics: int = 2) -> list[ProcessInfo]:
    """The two ranks of a node, whose GPUs have the NICs in the other order."""
    head, other = facts_of(1, 2)
    nic_of = {GPUS[0]: "mlx5_1", GPUS[1]: "mlx5_0"}
    names = [f"mlx5_{n}" for n in range(nics)]
    return [replace(head, nics=names, nic_of=nic_of, nic_variables=VARIABLES), other]


def task_of(processes: int = 4, nodes: int = 2) -> Task:
    return Task(1, processes, 1, 0, nodes, "slurm", "n0", None)


def values(settings: list[VariableSetting]) -> dict[str, str]:
    return {setting.name: setting.value for setting in settings}


def test_the_nic_of_the_gpu_that_a_rank_takes() -> None:
    assert values(choose_gpu_nic_settings(members(), GPUS[0], 2)) == {"UCX_NET_DEVICES": "mlx5_1:1"}
    assert values(choose_gpu_nic_settings(members(), GPUS[1], 2)) == {"UCX_NET_DEVICES": "mlx5_0:1"}


@pytest.mark.parametrize(
    ("nics", "gpu", "nodes"), [(2, GPUS[0], 1), (2, None, 2), (3, GPUS[0], 2), (2, "0000:ff:00.0", 2)]
)
def test_no_nic_on_one_node_without_gpu_or_with_nics_to_spare(nics: int, gpu: str | None, nodes: int) -> None:
    assert choose_gpu_nic_settings(members(nics), gpu, nodes) == []


def test_what_the_user_has_set_stays_and_is_said() -> None:
    env = {"UCX_NET_DEVICES": "mlx5_7:1"}
    here = RankEnvironment(env, {})
    here.set([], NIC)
    assert env == {"UCX_NET_DEVICES": "mlx5_7:1"}
    assert here.describe() == ["kept your UCX_NET_DEVICES"]
    assert (here.per_rank, here.shared) == ({}, [])


def test_the_site_refuses_or_replaces_the_nic() -> None:
    refused, replaced = RankEnvironment({}, {"UCX_NET_DEVICES": None}), RankEnvironment({}, {"UCX_NET_DEVICES": "all"})
    for here in (refused, replaced):
        here.set([], NIC)
    assert refused.env == {}
    assert refused.describe() == ["did not set UCX_NET_DEVICES, as cluster.environment asks"]
    assert replaced.env == {"UCX_NET_DEVICES": "all"}
    assert replaced.describe() == ["set UCX_NET_DEVICES=all (cluster.environment)"]
    assert (replaced.per_rank, [setting.name for setting in replaced.shared]) == ({}, ["UCX_NET_DEVICES"])


def test_what_ranks_share_is_kept_apart_from_a_ranks_own() -> None:
    shared = [VariableSetting("GLOO_SOCKET_IFNAME", "hsn0", "the network")]
    here = RankEnvironment({}, {"NCCL_DEBUG": "WARN"})
    here.set(shared, NIC)
    assert here.per_rank == {"UCX_NET_DEVICES": "mlx5_1:1"}
    assert [setting.name for setting in here.shared] == ["GLOO_SOCKET_IFNAME", "NCCL_DEBUG"]
    assert here.describe(quiet=shared) == [
        "set UCX_NET_DEVICES=mlx5_1:1 (near)",
        "set NCCL_DEBUG=WARN (cluster.environment)",
    ]


def test_before_mpi_come_the_variables_of_its_transports_only() -> None:
    here = RankEnvironment({}, {"UCX_TLS": "rc", "NCCL_ALGO": "Ring", "FI_PROVIDER": None})
    here.set_before_mpi(NIC)
    assert here.env == {"UCX_NET_DEVICES": "mlx5_1:1", "UCX_TLS": "rc"}
    here.set([], [])
    assert here.env["NCCL_ALGO"] == "Ring"
    assert [setting.name for setting in here.applied] == ["UCX_NET_DEVICES", "UCX_TLS", "NCCL_ALGO"]


def survey_with(nics: list[Nic]) -> NodeSurvey:
    return NodeSurvey(fit_nics=nics, nic_of={GPUS[0]: "mlx5_1"}, nic_variables=VARIABLES)


def test_mpi_uses_the_nic_of_the_launchers_gpu_or_of_the_ranks_processors() -> None:
    allowed = os.sched_getaffinity(0)
    homes = [node.id for node in read_numa_nodes() if parse_cpus(node.cpus) & allowed]
    nics = [Nic(f"NIC{n}", f"mlx5_{n}", homes[0] if homes else 0) for n in range(2)]
    with_gpu = choose_mpi_nic_settings(task_of(), GPUS[0], lambda: survey_with(nics))
    assert values(with_gpu) == {"UCX_NET_DEVICES": "mlx5_1:1"}
    assert values(choose_mpi_nic_settings(task_of(), None, lambda: survey_with(nics))) == (
        VARIABLES["mlx5_1"] if len(homes) == 1 else {}
    )
    assert choose_mpi_nic_settings(task_of(nodes=1), None, lambda: survey_with(nics)) == []
    assert choose_mpi_nic_settings(task_of(processes=2), None, lambda: survey_with(nics)) == []
