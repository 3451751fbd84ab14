"""Write the output of `nvidia-smi topo -m` from a compact spec of a node, in every form that may reach a reader."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

LEGEND = """
Legend:

  X    = Self
  SYS  = between NUMA nodes (e.g., QPI/UPI)
  NODE = between PCIe Host Bridges within a NUMA node
  PHB  = over a PCIe Host Bridge (typically the CPU)
  PXB  = over multiple PCIe bridges (without the PCIe Host Bridge)
  PIX  = over at most a single PCIe bridge
  NV#  = over a bonded set of # NVLinks
"""


@dataclass(frozen=True)
class Spec:
    """A node. kinds: the connection of every pair of devices, GPUs first, in the order of itertools.combinations."""

    kinds: tuple[str, ...]
    affinity: tuple[tuple[str | None, int | str | None], ...]
    """Processors and NUMA node of each GPU; None: a blank CPU cell, N/A for the NUMA node."""
    nics: tuple[str, ...] = ()
    """Their devices."""
    nvlinks: tuple[int | None, ...] | None = None

    @property
    def gpus(self) -> int:
        return len(self.affinity)

    def kind(self, a: int, b: int) -> str:
        pairs = list(itertools.combinations(range(self.gpus + len(self.nics)), 2))
        return "X" if a == b else self.kinds[pairs.index((min(a, b), max(a, b)))]


@dataclass(frozen=True)
class Style:
    era: str = "new"
    """old: NICs by device, no NUMA column; middle: NICs by device; new: NIC0 ..., a legend of them, GPU NUMA ID."""
    layout: str = "tabs"
    """tabs; expanded: tabs of eight to spaces; aligned: retyped under the header; collapsed: single spaces; mixed: tabs
    and spaces, several of them."""
    escapes: str = "none"
    """none; inside: after the leading tab; before: before it; bare: the escape byte lost in a copy."""
    prefix: str = ""
    around: tuple[str, str] = ("", "")
    nic_rows: int = 99
    """How many of them are printed."""
    trailing: bool = False
    """Empty cells at the end of NIC rows."""
    width: int | None = None
    """Lines are wrapped there."""
    stripped: bool = False
    """Without spaces at the ends of lines."""
    glued_from: int = 10**6
    """Columns from here on have lost their separators."""
    newline: str = "\n"
    gpu_numa: tuple[str, ...] = field(default=())
    """Cells of GPU NUMA ID; () N/A."""


def render(spec: Spec, style: Style) -> str:
    """Return the text."""
    lines = _wrapped([_line(row, style) for row in _table(spec, style)], style)
    body = "".join(style.prefix + line + "\n" for line in lines) + LEGEND
    if style.era == "new" and spec.nics:
        body += "\nNIC Legend:\n\n" + "".join(f"  NIC{at}: {name}\n" for at, name in enumerate(spec.nics))
    return (style.around[0] + body + style.around[1]).replace("\n", style.newline)


@dataclass(frozen=True)
class _Row:
    label: str
    cells: list[str]
    tail: list[str]
    """Of the affinity columns; the header's own names in the header."""


def _table(spec: Spec, style: Style) -> list[_Row]:
    nics = [f"NIC{at}" for at in range(len(spec.nics))] if style.era == "new" else list(spec.nics)
    names = [f"GPU{at}" for at in range(spec.gpus)] + nics
    count = {"old": 1, "middle": 2, "new": 3}[style.era]
    table = [_Row("", names, ["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"][:count])]
    for at, name in enumerate(names[: spec.gpus + style.nic_rows]):
        kinds = [spec.kind(at, other) for other in range(len(names))]
        table.append(_Row(name, kinds, _tail(spec, style, at)[:count] if at < spec.gpus else []))
    return table


def _tail(spec: Spec, style: Style, gpu: int) -> list[str]:
    cpus, numa = spec.affinity[gpu]
    return [cpus or "", "N/A" if numa is None else str(numa), style.gpu_numa[gpu] if style.gpu_numa else "N/A"]


def _line(row: _Row, style: Style) -> str:
    head = not row.label
    if style.layout == "aligned":
        text = _aligned(row)
    elif style.layout == "collapsed":
        text = " ".join([row.label, *row.cells, *(cell for cell in row.tail if cell)])
    else:
        text = _driver(row, style, head)
    text = text.expandtabs(8) if style.layout == "expanded" or style.width else text
    escapes = {"inside": ("\x1b[4m", "\x1b[0m"), "before": ("\x1b[4m", "\x1b[0m"), "bare": ("[4m", "[0m")}
    if not head or style.escapes not in escapes:
        return text.rstrip() if style.stripped else text
    start, end = escapes[style.escapes]
    at = 0 if style.escapes == "before" else len(text) - len(text.lstrip())
    return text[:at] + start + text[at:] + end


def _driver(row: _Row, style: Style, head: bool) -> str:
    """Return a row as the driver prints it: tabs, X between spaces, an extra tab before the GPU's own NUMA node."""
    between = ["\t \t" if style.layout == "mixed" and at % 2 else "\t" for at in range(len(row.cells))]
    between = ["" if at > style.glued_from else gap for at, gap in enumerate(between)]
    cells = [f" {cell} " if cell == "X" and at < style.glued_from else cell for at, cell in enumerate(row.cells)]
    text = row.label + "".join(itertools.chain(*zip(between, cells, strict=True)))
    if row.tail:
        return text + "\t" + ("\t".join(row.tail) if head else "\t".join(row.tail[:2]) + _own(row.tail))
    return text + ("\t\t\t\t" if style.trailing else "")


def _own(tail: list[str]) -> str:
    return "\t\t" + tail[2] if len(tail) == 3 else ""


def _aligned(row: _Row) -> str:
    cells = "".join(f" {cell} ".ljust(13) if cell == "X" else cell.ljust(13) for cell in row.cells)
    return (row.label.ljust(13) + cells + "".join(cell.ljust(40) for cell in row.tail)).rstrip()


def _wrapped(lines: list[str], style: Style) -> list[str]:
    width = style.width
    if width is None:
        return lines
    parts = [line[at : at + width] for line in lines for at in range(0, max(len(line.rstrip()), 1), width)]
    return [part.rstrip() for part in parts] if style.stripped else parts
