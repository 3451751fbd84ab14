"""From a file that describes a topology to a Cluster, whoever wrote it: the format is told by its content."""

from __future__ import annotations

import codecs
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpc_train.cluster.readers import (
    hostfile,
    ibnetdiscover,
    ibstat,
    nccl_xml,
    nvidia_smi,
    rocm_smi,
    slurm_environment,
    slurm_topology,
    topology_yaml,
)
from hpc_train.cluster.spec import Cluster
from hpc_train.errors import UserError

MAX_FILE_BYTES = 64 << 20
"""Size limit in bytes; ibnetdiscover writes about a kilobyte per adapter, so this is a fabric of 60,000."""
MAX_TEXT_BYTES = 8 << 20
"""Size limit in bytes of files that an administrator writes."""
MAX_NODE_BYTES = 4 << 20
"""Size limit in bytes of files that describe one node."""


@dataclass(frozen=True)
class TopologyFormat:
    """One kind of topology file."""

    name: str
    """As `topology read --format` takes it."""
    matches: Callable[[str], bool]
    """Whether a text looks like it; no two formats may claim the same text."""
    read: Callable[[str, str], Cluster]
    """(text, file name for messages) -> Cluster. UserError `FILE:LINE: what; expected ...` for what it cannot be."""
    largest: int = MAX_FILE_BYTES
    """Longest text accepted, in characters."""


def list_formats() -> tuple[TopologyFormat, ...]:
    """Every format that is read, in the order in which they are tried."""
    return (
        TopologyFormat(
            "slurm_show_topology", slurm_topology.matches_scontrol, slurm_topology.read_scontrol, MAX_TEXT_BYTES
        ),
        TopologyFormat(
            "slurm_topology_conf",
            slurm_topology.matches_topology_conf,
            slurm_topology.read_topology_conf,
            MAX_TEXT_BYTES,
        ),
        TopologyFormat(
            "slurm_topology_yaml", topology_yaml.matches_topology_yaml, topology_yaml.read_topology_yaml, MAX_TEXT_BYTES
        ),
        TopologyFormat("topograph", topology_yaml.matches_topograph, topology_yaml.read_topograph, MAX_TEXT_BYTES),
        TopologyFormat(
            "slurm_environment", slurm_environment.matches_slurm_environment, slurm_environment.read_slurm_environment
        ),
        TopologyFormat("nvidia_smi", nvidia_smi.matches_nvidia_smi, nvidia_smi.read_nvidia_smi, MAX_NODE_BYTES),
        TopologyFormat("rocm_smi", rocm_smi.matches_rocm_smi, rocm_smi.read_rocm_smi, MAX_NODE_BYTES),
        TopologyFormat("nccl_xml", nccl_xml.matches_nccl_xml, nccl_xml.read_nccl_xml, MAX_NODE_BYTES),
        TopologyFormat("ibnetdiscover", ibnetdiscover.matches_ibnetdiscover, ibnetdiscover.read_ibnetdiscover),
        TopologyFormat("ibstat", ibstat.matches_ibstat, ibstat.read_ibstat, MAX_NODE_BYTES),
        TopologyFormat("hostlist", hostfile.matches_hostlist, hostfile.read_hostlist),
        TopologyFormat("hostfile", hostfile.matches_hostfile, hostfile.read_hostfile),
    )


def read_topology_file(path: Path, format: str | None = None) -> Cluster:
    """The cluster that a file describes. Raises UserError, one line, for anything that is not such a file."""
    return read_topology_text(_text(path), str(path), format)


def read_topology_text(text: str, name: str, format: str | None = None) -> Cluster:
    """The same of a text; name: what messages call it."""
    formats = list_formats()
    text = _plain(text)
    if format is not None:
        chosen = [candidate for candidate in formats if candidate.name == format]
        if not chosen:
            raise UserError(f"--format {format}: choose one of {', '.join(candidate.name for candidate in formats)}")
    elif not (chosen := [candidate for candidate in formats if candidate.matches(text)]):
        raise UserError(
            f"{name}: not a topology that is read here; known: {', '.join(candidate.name for candidate in formats)}"
        )
    if len(text) > chosen[0].largest:
        limit = chosen[0].largest >> 20
        raise UserError(f"{name}: {len(text) >> 20} MiB that look like {chosen[0].name}; expected at most {limit} MiB")
    return chosen[0].read(text, name)


def decode_text(content: bytes) -> str:
    """Decode a file: UTF-8, or UTF-16 with a byte order mark, as some shells write redirected output."""
    encoding = "utf-16" if content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8"
    return content.decode(encoding, "replace")


def _plain(text: str) -> str:
    """Remove the byte order mark and convert line ends to Unix style."""
    text = text.removeprefix("\ufeff")
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _text(path: Path) -> str:
    try:
        if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():
            raise UserError(f"{path}: not a regular file; give its text on standard input (hpc-train topology read -)")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise UserError(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB; not a topology file")
    return decode_text(content)
