"""Read `rocm-smi --showtopo`, as text and as --json: links between the AMD GPUs of a node, and NUMA nodes."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from hpc_train.cluster.readers.node.nvidia_smi_rows import clean_lines
from hpc_train.cluster.spec import UNNAMED_HOST, Cluster, Gpu, Link, Node
from hpc_train.errors import UserError

_SECTION = re.compile(r"\b(weight|hops|link type|link access\w*)\s+between\s+two\s+gpus", re.IGNORECASE)
_END = re.compile(r"numa\s+nodes\b\s*=|end of rocm smi log", re.IGNORECASE)
_BEGIN = re.compile(r"ROCm System Management Interface", re.IGNORECASE)
_LOG_END = re.compile(r"end of rocm smi log", re.IGNORECASE)
_GPU = re.compile(r"GPU\d+")
_NUMA = re.compile(r"GPU\s*\[?(\d+)\]?\s*:\s*\(Topology\)\s*Numa\s+(Node|Affinity)\s*:\s*(\S+)", re.IGNORECASE)
_PAIR = re.compile(r"(weight|hops|link type)\s+between\s+DRM\s+devices\s+(\d+)\s+and\s+(\d+)", re.IGNORECASE)
_CARD = re.compile(r"(?:card|GPU)\s*(\d+)", re.IGNORECASE)
_UNKNOWN = ("N/A", "UNKNOWN", "XXXX")
"""Text that is printed for a pair whose link the driver does not know."""


@dataclass
class _GpuTopology:
    """The facts of all sections."""

    gpus: list[str] = field(default_factory=list)
    kinds: dict[tuple[str, str], str] = field(default_factory=dict)
    numa: dict[str, int | None] = field(default_factory=dict)


def matches_rocm_smi(text: str) -> bool:
    """Whether the text is a topology of rocm-smi, all or some of its sections."""
    return _SECTION.search(text) is not None or _NUMA.search(text) is not None or _is_json(text)


def read_rocm_smi(text: str, name: str) -> Cluster:
    """Read the node of one `rocm-smi --showtopo`.

    Facts of missing sections are empty. Links are XGMI or PCIE, as printed. Raises UserError for a section that is cut,
    and for sections that contradict each other.
    """
    facts = _read_json(text, name) if _is_json(text) else _read_text(clean_lines(text), name)
    if not facts.gpus:
        raise UserError(f"{name}:1: no GPUs; expected the output of `rocm-smi --showtopo`, with or without --json")
    gpus = tuple(Gpu(gpu, numa=facts.numa.get(gpu)) for gpu in facts.gpus)
    pairs = ((pair, facts.kinds.get(pair)) for pair in itertools.combinations(facts.gpus, 2))
    links = tuple(Link(UNNAMED_HOST, a, b, kind) for (a, b), kind in pairs if kind is not None)
    notes = (
        () if links or len(gpus) < 2 else ("no link types: how the GPUs are joined is not known (--showtopo has them)",)
    )
    return Cluster("rocm_smi", (Node(UNNAMED_HOST, gpus),), links, notes=notes)


def _read_text(lines: list[str], name: str) -> _GpuTopology:
    facts = _GpuTopology()
    if any(_BEGIN.search(line) for line in lines) and not any(_LOG_END.search(line) for line in lines):
        raise UserError(f"{name}:{len(lines)}: cut off: the line 'End of ROCm SMI Log' is missing; expected all of it")
    for index, line in enumerate(lines):
        section, numa = _SECTION.search(line), _NUMA.search(line)
        if section is not None:
            _read_section(facts, lines, index, section[1].lower(), name)
        elif numa is not None:
            _add_numa(facts, f"GPU{int(numa[1])}", numa[2].lower(), numa[3], f"{name}:{index + 1}")
    if facts.gpus and set(facts.numa) - set(facts.gpus):
        raise UserError(f"{name}:1: NUMA nodes of GPUs that no matrix has; expected the output of one node")
    facts.gpus = facts.gpus or list(facts.numa)
    _check_sections(lines, facts, name)
    return facts


def _check_sections(lines: list[str], facts: _GpuTopology, name: str) -> None:
    """Refuse a --showtopo that lost its link types. Other options print some of its sections only."""
    shown = {section[1].lower() for line in lines if (section := _SECTION.search(line))}
    if {"weight", "hops"} <= shown and facts.numa and "link type" not in shown and len(facts.gpus) > 1:
        raise UserError(
            f"{name}:{len(lines)}: weights, hops and NUMA nodes, but no section 'Link Type between two GPUs'; "
            "expected all of `rocm-smi --showtopo`"
        )


def _read_section(facts: _GpuTopology, lines: list[str], start: int, what: str, name: str) -> None:
    gpus, rows = _read_matrix(lines, start, name)
    if facts.gpus and gpus != facts.gpus:
        raise UserError(f"{name}:{start + 1}: GPUs other than in the section before; expected the output of one node")
    facts.gpus = gpus
    pattern = re.compile(r"0|[A-Z][A-Z0-9/]*" if what == "link type" else r"\d+|N/A|True|False")
    for number, label, cells in rows:
        for column, cell in zip(gpus, cells, strict=True):
            if not pattern.fullmatch(cell) or (what == "link type" and (cell == "0") != (column == label)):
                raise UserError(f"{name}:{number}: {what} of {label}-{column} is {cell!r}; expected XGMI or PCIE, or 0")
            if what == "link type" and column != label:
                _add_kind(facts, label, column, cell, f"{name}:{number}")


def _read_matrix(lines: list[str], start: int, name: str) -> tuple[list[str], list[tuple[int, str, list[str]]]]:
    """Read the matrix below a section's title: its columns, and its rows as (line, label, cells)."""
    gpus: list[str] = []
    rows: list[tuple[int, str, list[str]]] = []
    for number, line in enumerate(lines[start + 1 :], start + 2):
        if _SECTION.search(line) or _END.search(line) or _NUMA.search(line) or (rows and len(rows) == len(gpus)):
            break
        match = _GPU.search(line)
        words = line[match.start() :].split() if match else []
        if not gpus and words and all(_GPU.fullmatch(word) for word in words):
            gpus = words
        elif gpus and words:
            rows.append((number, words[0], words[1:]))
            if words[0] not in gpus or len(words) != len(gpus) + 1:
                raise UserError(f"{name}:{number}: row {words[0]} has {len(words) - 1} cells of {len(gpus)}")
    if not gpus or len(set(gpus)) < len(gpus) or [label for _, label, _ in rows] != gpus:
        raise UserError(f"{name}:{start + 1}: a section that is not whole; expected a header and one row a GPU below")
    return gpus, rows


