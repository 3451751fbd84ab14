"""List the topology formats, and read a file; its format is recognised by its content.

The package's docstring says how to add one.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpc_train.cluster.readers.hostfile import matches_hostfile, matches_hostlist, read_hostfile, read_hostlist
from hpc_train.cluster.readers.infiniband.ibdiagnet_csv import matches_ibdiagnet_csv, read_ibdiagnet_csv
from hpc_train.cluster.readers.infiniband.iblinkinfo import matches_iblinkinfo, read_iblinkinfo
from hpc_train.cluster.readers.infiniband.ibnetdiscover import matches_ibnetdiscover, read_ibnetdiscover
from hpc_train.cluster.readers.infiniband.ibstat import matches_ibstat, read_ibstat
from hpc_train.cluster.readers.infiniband.subnet_lst import matches_subnet_lst, read_subnet_lst
from hpc_train.cluster.readers.node.hwloc_xml import matches_hwloc_xml, read_hwloc_xml
from hpc_train.cluster.readers.node.nccl_graph_xml import matches_nccl_graph, read_nccl_graph
from hpc_train.cluster.readers.node.nccl_log import matches_nccl_log, read_nccl_log
from hpc_train.cluster.readers.node.nccl_xml import matches_nccl_xml, read_nccl_xml
from hpc_train.cluster.readers.node.nvidia_smi import matches_nvidia_smi, read_nvidia_smi
from hpc_train.cluster.readers.node.nvidia_smi_nvlinks import matches_nvidia_smi_nvlinks, read_nvidia_smi_nvlinks
from hpc_train.cluster.readers.node.nvidia_smi_peers import matches_nvidia_smi_peers, read_nvidia_smi_peers
from hpc_train.cluster.readers.node.rocm_smi import matches_rocm_smi, read_rocm_smi
from hpc_train.cluster.readers.slurm.slurm_environment import matches_slurm_environment, read_slurm_environment
from hpc_train.cluster.readers.slurm.slurm_topology import (
    matches_scontrol,
    matches_topology_conf,
    read_scontrol,
    read_topology_conf,
)
from hpc_train.cluster.readers.slurm.topology_yaml import (
    matches_topograph,
    matches_topology_yaml,
    read_topograph,
    read_topology_yaml,
)
from hpc_train.cluster.spec import Cluster
from hpc_train.errors import UserError
from hpc_train.garbage_collection import pause_gc
from hpc_train.regular_files import NotRegularError, open_to_read

MAX_FILE_BYTES = 128 << 20
"""Size limit in bytes: an InfiniBand subnet of 100,000 adapters, or the log of a large job."""
MATCHED_CHARACTERS = 1 << 20
"""Length of the beginning of a text by which its format is recognised."""
MAX_TEXT_BYTES = 8 << 20
"""Size limit in bytes of files that an administrator writes."""
MAX_NODE_BYTES = 4 << 20
"""Size limit in bytes of files that describe one node."""


@dataclass(frozen=True)
class TopologyFormat:
    """One format of topology files."""

    name: str
    """Name of the format, as in `topology read --format`."""
    matches: Callable[[str], bool]
    """Returns whether a text looks like this format; no two formats may claim the same text."""
    read: Callable[[str, str], Cluster]
    """Reads (text, file name for messages). Raises UserError `FILE:LINE: what; expected ...` for malformed text."""
    largest: int = MAX_FILE_BYTES
    """Maximum length of a text, in characters."""


def list_formats() -> tuple[TopologyFormat, ...]:
    """List every format that can be read, in the order in which they are tried."""
    return (
        TopologyFormat("slurm_show_topology", matches_scontrol, read_scontrol, MAX_TEXT_BYTES),
        TopologyFormat("slurm_topology_conf", matches_topology_conf, read_topology_conf, MAX_TEXT_BYTES),
        TopologyFormat("slurm_topology_yaml", matches_topology_yaml, read_topology_yaml, MAX_TEXT_BYTES),
        TopologyFormat("topograph", matches_topograph, read_topograph, MAX_TEXT_BYTES),
        TopologyFormat("slurm_environment", matches_slurm_environment, read_slurm_environment),
        TopologyFormat("nvidia_smi", matches_nvidia_smi, read_nvidia_smi, MAX_NODE_BYTES),
        TopologyFormat("nvidia_smi_peers", matches_nvidia_smi_peers, read_nvidia_smi_peers, MAX_NODE_BYTES),
        TopologyFormat("nvidia_smi_nvlinks", matches_nvidia_smi_nvlinks, read_nvidia_smi_nvlinks, MAX_NODE_BYTES),
        TopologyFormat("rocm_smi", matches_rocm_smi, read_rocm_smi, MAX_NODE_BYTES),
        TopologyFormat("nccl_xml", matches_nccl_xml, read_nccl_xml, MAX_NODE_BYTES),
        TopologyFormat("nccl_graph", matches_nccl_graph, read_nccl_graph, MAX_NODE_BYTES),
        TopologyFormat("nccl_log", matches_nccl_log, read_nccl_log),
        TopologyFormat("hwloc_xml", matches_hwloc_xml, read_hwloc_xml, MAX_NODE_BYTES),
        TopologyFormat("ibnetdiscover", matches_ibnetdiscover, read_ibnetdiscover),
        TopologyFormat("iblinkinfo", matches_iblinkinfo, read_iblinkinfo),
        TopologyFormat("subnet_lst", matches_subnet_lst, read_subnet_lst),
        TopologyFormat("ibdiagnet_csv", matches_ibdiagnet_csv, read_ibdiagnet_csv),
        TopologyFormat("ibstat", matches_ibstat, read_ibstat, MAX_NODE_BYTES),
        TopologyFormat("hostlist", matches_hostlist, read_hostlist),
        TopologyFormat("hostfile", matches_hostfile, read_hostfile),
    )


def read_topology_file(path: Path, format: str | None = None) -> Cluster:
    """Read a topology file. Raises UserError, one line, for anything else."""
    return read_topology_text(_read_text(path), str(path), format)


def read_topology_text(text: str, name: str, format: str | None = None) -> Cluster:
    """Read a topology from text. name: what error messages call it; format: its format, else recognised."""
    formats = list_formats()
    text = _normalise_line_ends(text)
    if format is not None:
        chosen = [candidate for candidate in formats if candidate.name == format]
        if not chosen:
            raise UserError(f"--format {format}: choose one of {', '.join(candidate.name for candidate in formats)}")
    elif not (chosen := _find_formats(text)):
        raise UserError(
            f"{name}: not a topology in a known format; known: {', '.join(candidate.name for candidate in formats)}"
        )
    if len(text) > chosen[0].largest:
        limit = chosen[0].largest >> 20
        raise UserError(f"{name}: {len(text) >> 20} MiB that look like {chosen[0].name}; expected at most {limit} MiB")
    # Readers make no reference cycles, and a collection would look through the millions of records of a large fabric.
    with pause_gc():
        return chosen[0].read(text, name)


def _find_formats(text: str) -> list[TopologyFormat]:
    """List the formats that claim a text; a long one by its beginning, as each format would scan all of it."""
    head = text[:MATCHED_CHARACTERS]
    if len(head) < len(text):
        head = head[: head.rfind("\n") + 1] or head
    return [candidate for candidate in list_formats() if candidate.matches(head)]


def decode_text(content: bytes) -> str:
    """Decode a file: UTF-8, or UTF-16 with a byte order mark, as some shells write redirected output."""
    encoding = "utf-16" if content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8"
    return content.decode(encoding, "replace")


def _normalise_line_ends(text: str) -> str:
    """Remove the byte order mark and convert line ends to Unix style."""
    text = text.removeprefix("\ufeff")
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _read_text(path: Path) -> str:
    try:
        with open_to_read(path) as file:
            if not os.fstat(file.fileno()).st_size:
                # Some files of /proc and /sys, such as /proc/kmsg, make a reader wait for more text without an end.
                os.set_blocking(file.fileno(), False)
            content = file.read(MAX_FILE_BYTES + 1) or b""
    except NotRegularError as error:
        if path.is_dir():
            hint = "name one of its files, or pipe a command: scontrol show topology | hpc-train topology read -"
            raise UserError(f"{path}: a directory; {hint}") from None
        raise UserError(f"{path}: {error.strerror}; give its text to `hpc-train topology read -`") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise UserError(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB; not a topology file")
    return decode_text(content)
