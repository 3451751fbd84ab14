"""`hpc-train checkpoint inspect`: everything that is known of a step without reading its data."""

from __future__ import annotations

import json as json_module
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hpc_train.checkpoint.commands.provenance import PARTS, in_words, moment, provenance
from hpc_train.checkpoint.commands.show import print_facts, print_json, print_table, progress, size
from hpc_train.checkpoint.commands.storage import storage_facts
from hpc_train.checkpoint.commands.target import Step, one_step, target
from hpc_train.checkpoint.holdings import Part, Tensor
from hpc_train.checkpoint.index import INDEX, mappings, write_index
from hpc_train.checkpoint.manifest import ShardFile
from hpc_train.checkpoint.poison import poison_of
from hpc_train.checkpoint.weights import holds_weights_only
from hpc_train.regular_files import read_text

_VALUES = "values: hpc-train checkpoint verify, then load or export"
_SECONDS = ("seconds", "stall", *PARTS)
_TOLD = ("start", "resume", "checkpoint", "weights", "checkpoint_failed", "end")


@dataclass(frozen=True)
class Options:
    """Of the command."""

    tensors: bool = False
    index: bool = False


def inspect(where: str, options: Options, json: bool) -> int:
    """Print what a step holds, after writing its index where that is asked for; returns 0."""
    step = one_step(where)
    if options.index:
        _write_index(step, json)
    facts = facts_of(step)
    facts["timeline"] = timeline(target(where).run, step.manifest.step)
    if options.tensors:
        facts["tensors"] = tensors_of(step)
    if json:
        print_json(facts)
        return 0
    _print(facts)
    return 0


def facts_of(step: Step) -> dict[str, Any]:
    """What `inspect --json` prints, without the list of tensors and the timeline."""
    manifest = step.manifest
    return {
        "step": manifest.step,
        "path": str(step.path),
        "sequence": manifest.sequence,
        "world_size": manifest.world_size,
        "weights_only": holds_weights_only(manifest.extra),
        "bad": poison_of(step.path, manifest),
        **provenance(manifest),
        "bytes": manifest.size,
        "shared": manifest.shared,
        "inflated": manifest.inflated,
        "elements_bytes": sum(it.rectangle.volume * it.itemsize for it in manifest.holdings.tensors),
        "tensor_count": len(manifest.holdings.tensors),
        "layouts": len(manifest.holdings.layouts),
        "mappings": mappings(manifest),
        "index": (step.path / INDEX).exists(),
        "storage": storage_facts(step.path, [file.name for file in manifest.files]),
        "files": [_file(it) for it in manifest.files],
        "extra": manifest.extra,
    }


def tensors_of(step: Step) -> list[dict[str, Any]]:
    """Every logical tensor, in the order in which the first file has them."""
    parts = step.manifest.holdings.parts()
    return [_tensor(tensor, parts[tensor.name]) for tensor in step.manifest.holdings.tensors]


def timeline(run: Path, step: int) -> list[dict[str, Any]]:
    """What events.jsonl of a run says of its attempts and saves up to the last save of this step."""
    told = [event for event in _events(run / "events.jsonl") if event.get("event") in _TOLD]
    of_step = [at for at, event in enumerate(told) if (event["event"], event.get("step")) == ("checkpoint", step)]
    return told[: of_step[-1] + 1] if of_step else told


def _events(path: Path) -> Iterator[dict[str, Any]]:
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


def _tensor(tensor: Tensor, parts: list[Part]) -> dict[str, Any]:
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


def _write_index(step: Step, quiet: bool) -> None:
    with progress("tensors", len(step.manifest.holdings.tensors), quiet, of_bytes=False) as tell:
        write_index(step.path, step.manifest, tell)


def _print(facts: dict[str, Any]) -> None:
    storage = facts["storage"]
    print_facts(
        [
            ("path", facts["path"]),
            ("step", f"{facts['step']}{' (weights only)' if facts['weights_only'] else ''}"),
            *([("bad", facts["bad"])] if facts["bad"] else []),
            *in_words(facts),
            ("size", f"{size(facts['bytes'])} in {_files(facts)}, saved by {facts['world_size']} ranks"),
            *_shared(facts),
            *_compressed(facts),
            ("tensors", f"{facts['tensor_count']:,} of {size(facts['elements_bytes'])}, {facts['layouts']} layouts"),
            ("index", f"{INDEX} lists the tensors; {_VALUES}" if facts["index"] else "none; --index writes it"),
            *((name.replace("_", " "), value) for name, value in storage.items() if value is not None),
            *(("extra." + name, json_module.dumps(value)) for name, value in facts["extra"].items()),
        ]
    )
    if facts["timeline"]:
        print()
        print_table(("time", "attempt", "event", "step", *_SECONDS), [_event(it) for it in facts["timeline"]])
    if "tensors" in facts:
        print()
        rows = [
            (it["name"], it["dtype"], _by(it["shape"]), size(it["bytes"]), it["files"], _by(it["cuts"]))
            for it in facts["tensors"]
        ]
        print_table(("tensor", "dtype", "shape", "size", "files", "cut"), rows, numbers=("size", "files"))


def _file(file: ShardFile) -> dict[str, Any]:
    return {
        "file": file.name,
        "bytes": file.bytes,
        "inflated": file.inflated,
        "ranks": writers_of(file.name),
        "written_at": file.written_at,
    }


def writers_of(name: str) -> int:
    """Return how many ranks wrote the file of that name, or were to write it (some may have had nothing)."""
    found = re.fullmatch(r"(\d+)-(\d+)\..*", PurePosixPath(name).name)
    return int(found[2]) - int(found[1]) + 1 if found else 1


def _files(facts: dict[str, Any]) -> str:
    """`8 files`, or `2 files of 4 ranks each`, or `3 files of 1 to 4 ranks`."""
    ranks, files = sorted({it["ranks"] for it in facts["files"]}), f"{len(facts['files'])} files"
    if not ranks or ranks[-1] == 1:
        return files
    return f"{files} of {ranks[-1]} ranks each" if len(ranks) == 1 else f"{files} of {ranks[0]} to {ranks[-1]} ranks"


def _shared(facts: dict[str, Any]) -> list[tuple[str, str]]:
    steps = sorted({it["written_at"] for it in facts["files"] if it["written_at"] is not None})
    named = ", ".join(map(str, steps))
    return [("shared", f"{size(facts['shared'])} of it, written with step {named}")] if steps else []


def _compressed(facts: dict[str, Any]) -> list[tuple[str, str]]:
    whole, stored = facts["inflated"], facts["bytes"]
    return [("compressed", f"from {size(whole)}, which saves {1 - stored / whole:.1%}")] if whole else []


def _event(event: dict[str, Any]) -> tuple[object, ...]:
    seconds = [f"{event[key]:.2f}" if isinstance(event.get(key), float) else "" for key in _SECONDS]
    return moment(event.get("time")), event.get("attempt", ""), event["event"], event.get("step", ""), *seconds


def _by(numbers: list[int]) -> str:
    return " x ".join(map(str, numbers)) or "scalar"
