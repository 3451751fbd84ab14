"""The forms in which releases of `lfs getstripe` print a layout, for the stand-in and for tests of the parser.

A component is a dictionary: start, end (-1: to the end of the file), count, size, pool, pattern, osts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Component = dict[str, Any]


@dataclass(frozen=True)
class Form:
    """A form of output."""

    yaml: bool = False
    old: bool = False
    """As Lustre 2.5 printed a plain layout: other widths, a number for the pattern, sequences in hexadecimal."""
    ancient: bool = False
    """As 1.8 printed that of a directory: a unit, and `(Default)`."""
    directory: bool = False
    marked: int | None = None
    """An OST that was asked for."""


def render(path: str, components: list[Component], form: Form) -> str:
    """Return what `lfs getstripe` prints for one path."""
    if len(components) == 1 and components[0]["end"] == -1:
        return _plain(path, components[0], form)
    return _composite(path, components, form)


def first_ost(component: Component) -> int:
    return component["osts"][0] if component["osts"] else -1


def _plain(path: str, part: Component, form: Form) -> str:
    if form.directory:
        return f"{path}\n{_one_line(part, form)}\n"
    if form.yaml:
        return "".join(f"{line}\n" for line in [*_lines(part, form, 10), *_objects_as_yaml(part, "      ")])
    return "".join(f"{line}\n" for line in [path, *_lines(part, form, 11 if form.old else 10), *_table(part, form), ""])


def _one_line(part: Component, form: Form) -> str:
    if form.ancient:
        rounded = f"{part['size'] >> 20}M"
        return f"(Default) stripe_count: {part['count']} stripe_size: {rounded} stripe_offset: {first_ost(part)}"
    pattern = "" if form.old else f" pattern:       {part['pattern']}"
    pool = f" pool:          {part['pool']}" if part["pool"] else ""
    size = part["size"] if part["pattern"] != "mdt" else 0
    return f"stripe_count:  {part['count']} stripe_size:   {size}{pattern} stripe_offset: {first_ost(part)}{pool}"


def _lines(part: Component, form: Form, width: int) -> list[str]:
    numbered = form.old or (form.yaml and part["pattern"] in ("raid0", "mdt"))
    pattern = {"raid0": "1", "mdt": "2"}.get(part["pattern"], part["pattern"]) if numbered else part["pattern"]
    where = "lmm_mdt_index" if part["pattern"] == "mdt" and not form.old else "lmm_stripe_offset"
    pairs = [
        ("lmm_stripe_count", part["count"]),
        ("lmm_stripe_size", part["size"]),
        ("lmm_pattern", pattern),
        ("lmm_layout_gen", 0),
        (where, first_ost(part) if part["pattern"] != "mdt" else 0),
    ]
    pool = [f"{'lmm_pool:':<20}{part['pool']}"] if part["pool"] else []
    return [*(f"{name}:".ljust(width + 9) + str(value) for name, value in pairs), *pool]


def _table(part: Component, form: Form) -> list[str]:
    rows = []
    for number, ost in enumerate(part["osts"]):
        mark = " *" if ost == form.marked else ""
        object_id = 157834736 + number if form.old else 2 + number
        group = f"{((0x2B + ost) << 30) + 0x400:#14x}" if form.old else f"{0:14}"
        rows.append(f"\t{ost:6}\t{object_id:14}\t{object_id:#13x}\t{group}{mark}")
    return ["\tobdidx\t\t objid\t\t objid\t\t group", *rows]


def _objects_as_yaml(part: Component, indent: str) -> list[str]:
    rows = [
        line
        for number, ost in enumerate(part["osts"])
        for line in (
            f"{indent}- l_ost_idx: {ost}",
            f"{indent}  l_fid:     {0x100000000 + (ost << 16):#x}:{2 + number:#x}:0x0",
        )
    ]
    return ["lmm_objects:", *rows] if rows else []


def _composite(path: str, components: list[Component], form: Form) -> str:
    assert not form.old, "there were no such layouts then"
    head = [] if form.yaml else [path]
    indent = "" if form.yaml else "  "
    head += [f"{indent}lcm_layout_gen:    {len(components)}", f"{indent}lcm_mirror_count:  1"]
    head += [f"{indent}lcm_entry_count:   {len(components)}", *(["components:"] if form.yaml else [])]
    return "".join(
        f"{line}\n" for line in [*head, *(line for n, part in enumerate(components) for line in _entry(part, n, form))]
    )


def _entry(part: Component, number: int, form: Form) -> list[str]:
    made = not form.directory
    pairs = [
        ("lcme_id:", number + 1 if made else "N/A"),
        ("lcme_mirror_id:", 0 if made else "N/A"),
        ("lcme_flags:", "init" if part["osts"] or part["pattern"] == "mdt" else "0"),
        ("lcme_extent.e_start:", part["start"]),
        ("lcme_extent.e_end:", "EOF" if part["end"] == -1 else part["end"]),
    ]
    lines = [f"    {name:<20} {value}" for name, value in pairs]
    if form.yaml:
        lines[0] = "  - " + lines[0].lstrip()
        inner = [f"      {line}" for line in [*_lines(part, Form(), 10), *_objects_as_yaml(part, "")]]
        return [*lines, "    sub_layout:", *inner, ""]
    if form.directory:
        return [*lines, f"      {_one_line(part, form)}", ""]
    objects = [
        f"      - {n}: {{ l_ost_idx: {ost}, l_fid: [{0x100000000 + (ost << 16):#x}:0x2:0x0] }}"
        for n, ost in enumerate(part["osts"])
    ]
    return [
        *lines,
        *(f"      {line}" for line in _lines(part, form, 10)),
        *(["      lmm_objects:", *objects] if objects else []),
        "",
    ]