def _add_kind(facts: _GpuTopology, a: str, b: str, kind: str, where: str) -> None:
    # Drivers print these where they do not know the link; a missing link says that better than a made-up kind.
    if kind in _UNKNOWN:
        return
    if kind not in ("XGMI", "PCIE"):
        raise UserError(f"{where}: link type of {a}-{b} is {kind!r}; expected XGMI or PCIE")
    if facts.kinds.setdefault((a, b), kind) != kind or facts.kinds.get((b, a), kind) != kind:
        other = facts.kinds.get((b, a), facts.kinds[a, b])
        raise UserError(f"{where}: {a}-{b} is {kind}, but {b}-{a} is {other}; expected the same")


def _add_numa(facts: _GpuTopology, gpu: str, what: str, value: str, where: str) -> None:
    """Set a GPU's NUMA node. The node wins over the affinity, which older versions print instead."""
    if not re.fullmatch(r"-?\d{1,6}|N/A|None", value):
        raise UserError(f"{where}: NUMA node of {gpu} is {value!r}; expected a number")
    node = int(value) if value.isdigit() else None
    if what == "node" or facts.numa.get(gpu) is None:
        facts.numa[gpu] = node


def _is_json(text: str) -> bool:
    return "{" in text and ("between DRM devices" in text or re.search(r'"\(Topology\) Numa', text) is not None)


def _read_json(text: str, name: str) -> _GpuTopology:
    content = _parse_object(text, name)
    facts, numbers = _GpuTopology(), set()
    for key, value in content.items():
        if isinstance(value, dict) and (card := _CARD.fullmatch(key)):
            numbers.add(int(card[1]))
            _read_card(facts, f"GPU{int(card[1])}", value, name)
    for pair, what, kind in _list_pairs(content.values(), name):
        numbers |= set(pair)
        if what == "link type" and pair[0] != pair[1]:
            _add_kind(facts, f"GPU{pair[0]}", f"GPU{pair[1]}", kind, f"{name}:1")
    facts.gpus = [f"GPU{number}" for number in sorted(numbers)]
    # The JSON has each pair once, the text each pair twice: make them alike.
    facts.kinds |= {(b, a): kind for (a, b), kind in facts.kinds.items()}
    return facts


def _read_card(facts: _GpuTopology, gpu: str, content: dict[str, object], name: str) -> None:
    for key in content:
        match = re.fullmatch(r"\(Topology\) Numa (Node|Affinity)", key)
        if match is not None:
            _add_numa(facts, gpu, match[1].lower(), str(content[key]), f"{name}:1")


def _list_pairs(values: Iterable[object], name: str) -> list[tuple[tuple[int, int], str, str]]:
    pairs = []
    for content in values:
        for key, value in content.items() if isinstance(content, dict) else ():
            pair = _PAIR.search(key)
            if pair is not None and (len(pair[2]) > 4 or len(pair[3]) > 4):
                raise UserError(f"{name}:1: {key!r}; expected the numbers of two GPUs")
            if pair is not None:
                pairs.append(((int(pair[2]), int(pair[3])), pair[1].lower(), str(value)))
    return pairs


def _parse_object(text: str, name: str) -> dict[str, object]:
    """Parse the JSON object: rocm-smi may print warnings before it, and other tools text after it."""
    start = text.index("{")
    try:
        # raw_decode stops after the object, where json.loads would refuse what follows.
        content, _ = json.JSONDecoder().raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise UserError(f"{name}:{error.lineno}: not whole JSON: {error.msg}; expected `rocm-smi --json`") from None
    except (RecursionError, ValueError):
        raise UserError(f"{name}:1: not JSON as `rocm-smi --showtopo --json` writes it") from None
    if not isinstance(content, dict):
        raise UserError(f"{name}:1: not an object; expected `rocm-smi --showtopo --json`")
    return content
