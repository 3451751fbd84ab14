"""Write NCCL's topology XML, a dump or a vendor's file, from a compact spec of a node's PCI tree."""

from __future__ import annotations

from dataclasses import dataclass, field

SWITCHES = ("0000:f1:00.0", "0000:f2:00.0")
"""NVSwitches, where the spec has them."""


@dataclass(frozen=True)
class Leaf:
    """A GPU or a NIC."""

    kind: str
    """gpu or net."""
    path: tuple[int, ...]
    """Which bridge below the processor, which below that, ...: () hangs on the processor itself."""
    cpu: int = 0
    device: str | None = None
    mbit_s: int = 400_000


@dataclass(frozen=True)
class Spec:
    """A node. Leaves are numbered in their order, GPUs and NICs separately."""

    cpus: tuple[tuple[int | None, str | None], ...]
    """NUMA node and affinity mask of each processor."""
    leaves: tuple[Leaf, ...]
    nvlinks: dict[tuple[int, int | str], int] = field(default_factory=dict)
    """(GPU, other GPU or "switch") -> count, as that GPU lists it."""
    version: int = 1
    link: str = "nvlink"

    def of(self, kind: str) -> list[Leaf]:
        return [leaf for leaf in self.leaves if leaf.kind == kind]

    def address(self, leaf: Leaf) -> str:
        return f"{leaf.cpu:04x}:{0x10 + self.leaves.index(leaf):02x}:00.0"


def render(spec: Spec, vendor: bool = False) -> str:
    """Return the file. A vendor's file names neither GPUs nor NICs, only their PCI class."""
    lines = ["<!-- a node -->", f'<system version="{spec.version}">']
    for cpu, (numa, mask) in enumerate(spec.cpus):
        about = (f' numaid="{numa}"' if numa is not None else "") + (f' affinity="{mask}"' if mask else "")
        lines.append(f'  <cpu{about} arch="x86_64">')
        lines += _below(spec, cpu, (), vendor)
        lines.append("  </cpu>")
    return "\n".join([*lines, "</system>", ""])


def _below(spec: Spec, cpu: int, path: tuple[int, ...], vendor: bool) -> list[str]:
    here = [leaf for leaf in spec.leaves if leaf.cpu == cpu and leaf.path == path]
    deeper = {
        leaf.path[len(path)] for leaf in spec.leaves if leaf.cpu == cpu and leaf.path[: len(path)] == path != leaf.path
    }
    indent = "    " + "  " * len(path)
    lines = []
    for number in sorted(deeper):
        below = (*path, number)
        address = f"{cpu:04x}:{0x80 + len(below) * 16 + sum(below):02x}:{number:02x}.0"
        lines.append(f'{indent}<pci busid="{address}" class="0x060400" link_width="16">')
        lines += [*_below(spec, cpu, below, vendor), f"{indent}</pci>"]
    for leaf in here:
        lines += [indent + line for line in _leaf(spec, leaf, vendor)]
    return lines


def _leaf(spec: Spec, leaf: Leaf, vendor: bool) -> list[str]:
    code = "0x030200" if leaf.kind == "gpu" else "0x020700"
    head = f'<pci busid="{spec.address(leaf)}" class="{code}" link_speed="32.0 GT/s PCIe"'
    if vendor:
        return [head + "/>"]
    number = spec.of(leaf.kind).index(leaf)
    if leaf.kind == "net":
        net = f'<net name="{leaf.device}" dev="{number}" speed="{leaf.mbit_s}" port="1" gdr="1"/>'
        return [head + ">", "  <nic>", "    " + net, "  </nic>", "</pci>"]
    links = [line for (gpu, to), count in spec.nvlinks.items() if gpu == number for line in _links(spec, to, count)]
    return [head + ">", f'  <gpu dev="{number}" sm="90" rank="{number}" gdr="1">', *links, "  </gpu>", "</pci>"]


def _links(spec: Spec, to: int | str, count: int) -> list[str]:
    if to == "switch":
        halves = zip(SWITCHES, (count // 2, count - count // 2), strict=True)
        return [f'    <nvlink target="{at}" count="{count}" tclass="0x068000"/>' for at, count in halves if count]
    target = spec.address(spec.of("gpu")[int(to)])
    return [f'    <{spec.link} target="{target}" count="{count}" tclass="0x030200"/>']
