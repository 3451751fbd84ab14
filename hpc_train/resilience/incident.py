"""Record what was seen when a run went wrong, in `logs/<attempt>/incident-<n>/`, with one summary line for people.

report.json says who held up the job, where every rank was, and what their stacks were; machine.json has what the kernel
log and the InfiniBand ports of the nodes say, where they can be read. Standard library only.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpc_train.regular_files import read_json, write_private_file
from hpc_train.resilience.watch import RankView

HANG = "hang.json"
"""File in an attempt's log directory: the hang that its ranks were ended for."""
_KERNEL_LINE = re.compile(
    r"NVRM: Xid|AMDGPU.*(RAS|poison)|Machine check|EDAC|uncorrect|I/O error|Out of memory: Killed|LustreError|link down"
    r"|soft lockup|hung_task|blocked for more than",
    re.IGNORECASE,
)
_MAX_KERNEL_BYTES = 1 << 20
_MAX_KERNEL_LINES = 50
_COUNTERS = ("symbol_error", "link_downed", "link_error_recovery", "port_rcv_errors", "local_link_integrity_errors")
"""Error counters of an InfiniBand port that grow where a cable or a port is bad."""


@dataclass(frozen=True)
class Incident:
    """One incident: a summary in one line, and the evidence."""

    kind: str
    """Kind of incident: "hang", "late end" or "lost node"."""
    text: str
    """One line that names the task, its host and for how long it was silent."""
    task: int | None = None
    """The task that held up the others, if one stands out."""
    host: str = ""
    views: Sequence[RankView] = ()
    stacks: str = ""
    """The ranks' stacks, grouped, in one line."""
    time: float = field(default_factory=time.time)


def read_machine() -> dict[str, Any]:
    """Return what this node's kernel log and InfiniBand ports say about broken hardware."""
    return {"kernel": read_kernel_lines(), "ports": read_port_errors()}


def write_incident(logs: Path, incident: Incident, machines: Mapping[str, Any] | None = None) -> Path:
    """Write an incident into a new folder of the attempt's log directory; returns the folder.

    machines: what `read_machine` returned on each node, by host; None: this node is asked.
    A disk that is full must not keep anybody from acting: what cannot be written is left out.
    """
    number = 0
    while (folder := logs / f"incident-{number}").exists():
        number += 1
    with suppress(OSError):
        folder.mkdir(mode=0o700)
        _write(folder / "report.json", {**asdict(incident), "views": [asdict(view) for view in incident.views]})
        _write(folder / "machine.json", machines or {socket.gethostname(): read_machine()})
    return folder


def _write(path: Path, value: Any) -> None:
    # O_EXCL: what is there stays, so that of several faults the first one counts, and no link is followed.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(value, file, indent=1)


def mark_hang(logs: Path, incident: Incident) -> None:
    """Say that the ranks of this attempt are ended because of a hang, for those who explain its end.

    The first hang counts: a supervisor that was killed as it ended the ranks leaves another one that finds them hung.
    """
    if read_hang(logs) is None:
        with suppress(OSError):
            text = json.dumps({"text": incident.text, "task": incident.task, "host": incident.host})
            write_private_file(logs / HANG, text)


def read_hang(logs: Path) -> Incident | None:
    """Return the hang that the ranks of an attempt were ended for; None if they were not, or it is damaged."""
    try:
        value = read_json(logs / HANG)
        task = value["task"]
        return Incident("hang", str(value["text"]), int(task) if task is not None else None, str(value["host"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_kernel_lines() -> list[str]:
    """Return the latest lines of this node's kernel log that speak of broken hardware; [] if it cannot be read."""
    try:
        # Without O_NONBLOCK a read after the last record would wait for the next one.
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return []
    try:
        return _choose_kernel_lines(_read_records(descriptor))
    finally:
        os.close(descriptor)


def _read_records(descriptor: int) -> Iterable[str]:
    """Yield the records of the kernel log; each read returns one, and the last one would wait."""
    size = 0
    while size < _MAX_KERNEL_BYTES:
        try:
            record = os.read(descriptor, 8192)
        except BrokenPipeError:  # overwritten meanwhile: the next read goes on with the oldest that is left
            continue
        except OSError:
            return
        size += len(record)
        yield record.decode(errors="replace").partition("\n")[0]


def _choose_kernel_lines(records: Iterable[str]) -> list[str]:
    texts = [record.partition(";")[2] for record in records]
    lines = ["".join(filter(str.isprintable, text))[:300] for text in texts if _KERNEL_LINE.search(text)]
    return lines[-_MAX_KERNEL_LINES:]


def read_port_errors(root: Path = Path("/sys/class/infiniband")) -> dict[str, dict[str, int]]:
    """Return the error counters above zero of this node's InfiniBand ports, by device and port."""
    errors: dict[str, dict[str, int]] = {}
    for folder in sorted(root.glob("*/ports/*/counters")):
        values: dict[str, int] = {}
        for name in _COUNTERS:
            with suppress(OSError, ValueError):
                values[name] = int((folder / name).read_text())
        if above := {name: value for name, value in values.items() if value}:
            errors[f"{folder.parts[-4]}/{folder.parts[-2]}"] = above
    return errors
