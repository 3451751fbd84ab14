"""Find where the nodes of a job are: their switches and NVLink domains. Both `topology place` and the job use this.

Sources of switches, in this order: the file of cluster.topology; `scontrol show topology`; for nodes that it does not
name, their own SLURM_TOPOLOGY_ADDR. NVLink domains that span nodes come from NVML on the nodes; else from the file's
GPUs; else from Slurm's blocks, if the cluster's description has domains of that size. A node that no source names is
taken to be alone on a switch; the others are placed as usual.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpc_train.cluster.compute_nodes import describe_hardware, find_compute_nodes, group_by_hardware
from hpc_train.cluster.hostlist import compress_hostlist, expand_hostlist
from hpc_train.cluster.readers.slurm.slurm_environment import parse_address
from hpc_train.cluster.readers.slurm.slurm_topology import query_topology
from hpc_train.cluster.spec import Cluster
from hpc_train.cluster.switch_tree import UnitUplink, find_paths, find_uplinks
from hpc_train.config.cluster import ClusterConfig
from hpc_train.errors import UserError

TopologyQuery = Callable[[], Cluster | None]
"""Returns what `scontrol show topology` says; None if it says nothing."""
_SLURM = "Slurm"
_MAX_NAMED = 6
"""Nodes that a message names."""
_NOTHING = "no source says which switches the nodes are on; give cluster.topology=FILE"


@dataclass(frozen=True)
class JobHost:
    """A node of the job, with the facts that only the node itself knows."""

    name: str
    slurm_name: str | None = None
    """Slurm's name for it, SLURMD_NODENAME."""
    address: str | None = None
    """SLURM_TOPOLOGY_ADDR of a job step on it."""
    pattern: str | None = None
    """SLURM_TOPOLOGY_ADDR_PATTERN of the same step."""
    clique: str | None = None
    """Its NVLink domain by NVML; None if NVML does not run, or reports none that spans nodes."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names that a source may use for the node."""
        return (self.slurm_name or self.name, self.name, self.name.partition(".")[0])


@dataclass(frozen=True)
class NodeLocations:
    """The nodes of one job, and where they are as far as it is known."""

    nodes: tuple[str, ...]
    """Nodes in the launcher's order."""
    paths: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Switches of each node, top to leaf; a node not listed here is alone on a switch."""
    domains: Mapping[str, str] = field(default_factory=dict)
    """NVLink domain of each node, if domains span nodes."""
    source: str = "nobody"
    """Name of the source."""
    uplinks: Mapping[tuple[str, ...], UnitUplink] = field(default_factory=dict)
    """Uplink capacity of the switches by path from the top, if the source gives it."""
    missing: tuple[str, ...] = ()
    """Nodes that the source does not mention."""
    notes: tuple[str, ...] = ()
    """Notes for the user, one line each."""
    problem: str | None = None
    """Why the locations are unknown."""
    nics: int = 0
    """NICs of most of the nodes, according to the source; 0: unknown."""
    node_gbit_s: float = 0.0
    """Total line rate of these NICs; 0: unknown."""


def locate_hosts(
    cluster: ClusterConfig, hosts: Sequence[JobHost], in_slurm: bool, ask: TopologyQuery = query_topology
) -> NodeLocations:
    """Locate the hosts, given in the launcher's order. Asks Slurm at most once, and only inside its jobs.

    Raises UserError for a cluster.topology that cannot be read or lists no switches.
    """
    hosts, problems = _drop_shared_environments(hosts)
    if cluster.topology is not None:
        return _locate_on_switches(cluster, hosts, read_switch_file(Path(cluster.topology)), cluster.topology)
    shown = ask() if in_slurm else None
    addressed, wrong = _parse_addresses(hosts, shown)
    problems += wrong
    if shown is None or (addressed and _has_contradiction(hosts, shown, addressed)):
        notes = (
            [] if shown is None else ["`scontrol show topology` puts the nodes elsewhere than SLURM_TOPOLOGY_ADDR does"]
        )
        blocks = {host.name: path[-1] for host, path in _select_block_hosts(hosts, addressed)}
        facts = _SourceFacts("SLURM_TOPOLOGY_ADDR", addressed, blocks=blocks, notes=(*notes, *problems))
        return _make_locations(cluster, hosts, facts)
    return _locate_on_switches(cluster, hosts, shown, _SLURM, addressed)


def read_switch_file(file: Path) -> Cluster:
    """Read the cluster of a topology file. Raises UserError if it cannot be read, or no switch has nodes."""
    from hpc_train.cluster.readers.formats import read_topology_file

    file = file.expanduser()
    cluster = read_topology_file(file)
    if not any(switch.nodes for switch in cluster.switches):
        raise UserError(
            f"{file}: cluster.topology needs switches with nodes on them; this file has none "
            f"(it reads as {cluster.kind})"
        )
    return cluster


def choose_compute_nodes(cluster: ClusterConfig, topology: Cluster) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (compute nodes on switches in the file's order; one line on the other hosts, if any)."""
    compute = find_compute_nodes(topology, cluster.node.nics, cluster.node.nic_gbit_s)
    attached = [name for name, path in find_paths(topology, compute).items() if path]
    left_out = [name for name in attached if name not in compute]
    chosen = tuple(name for name in attached if name in compute)
    if not left_out:
        return chosen, ()
    usual = next(iter(group_by_hardware(topology, compute)), None)
    kinds = "; ".join(
        f"{_name_some(names)} with {kind}" for kind, names in group_by_hardware(topology, left_out).items()
    )
    return chosen, (
        f"{len(left_out)} hosts get no ranks, because their hardware is not that of compute nodes ({usual}): {kinds}; "
        "to choose nodes yourself give --nodes",
    )


