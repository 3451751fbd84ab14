"""Write the output of `rocm-smi --showtopo` from compact specs, as text, whole or in sections, and as --json."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass

SECTIONS = ("weight", "hops", "type", "numa")
TITLES = {"weight": "Weight", "hops": "Hops", "type": "Link Type"}


@dataclass(frozen=True)
class Spec:
    gpus: tuple[int, ...]
    """Their numbers."""
    kinds: tuple[str, ...]
    """Of every pair, in the order of itertools.combinations."""
    numa: tuple[int, ...]

    def kind(self, a: int, b: int) -> str:
        pairs = list(itertools.combinations(self.gpus, 2))
        return "0" if a == b else self.kinds[pairs.index((min(a, b), max(a, b)))]


def value(spec: Spec, what: str, a: int, b: int) -> str:
    kind = spec.kind(a, b)
    if what == "type" or a == b:
        return kind
    return {"weight": {"XGMI": "15", "PCIE": "72"}, "hops": {"XGMI": "1", "PCIE": "3"}}[what][kind]


def render_text(spec: Spec, sections: tuple[str, ...] = SECTIONS, brackets: bool = True, stripped: bool = False) -> str:
    lines = ["", "=" * 28 + " ROCm System Management Interface " + "=" * 28]
    for what in sections:
        lines += _numa(spec, brackets) if what == "numa" else _matrix(spec, what)
    text = "\n".join([*lines, "=" * 34 + " End of ROCm SMI Log " + "=" * 35, ""])
    return "\n".join(line.rstrip() for line in text.split("\n")) if stripped else text


def _matrix(spec: Spec, what: str) -> list[str]:
    cells: Callable[[int], list[str]] = lambda a: [value(spec, what, a, b) for b in spec.gpus]  # noqa: E731
    rows = [(f"GPU{a}", cells(a)) for a in spec.gpus]
    table = [("", [f"GPU{b}" for b in spec.gpus]), *rows]
    body = [label.ljust(7) + "".join(cell.ljust(13) for cell in row) for label, row in table]
    return ["=" * 30 + f" {TITLES[what]} between two GPUs " + "=" * 30, *body, ""]


def _numa(spec: Spec, brackets: bool) -> list[str]:
    lines = ["=" * 39 + " Numa Nodes " + "=" * 39]
    for gpu, node in zip(spec.gpus, spec.numa, strict=True):
        label = f"GPU[{gpu}]\t\t" if brackets else f"GPU {gpu}          "
        lines += [f"{label}: (Topology) Numa Node: {node}", f"{label}: (Topology) Numa Affinity: {node}"]
    return lines


def render_json(spec: Spec, before: str = "") -> str:
    content: dict[str, dict[str, str]] = {
        f"card{gpu}": {"(Topology) Numa Node": str(node), "(Topology) Numa Affinity": str(node)}
        for gpu, node in zip(spec.gpus, spec.numa, strict=True)
    }
    content["system"] = {
        f"(Topology) {TITLES[what].capitalize()} between DRM devices {a} and {b}": value(spec, what, a, b)
        for what in ("weight", "hops", "type")
        for a, b in itertools.combinations(spec.gpus, 2)
    }
    return before + json.dumps(content)
