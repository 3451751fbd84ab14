"""Which node each task is on, for each way in which srun deals them out."""

from __future__ import annotations

import pytest

from hpc_train.cluster.hostlist import list_task_hosts


@pytest.mark.parametrize(
    ("variables", "counts", "hosts"),
    [
        ({}, [2, 2], "a a b b"),
        ({"SLURM_DISTRIBUTION": "block:cyclic"}, [2, 1], "a a b"),
        ({"SLURM_DISTRIBUTION": "cyclic"}, [2, 2], "a b a b"),
        ({"SLURM_DISTRIBUTION": "cyclic:block,NoPack"}, [1, 3], "a b b b"),
        ({"SLURM_DISTRIBUTION": "plane", "SLURM_DIST_PLANESIZE": "2"}, [4, 3], "a a b b a a b"),
        ({"SLURM_DISTRIBUTION": "plane=3"}, [4, 4], "a a a b b b a b"),
        ({"SLURM_DISTRIBUTION": "cyclic"}, [0, 2], "b b"),
    ],
)
def test_the_node_of_each_task(variables: dict[str, str], counts: list[int], hosts: str) -> None:
    assert list_task_hosts(["a", "b"], counts, variables) == hosts.split()


@pytest.mark.parametrize("order", ["arbitrary", "plane", "plane=0", "something new"])
def test_no_node_is_named_where_the_order_is_not_known(order: str) -> None:
    assert list_task_hosts(["a", "b"], [1, 1], {"SLURM_DISTRIBUTION": order}) == ["", ""]
