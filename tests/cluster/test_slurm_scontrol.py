"""Asking scontrol where it does not answer. (tests/slurm asks a real one.)"""

from __future__ import annotations

import pytest

from hpc_train.cluster.readers.slurm.slurm_topology import query_topology
from hpc_train.cluster.spec import Switch
from hpc_train.errors import UserError


@pytest.mark.parametrize("command", [["no-such-command-here"], ["false"], ["true"], ["sleep", "9"], ["echo", "none"]])
def test_no_topology_is_none(command: list[str]) -> None:
    assert query_topology(command, timeout=0.5) is None


def test_what_is_printed_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_TOPO_LEN", "10")
    line = "SwitchName=leaf$SLURM_TOPO_LEN Level=0 LinkSpeed=1 Nodes=n[1-2]"
    read = query_topology(["sh", "-c", f'echo "{line}"'])
    assert read is not None
    assert read.switches == (Switch("leaf", 0, ("n1", "n2")),)


def test_a_strange_answer_is_refused() -> None:
    with pytest.raises(UserError, match="echo SwitchName=a Level=0:1: "):
        query_topology(["echo", "SwitchName=a Level=0"])