def _locate_on_switches(
    cluster: ClusterConfig,
    hosts: Sequence[JobHost],
    topology: Cluster,
    source: str,
    addressed: Mapping[str, tuple[str, ...]] | None = None,
) -> NodeLocations:
    """Locate the hosts in a topology. addressed: paths of hosts that it does not name."""
    compute = find_compute_nodes(topology, cluster.node.nics, cluster.node.nic_gbit_s)
    path_by_name = _add_short_names({name: path for name, path in find_paths(topology, compute).items() if path})
    named = {
        host.name: next((path_by_name[name] for name in host.names if name in path_by_name), None) for host in hosts
    }
    paths = {name: path for name, path in named.items() if path} | {
        name: path for name, path in (addressed or {}).items() if not named.get(name)
    }
    facts = _SourceFacts(
        source=source,
        paths=paths,
        cliques=_select_hosts(hosts, _find_cliques(topology)),
        blocks=_select_hosts(hosts, _find_blocks(topology)),
        uplinks=find_uplinks(topology, compute),
        notes=topology.notes,
        topology=topology,
    )
    return _make_locations(cluster, hosts, facts)


@dataclass(frozen=True)
class _SourceFacts:
    """Facts about the hosts of a job from one source, by host name."""

    source: str
    paths: Mapping[str, tuple[str, ...]]
    cliques: Mapping[str, str] = field(default_factory=dict)
    blocks: Mapping[str, str] = field(default_factory=dict)
    uplinks: Mapping[tuple[str, ...], UnitUplink] = field(default_factory=dict)
    """By the path of a switch."""
    notes: Sequence[str] = ()
    topology: Cluster | None = None
    """Everything that the source lists, if it is a file or scontrol."""


