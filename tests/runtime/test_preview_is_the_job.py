"""`topology place` shows the job's actual rank map and figures, whichever source locates the nodes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fact_helpers import facts_of
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_train.config.compose import compose
from hpc_train.config.run import RunConfig
from hpc_train.placement.allocation import find_allocation
from hpc_train.placement.placement_result import Placement, placement_to_json
from hpc_train.placement.search import make_placement_job, place_nodes
from hpc_train.runtime.host_info import ProcessInfo
from hpc_train.runtime.rank_assignment import search_placement


@dataclass(frozen=True)
class Site:
    """Locations of nodes, and the job's nodes in the launcher's order."""

    block: bool
    units: tuple[tuple[str, ...], ...]
    """Nodes of each leaf or block."""
    speeds: tuple[int, ...]
    """LinkSpeed of each leaf or block."""
    nodes: tuple[str, ...]
    oversubscription: float | None
    nvlink_domain_gpus: int

    def conf(self) -> str:
        """Return the topology.conf."""
        if self.block:
            return "".join(f"BlockName=u{n} Nodes={','.join(held)}\n" for n, held in enumerate(self.units))
        lines = [
            f"SwitchName=u{n} Nodes={','.join(held)} LinkSpeed={speed}\n"
            for n, (held, speed) in enumerate(zip(self.units, self.speeds, strict=True))
        ]
        return "".join(lines) + f"SwitchName=top Switches=u[0-{len(self.units) - 1}]\n"

    def shown(self) -> str:
        """Return what scontrol prints for that topology.conf."""
        if self.block:
            return "".join(
                f"BlockName=u{n} BlockIndex={n} Nodes={','.join(held)} BlockSize={len(held)}\n"
                for n, held in enumerate(self.units)
            )
        lines = [
            f"SwitchName=u{n} Level=0 LinkSpeed={speed} Nodes={','.join(held)}\n"
            for n, (held, speed) in enumerate(zip(self.units, self.speeds, strict=True))
        ]
        everything = ",".join(node for held in self.units for node in held)
        below = f"u[0-{len(self.units) - 1}]"
        return "".join(lines) + f"SwitchName=top Level=1 LinkSpeed=1 Nodes={everything} Switches={below}\n"

    def facts(self, addresses: bool) -> list[list[ProcessInfo]]:
        """Return what the job's nodes report about themselves; addresses: whether srun told them theirs."""
        unit = {node: f"u{n}" for n, held in enumerate(self.units) for node in held}
        found = []
        for number, node in enumerate(self.nodes):
            slurm = {"SLURMD_NODENAME": node}
            if addresses and node in unit:
                above = unit[node] if self.block else f"top.{unit[node]}"
                pattern = "block.node" if self.block else "switch.switch.node"
                slurm |= {"SLURM_TOPOLOGY_ADDR": f"{above}.{node}", "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
            found.append([replace(facts_of(number + 1, 1)[number], host=node, slurm=slurm)])
        return found


@st.composite
def sites(draw: st.DrawFn) -> Site:
    sizes = draw(st.lists(st.integers(2, 5), min_size=2, max_size=4))
    names = [f"n{number}" for number in range(sum(sizes))]
    units, start = [], 0
    for size in sizes:
        units.append(tuple(names[start : start + size]))
        start += size
    unnamed = draw(st.sampled_from([[], [], ["z1"], ["z1", "z2"]]))
    count = draw(st.sampled_from([4, 8] if len(names) >= 8 else [4]))
    nodes = draw(st.permutations(names))[: count - len(unnamed)] + unnamed
    return Site(
        block=draw(st.booleans()),
        units=tuple(units),
        speeds=tuple(draw(st.sampled_from([1, 1, 100, 25])) for _ in sizes),
        nodes=tuple(draw(st.permutations(nodes))),
        oversubscription=draw(st.sampled_from([None, 1.0, 3.0])),
        nvlink_domain_gpus=draw(st.sampled_from([1, 4, 8])),
    )


@cache
def _composed(nodes: int) -> RunConfig:
    shape = ("parallel.dp_replicate=2", f"parallel.dp_shard={nodes // 2}", "parallel.strategy=zero3")
    return compose(
        ["cluster=slurm", "cluster.node.gpus=1", "cluster.node.gpu_link_gb_s=300", "model=llama_125m", *shape]
    )


def config_of(site: Site, topology: str | None) -> RunConfig:
    config = _composed(len(site.nodes))
    cluster = replace(
        config.cluster,
        topology=topology,
        fabric=replace(config.cluster.fabric, oversubscription=site.oversubscription),
        node=replace(config.cluster.node, nvlink_domain_gpus=site.nvlink_domain_gpus),
    )
    return replace(config, cluster=cluster)


def preview(config: RunConfig, nodes: Sequence[str] | None) -> Placement:
    listed = ",".join(nodes) if nodes is not None else None
    return place_nodes(make_placement_job(config, find_allocation(config, listed, os.environ), 1))


def told(placement: Placement) -> dict[str, Any]:
    found = placement_to_json(placement)
    found.pop("seconds")
    return found


@settings(max_examples=40, deadline=None)
@given(sites())
def test_on_a_file(site: Site) -> None:
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ):
        os.environ.pop("SLURM_JOB_ID", None)
        file = Path(folder, "topology.conf")
        file.write_text(site.conf())
        config = config_of(site, str(file))
        job = search_placement(config, site.facts(addresses=False))
        assert told(preview(config, site.nodes)) == told(job)


@settings(max_examples=25, deadline=None)
@given(sites(), st.booleans())
def test_in_a_slurm_job(site: Site, addresses: bool) -> None:
    """The preview asks in the allocation's shell, the job on its own nodes; a real process answers both."""
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ):
        command = Path(folder, "scontrol")
        Path(folder, "said").write_text(site.shown())
        command.write_text(f"#!/bin/sh\ncat '{folder}/said'\n")
        command.chmod(0o755)
        os.environ |= {
            "PATH": f"{folder}:/usr/bin:/bin",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": ",".join(site.nodes),
        }
        config = config_of(site, None)
        job = search_placement(config, site.facts(addresses))
        assert told(preview(config, None)) == told(job)
