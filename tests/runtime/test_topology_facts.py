"""Which switches a node hangs on, by a file, by Slurm's addresses and by scontrol; and what stops the search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fact_helpers import facts_of

from hpc_train.cluster.spec import Cluster, Switch
from hpc_train.config.cluster import ClusterConfig
from hpc_train.errors import UserError
from hpc_train.runtime.facts import Facts
from hpc_train.runtime.plan import NotPlaced
from hpc_train.runtime.search import domains_of
from hpc_train.runtime.topology import paths_of


def heads(*addresses: str, pattern: str = "switch.switch.node") -> list[Facts]:
    """Facts of nodes n0, n1, ... with these addresses (without the node); empty: none."""
    found = []
    for number, address in enumerate(addresses):
        name = f"n{number}"
        slurm = {"SLURMD_NODENAME": name}
        if address:
            slurm |= {"SLURM_TOPOLOGY_ADDR": f"{address}.{name}", "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
        found.append(replace(facts_of(number + 1, 1)[number], slurm=slurm))
    return found


def unasked() -> Cluster | None:
    raise AssertionError("scontrol is not to be asked")


def counted(cluster: Cluster | None) -> tuple[list[int], Callable[[], Cluster | None]]:
    calls: list[int] = []

    def ask() -> Cluster | None:
        calls.append(1)
        return cluster

    return calls, ask


def test_addresses_of_slurm() -> None:
    found = paths_of(ClusterConfig(name="x"), heads("top.a", "top.b"), unasked)
    assert found == {"n0": ("top", "a"), "n1": ("top", "b")}


def test_dotted_names_are_asked_for_once() -> None:
    switches = (Switch("s.1", 1), Switch("l.1", 0), Switch("l.2", 0))
    calls, ask = counted(Cluster("slurm_tree", switches=switches))
    assert paths_of(ClusterConfig(name="x"), heads("s.1.l.1", "s.1.l.2"), ask) == {
        "n0": ("s.1", "l.1"),
        "n1": ("s.1", "l.2"),
    }
    assert calls == [1]


def test_dotted_names_that_nobody_knows_are_one_name() -> None:
    _, ask = counted(None)
    assert paths_of(ClusterConfig(name="x"), heads("s.1.l.1", "s.1.l.2"), ask) == {
        "n0": ("s.1.l.1",),
        "n1": ("s.1.l.2",),
    }


def test_a_flat_slurm_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = [replace(head, slurm={**head.slurm, "SLURM_TOPOLOGY_ADDR": head.host}) for head in heads("", "")]
    assert paths_of(ClusterConfig(name="x"), flat, unasked) is None
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert paths_of(ClusterConfig(name="x"), heads("", ""), unasked) is None


def test_scontrol_answers_where_a_launcher_hides_the_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    shown = Cluster(
        "slurm_tree", switches=(Switch("a", 0, ("n0",)), Switch("b", 0, ("n1",)), Switch("t", 1, (), ("a", "b")))
    )
    bare = facts_of(2, 1)
    assert paths_of(ClusterConfig(name="x"), bare, counted(shown)[1]) == {"n0": ("t", "a"), "n1": ("t", "b")}
    assert paths_of(ClusterConfig(name="x"), bare, counted(None)[1]) is None


def test_a_file_is_asked_first_and_knows_short_names(tmp_path: Path) -> None:
    file = tmp_path / "topology.conf"
    file.write_text("SwitchName=l1 Nodes=n0\nSwitchName=l2 Nodes=n1\nSwitchName=t Switches=l[1-2]\n")
    given = heads("top.a", "top.b")
    given[1] = replace(given[1], host="n1.example.org")
    config = ClusterConfig(name="x", topology=str(file))
    assert paths_of(config, given, unasked) == {"n0": ("t", "l1"), "n1.example.org": ("t", "l2")}
    with pytest.raises(NotPlaced, match=r"topology.conf does not tell where n2 is \(1 of 3 nodes\)"):
        paths_of(config, heads("a", "b", "c"), unasked)
    with pytest.raises(UserError, match=r"absent.conf: No such file"):
        paths_of(ClusterConfig(name="x", topology=str(tmp_path / "absent.conf")), given, unasked)


def test_what_contradicts_itself_or_lacks_a_node_is_not_used() -> None:
    with pytest.raises(NotPlaced, match=r"SLURM_TOPOLOGY_ADDR is not set on n1 \(1 of 2 nodes\)"):
        paths_of(ClusterConfig(name="x"), heads("top.a", ""), unasked)
    same = heads("top.a", "top.b")
    same[1] = replace(same[1], slurm=same[0].slurm)  # mpirun gives every rank the environment of the first node
    with pytest.raises(NotPlaced, match="2 nodes have the environment of n0; start the ranks by srun"):
        paths_of(ClusterConfig(name="x"), same, unasked)


def test_nvlink_domains_of_nodes() -> None:
    one, two = facts_of(2, 1)
    assert domains_of([replace(one, clique="c.1"), two]) == {"n0": "c.1"}