def _make_locations(cluster: ClusterConfig, hosts: Sequence[JobHost], facts: _SourceFacts) -> NodeLocations:
    """Put together what is known of the nodes, with remarks on those that are missing."""
    paths, source, topology = facts.paths, facts.source, facts.topology
    domains, about_domains = _choose_domains(cluster, hosts, facts)
    missing = tuple(host.name for host in hosts if not paths.get(host.name))
    about = [f"{source} does not say where {_name_some(missing)} is; taken to be alone on a switch"] if missing else []
    problem = None
    if not paths and not domains:
        reason = f"{source} names none of the nodes ({_name_some(missing)})" if topology is not None else _NOTHING
        problem, about = ("; ".join([*facts.notes, reason]) if topology is None else reason), []
    nics, rate = _find_usual_network(hosts, topology) if topology is not None else (0, 0.0)
    return NodeLocations(
        nodes=tuple(host.name for host in hosts),
        paths=paths,
        domains=domains,
        source=source,
        uplinks=facts.uplinks,
        missing=missing,
        notes=(*facts.notes, *about, *about_domains),
        problem=problem,
        nics=nics,
        node_gbit_s=rate,
    )


def _add_short_names(paths: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Look nodes up by the source's names, and by their first parts if those are unique."""
    short = Counter(name.partition(".")[0] for name in paths)
    return {name.partition(".")[0]: path for name, path in paths.items() if short[name.partition(".")[0]] == 1} | dict(
        paths
    )


def _select_hosts(hosts: Sequence[JobHost], by_name: Mapping[str, str]) -> dict[str, str]:
    named = {host.name: next((by_name[name] for name in host.names if name in by_name), None) for host in hosts}
    return {name: value for name, value in named.items() if value is not None}


def _find_usual_network(hosts: Sequence[JobHost], topology: Cluster) -> tuple[int, float]:
    """Return (NICs, their total rate) of most of the hosts; (0, 0) if the source does not give it."""
    of_node = {node.name: describe_hardware(node) for node in topology.nodes if node.nics}
    kinds = Counter(next((of_node[name] for name in host.names if name in of_node), None) for host in hosts)
    kind = max(kinds, key=kinds.__getitem__, default=None)
    return (kind.nics, kind.gbit_s or 0.0) if kind is not None else (0, 0.0)


# NVLink domains. What a node measures (NVML) overrides any file, which may be out of date.


def _find_cliques(topology: Cluster) -> dict[str, str]:
    """Return the NVLink domain of each node whose GPUs are all in one domain."""
    cliques = {node.name: {gpu.clique for gpu in node.gpus} for node in topology.nodes}
    return {
        name: clique
        for name, of_node in cliques.items()
        if len(of_node) == 1 and (clique := next(iter(of_node))) is not None
    }


def _find_blocks(topology: Cluster) -> dict[str, str]:
    """Return Slurm's base block of each node."""
    if topology.kind != "slurm_block":
        return {}
    return {node: switch.name for switch in topology.switches if switch.level == 0 for node in switch.nodes}


def _choose_domains(
    cluster: ClusterConfig, hosts: Sequence[JobHost], facts: _SourceFacts
) -> tuple[dict[str, str], list[str]]:
    """Return (NVLink domain of each node, a note on it).

    What NVML measures in the job comes first, then the domains that a file names, then Slurm's blocks, if they can be
    NVLink domains.
    """
    cliques, blocks, topology = facts.cliques, facts.blocks, facts.topology
    chosen = blocks if _are_domains(cluster, blocks, topology) else {}
    measured = {host.name: host.clique for host in hosts if host.clique is not None}
    if measured:
        # They agree if every block is one measured domain, and every domain one block.
        pairs = {(measured[name], block) for name, block in chosen.items() if name in measured}
        disagree = len(pairs) != len({clique for clique, _ in pairs}) or len(pairs) != len(
            {block for _, block in pairs}
        )
        return measured, ["NVML reports other NVLink domains than Slurm's blocks; NVML's are used"] if disagree else []
    if cliques:
        return dict(cliques), []
    if chosen:
        gpus = cluster.node.nvlink_domain_gpus
        return dict(chosen), [
            f"Slurm's blocks are taken to be NVLink domains, as cluster.node.nvlink_domain_gpus={gpus} says; if "
            "NVML reports others in the job, those are used"
        ]
    if blocks and _count_domain_nodes(cluster) > 1:
        size = max(_count_block_nodes(blocks, topology).values())
        return {}, [
            f"Slurm's blocks have up to {size} nodes and an NVLink domain has {_count_domain_nodes(cluster)} "
            f"(cluster.node.nvlink_domain_gpus={cluster.node.nvlink_domain_gpus}): blocks are not taken for domains"
        ]
    return {}, []


def _count_domain_nodes(cluster: ClusterConfig) -> int:
    return cluster.node.nvlink_domain_gpus // max(cluster.node.gpus, 1)


def _count_block_nodes(blocks: Mapping[str, str], topology: Cluster | None) -> Counter[str]:
    """Count the nodes of each block that holds a job node: all of them if the source lists them, else the job's."""
    if topology is None:
        return Counter(blocks.values())
    used = set(blocks.values())
    return Counter({switch.name: len(switch.nodes) for switch in topology.switches if switch.name in used})


def _are_domains(cluster: ClusterConfig, blocks: Mapping[str, str], topology: Cluster | None) -> bool:
    """Whether NVLink domains span nodes here, and no block has more nodes than a domain can have."""
    within = _count_domain_nodes(cluster)
    return bool(blocks) and within > 1 and max(_count_block_nodes(blocks, topology).values()) <= within


# SLURM_TOPOLOGY_ADDR


def _drop_shared_environments(hosts: Sequence[JobHost]) -> tuple[list[JobHost], list[str]]:
    """Return (the hosts, without a Slurm environment that several of them share; one line on each shared one).

    A launcher other than Slurm's may give all ranks the environment of the first node.
    """
    count = Counter(host.slurm_name for host in hosts if host.slurm_name is not None)
    checked = [
        host
        if host.slurm_name is None or count[host.slurm_name] < 2
        else replace(host, slurm_name=None, address=None, pattern=None)
        for host in hosts
    ]
    return checked, [
        f"{number} nodes have the environment of {name}; start the ranks by srun"
        for name, number in count.items()
        if number > 1
    ]


def _parse_addresses(hosts: Sequence[JobHost], shown: Cluster | None) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Return (path of each host that has a valid address, problems of the others)."""
    names = frozenset(switch.name for switch in shown.switches) if shown is not None else frozenset[str]()
    paths: dict[str, tuple[str, ...]] = {}
    problems: list[str] = []
    for host in hosts:
        if host.address is None:
            continue
        try:
            if above := parse_address(host.address, host.pattern, host.names[0], names):
                paths[host.name] = above
        except UserError as error:
            problems.append(str(error))
    return paths, problems


def _has_contradiction(hosts: Sequence[JobHost], shown: Cluster, addressed: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether a node's address names none of the switches that scontrol lists above it."""
    on: dict[str, set[str]] = {}
    for switch in shown.switches:
        for node in switch.nodes:
            on.setdefault(node, set()).add(switch.name)
    return any(
        on[name].isdisjoint(_expand_switch_name(addressed[host.name][-1])) and addressed[host.name][-1] not in on[name]
        for host in hosts
        if host.name in addressed and (name := host.names[0]) in on
    )


def _expand_switch_name(name: str) -> list[str]:
    """Expand a name to the switches it stands for."""
    try:
        return expand_hostlist(name)
    except UserError:
        return [name]


def _select_block_hosts(
    hosts: Sequence[JobHost], addressed: Mapping[str, tuple[str, ...]]
) -> list[tuple[JobHost, tuple[str, ...]]]:
    """Return the hosts whose address says they are in a block."""
    return [
        (host, addressed[host.name])
        for host in hosts
        if host.name in addressed and (host.pattern or "").startswith("block")
    ]


def _name_some(names: Sequence[str]) -> str:
    """List a few names, and how many more there are."""
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"{compress_hostlist(names[:_MAX_NAMED])}{more}"
