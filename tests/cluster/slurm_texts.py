"""Write trees, given as {switch: its nodes or its switches}, in Slurm's own formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Spec:
    """A cluster: leaves {name: nodes} and upper switches {name: switches below}, in the order of the file."""

    leaves: Mapping[str, Sequence[str]] = field(default_factory=dict)
    upper: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def level(self, switch: str) -> int:
        return 0 if switch in self.leaves else 1 + max(self.level(lower) for lower in self.upper[switch])

    def nodes(self, switch: str) -> list[str]:
        """Return all nodes below a switch, each once."""
        if switch in self.leaves:
            return list(self.leaves[switch])
        return list(dict.fromkeys(node for lower in self.upper[switch] for node in self.nodes(lower)))

    def path(self, node: str) -> tuple[str, ...]:
        """Return the path to a node in a tree without duplicates."""
        at = next(leaf for leaf, nodes in self.leaves.items() if node in nodes)
        found = [at]
        while above := [name for name, below in self.upper.items() if at in below]:
            (at,) = above
            found.insert(0, at)
        return tuple(found)


def topology_conf(spec: Spec, upper_first: bool = False) -> str:
    leaves = [f"SwitchName={name} Nodes={','.join(nodes)}" for name, nodes in spec.leaves.items()]
    upper = [f"SwitchName={name} Switches={','.join(below)}" for name, below in spec.upper.items()]
    return "".join(f"{line}\n" for line in (upper + leaves if upper_first else leaves + upper))


def shown_tree(spec: Spec, upper_first: bool = False) -> str:
    order = [*spec.upper, *spec.leaves] if upper_first else [*spec.leaves, *spec.upper]
    return "".join(f"{_shown_switch(spec, name)}\n" for name in order)


def _shown_switch(spec: Spec, name: str) -> str:
    nodes = f" Nodes={','.join(sorted(spec.nodes(name)))}" if spec.nodes(name) else ""
    switches = f" Switches={','.join(spec.upper[name])}" if name in spec.upper else ""
    return f"SwitchName={name} Level={spec.level(name)} LinkSpeed=1{nodes}{switches}"


def shown_blocks(blocks: Mapping[str, Sequence[str]], aggregated: Sequence[Sequence[str]], size: int) -> str:
    """Return what scontrol shows of blocks. aggregated: the base blocks of each aggregated block."""
    lines = [(f"BlockName={name}", nodes, size) for name, nodes in blocks.items()]
    for names in aggregated:
        nodes = [node for name in names for node in blocks[name]]
        lines.append((f"AggregatedBlock={','.join(names)}", nodes, size * len(names)))
    return "".join(
        f"{name} BlockIndex={index} Nodes={','.join(nodes)} BlockSize={size}\n"
        for index, (name, nodes, size) in enumerate(lines)
    )


def tree_yaml(name: str, spec: Spec, default: bool) -> str:
    lines = [f"- topology: {name}", f"  cluster_default: {str(default).lower()}", "  tree:", "    switches:"]
    for switch, below in spec.upper.items():
        lines += [f"      - switch: {switch}", f"        children: {','.join(below)}"]
    for leaf, nodes in spec.leaves.items():
        lines += [f"      - switch: {leaf}", f"        nodes: {','.join(nodes)}"]
    return "\n".join(lines) + "\n"


def topograph_model(spec: Spec) -> str:
    lines = ["switches:"]
    for switch, below in spec.upper.items():
        lines += [f"  {switch}:", "    switches:", *(f"    - {name}" for name in below)]
    lines.append("blocks:")
    for leaf, nodes in spec.leaves.items():
        lines += [f"- switch: {leaf}", "  nodes:", *(f'  - "{node}"' for node in nodes)]
    return "\n".join(lines) + "\n"
