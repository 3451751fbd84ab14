"""What `inspect` says of the place a step lies in: file system, room, stripes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_train.checkpoint.commands.show import size
from hpc_train.checkpoint.storage import file_system
from hpc_train.checkpoint.storage.lfs import LfsError, get_layout
from hpc_train.checkpoint.storage.striping import in_words


def storage_facts(step: Path, files: Sequence[str]) -> dict[str, Any]:
    """kind, mount, free and, on Lustre, the stripes of the directory and of the first file, in words; else None."""
    system = file_system(step)
    lustre = system.kind == "lustre"
    return {
        "file_system": system.kind,
        "mount": f"{system.source} on {system.mount}",
        "free": size(system.free_bytes),
        "stripes_of_directory": _stripes(step / "shards") if lustre else None,
        "stripes_of_first_file": _stripes(step / files[0]) if lustre and files else None,
    }


def _stripes(path: Path) -> str:
    """Never the reason that a command fails."""
    try:
        striped = get_layout(path)
    except (LfsError, OSError, ValueError) as error:
        return f"not known: {error}"
    osts = sorted({ost for part in striped.parts for ost in part.osts})
    return in_words(striped.layout) + (f", on OSTs {', '.join(map(str, osts))}" if osts else "")
