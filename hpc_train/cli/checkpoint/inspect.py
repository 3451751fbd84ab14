"""`hpc-train checkpoint inspect`: show one step, with its provenance and where it lies (file system, stripes).

It reads the manifest only.
"""

from __future__ import annotations

import json as json_module
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

from hpc_train.checkpoint.format.hdf5_index import INDEX_FILE, count_mappings, write_index
from hpc_train.checkpoint.format.manifest import Manifest, ShardFile
from hpc_train.checkpoint.format.shard_layout import SavedPart, SavedTensor
from hpc_train.checkpoint.provenance import encode_provenance
from hpc_train.checkpoint.storage.file_system import detect_file_system
from hpc_train.checkpoint.storage.lustre import LfsError, get_stripe_layout
from hpc_train.checkpoint.storage.step_directory import (
    explain_bad_step,
    holds_weights_only,
)
from hpc_train.checkpoint.storage.step_selection import (
    OpenStep,
    find_target,
    open_one_step,
)
from hpc_train.checkpoint.storage.stripe_layout import describe_stripes
from hpc_train.cli.output import print_fields, print_json, print_table, progress_bar
from hpc_train.regular_files import read_text
from hpc_train.units import format_bytes

PROVENANCE_PARTS = ("copy", "prepare", "write", "agree", "commit")
"""Parts of a save, one after the other (see provenance.SaveTimes)."""


def list_provenance_fields(manifest: Manifest) -> dict[str, Any]:
    """Return `origin` and `times` of its manifest; None in a step that no training has written."""
    origin, times = manifest.origin, manifest.times
    return {
        "origin": None if origin is None else encode_provenance(origin),
        "times": None if times is None else encode_provenance(times),
    }


def describe_provenance(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Format the provenance as (name, text) lines."""
    origin, times = facts["origin"] or {}, facts["times"]
    lines = []
    if times is not None:
        spent = [f"{part} {times[part]:.2f}" for part in PROVENANCE_PARTS if part in times]
        lines.append(
            ("saved", format_time(times["at"]) + (f", attempt {origin['attempt']}" if "attempt" in origin else ""))
        )
        stall, slowest = f"{times['stall']:.2f} of it waited for by the training", times["slowest_rank"]
        lines.append(("seconds", f"{', '.join(spent)} (slowest rank: {slowest}); {stall}"))
    if origin:
        lines.append(("code", f"hpc_train {origin['version']}, sha256 {origin['code']}"))
    lines += [(key, f"sha256 {origin[key]}") for key in ("config", "model") if key in origin]
    return lines


def format_time(time: object) -> str:
    """Format seconds since the epoch as local time; empty for a value that is no time."""
    try:
        return f"{datetime.fromtimestamp(time):%Y-%m-%d %H:%M:%S}" if isinstance(time, (int, float)) else ""
    except (OverflowError, OSError, ValueError):
        return ""


def list_storage_fields(step: Path, files: Sequence[str]) -> dict[str, Any]:
    """Describe where a step lies: file system, mount, free space and, on Lustre, how directory and files are striped.

    files: names of its shard files, of which the first is looked at. Elsewhere than on Lustre the stripes are None.
    """
    system = detect_file_system(step)
    lustre = system.kind == "lustre"
    return {
        "file_system": system.kind,
        "mount": f"{system.source} on {system.mount}",
        "free": format_bytes(system.free_bytes),
        "stripes_of_directory": _describe_striping(step / "shards") if lustre else None,
        "stripes_of_first_file": _describe_striping(step / files[0]) if lustre and files else None,
    }


def _describe_striping(path: Path) -> str:
    """Describe the stripes; an error becomes part of the text, so that the command does not fail."""
    try:
        striped = get_stripe_layout(path)
    except (LfsError, OSError, ValueError) as error:
        return f"not known: {error}"
    osts = sorted({ost for part in striped.parts for ost in part.osts})
    return describe_stripes(striped.layout) + (f", on OSTs {', '.join(map(str, osts))}" if osts else "")


_VALUES = "values: hpc-train checkpoint verify, then load or export"
_SECONDS = ("seconds", "stall", *PROVENANCE_PARTS)
_TIMELINE_EVENTS = ("start", "resume", "checkpoint", "weights", "checkpoint_failed", "end")


@dataclass(frozen=True)
class InspectOptions:
    """Options of `inspect`."""

    tensors: bool = False
    index: bool = False


def inspect_command(where: str, options: InspectOptions, json: bool) -> int:
    """Print one step, after writing its index if asked for; returns 0."""
    step = open_one_step(where)
    if options.index:
        _write_index(step, json)
    facts = describe_step(step)
    facts["timeline"] = read_timeline(find_target(where).run, step.manifest.step)
    if options.tensors:
        facts["tensors"] = describe_tensors(step)
    if json:
        print_json(facts)
        return 0
    _print_step(facts)
    return 0


def describe_step(step: OpenStep) -> dict[str, Any]:
    """Return the facts of `inspect --json`, without the tensors and the timeline."""
    manifest = step.manifest
    return {
        "step": manifest.step,
        "path": str(step.path),
        "sequence": manifest.sequence,
        "world_size": manifest.world_size,
        "weights_only": holds_weights_only(manifest.extra),
        "bad": explain_bad_step(step.path, manifest),
        **list_provenance_fields(manifest),
        "bytes": manifest.size,
        "shared": manifest.shared,
        "inflated": manifest.inflated,
        "elements_bytes": sum(tensor.rectangle.volume * tensor.itemsize for tensor in manifest.step_layout.tensors),
        "tensor_count": len(manifest.step_layout.tensors),
        "layouts": len(manifest.step_layout.layouts),
        "mappings": count_mappings(manifest),
        "index": (step.path / INDEX_FILE).exists(),
        "storage": list_storage_fields(step.path, [file.name for file in manifest.files]),
        "files": [_list_file_fields(file) for file in manifest.files],
        "extra": manifest.extra,
    }


def describe_tensors(step: OpenStep) -> list[dict[str, Any]]:
    """Describe every logical tensor, in the order of the first file."""
    parts = step.manifest.step_layout.parts()
    return [_list_tensor_fields(tensor, parts[tensor.name]) for tensor in step.manifest.step_layout.tensors]


def read_timeline(run: Path, step: int) -> list[dict[str, Any]]:
    """Return the attempts and saves in events.jsonl up to the last save of this step."""
    events = [event for event in _read_events(run / "events.jsonl") if event.get("event") in _TIMELINE_EVENTS]
    of_step = [
        index for index, event in enumerate(events) if (event["event"], event.get("step")) == ("checkpoint", step)
    ]
    return events[: of_step[-1] + 1] if of_step else events


def _read_events(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = read_text(path, errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            event = json_module.loads(line)
        except ValueError:  # the last one, of a process that died
            continue
        if isinstance(event, dict):
            yield event


def _list_tensor_fields(tensor: SavedTensor, parts: list[SavedPart]) -> dict[str, Any]:
    cuts = [len({part.rectangle.offset[dim] for part in parts}) for dim in range(len(tensor.shape))] if parts else []
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "bytes": tensor.rectangle.volume * tensor.itemsize,
        "files": len({part.file for part in parts}),
        "parts": len(parts),
        "cuts": cuts,
    }


def _write_index(step: OpenStep, quiet: bool) -> None:
    with progress_bar("tensors", len(step.manifest.step_layout.tensors), quiet, of_bytes=False) as on_tensors:
        write_index(step.path, step.manifest, on_tensors)


def _print_step(facts: dict[str, Any]) -> None:
    storage = facts["storage"]
    print_fields(
        [
            ("path", facts["path"]),
            ("step", f"{facts['step']}{' (weights only)' if facts['weights_only'] else ''}"),
            *([("bad", facts["bad"])] if facts["bad"] else []),
            *describe_provenance(facts),
            (
                "size",
                f"{format_bytes(facts['bytes'])} in {_describe_files(facts)}, saved by {facts['world_size']} ranks",
            ),
            *_list_shared_fields(facts),
            *_list_compressed_fields(facts),
            (
                "tensors",
                f"{facts['tensor_count']:,} of {format_bytes(facts['elements_bytes'])}, {facts['layouts']} layouts",
            ),
            ("index", f"{INDEX_FILE} lists the tensors; {_VALUES}" if facts["index"] else "none; --index writes it"),
            *((name.replace("_", " "), value) for name, value in storage.items() if value is not None),
            *(("extra." + name, json_module.dumps(value)) for name, value in facts["extra"].items()),
        ]
    )
    if facts["timeline"]:
        print()
        cells = [_format_event_cells(event) for event in facts["timeline"]]
        print_table(("time", "attempt", "event", "step", *_SECONDS), cells)
    if "tensors" in facts:
        print()
        columns = ("tensor", "dtype", "shape", "size", "files", "cut")
        print_table(columns, [_format_tensor_cells(tensor) for tensor in facts["tensors"]], numbers=("size", "files"))


def _format_tensor_cells(tensor: dict[str, Any]) -> tuple[object, ...]:
    shape, cuts = _join_sizes(tensor["shape"]), _join_sizes(tensor["cuts"])
    return tensor["name"], tensor["dtype"], shape, format_bytes(tensor["bytes"]), tensor["files"], cuts


def _list_file_fields(file: ShardFile) -> dict[str, Any]:
    return {
        "file": file.name,
        "bytes": file.bytes,
        "inflated": file.inflated,
        "ranks": count_writers(file.name),
        "written_at": file.written_at,
    }


def count_writers(name: str) -> int:
    """Return how many ranks wrote the file of that name, or were to write it (some may have had nothing)."""
    match = re.fullmatch(r"(\d+)-(\d+)\..*", PurePosixPath(name).name)
    return int(match[2]) - int(match[1]) + 1 if match else 1


def _describe_files(facts: dict[str, Any]) -> str:
    """Describe the files: `8 files`, or `2 files of 4 ranks each`, or `3 files of 1 to 4 ranks`."""
    ranks, files = sorted({file["ranks"] for file in facts["files"]}), f"{len(facts['files'])} files"
    if not ranks or ranks[-1] == 1:
        return files
    return f"{files} of {ranks[-1]} ranks each" if len(ranks) == 1 else f"{files} of {ranks[0]} to {ranks[-1]} ranks"


def _list_shared_fields(facts: dict[str, Any]) -> list[tuple[str, str]]:
    steps = sorted({file["written_at"] for file in facts["files"] if file["written_at"] is not None})
    named = ", ".join(map(str, steps))
    return [("shared", f"{format_bytes(facts['shared'])} of it, written with step {named}")] if steps else []


def _list_compressed_fields(facts: dict[str, Any]) -> list[tuple[str, str]]:
    inflated, stored = facts["inflated"], facts["bytes"]
    return (
        [("compressed", f"from {format_bytes(inflated)}, which saves {1 - stored / inflated:.1%}")] if inflated else []
    )


def _format_event_cells(event: dict[str, Any]) -> tuple[object, ...]:
    seconds = [f"{event[key]:.2f}" if isinstance(event.get(key), float) else "" for key in _SECONDS]
    return format_time(event.get("time")), event.get("attempt", ""), event["event"], event.get("step", ""), *seconds


def _join_sizes(numbers: list[int]) -> str:
    return " x ".join(map(str, numbers)) or "scalar"
