"""From a file that describes a topology to a Cluster, whoever wrote it: the format is told by its content."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpc_train.cluster import ibstat, nccl_xml, nvidia_smi, rocm_smi
from hpc_train.cluster.infiniband import reader as ibnetdiscover
from hpc_train.cluster.slurm import environment, hostfile, show, topograph, topology_conf, topology_yaml
from hpc_train.cluster.spec import Cluster
from hpc_train.errors import UserError

LARGEST = 256 << 20
"""Bytes; no description of a real machine comes near."""


@dataclass(frozen=True)
class Format:
    """One kind of topology file."""

    name: str
    """As `topology read --format` takes it."""
    matches: Callable[[str], bool]
    """Whether a text looks like it; no two formats may claim the same text."""
    read: Callable[[str, str], Cluster]
    """(text, file name for messages) -> Cluster. UserError `FILE:LINE: what; expected ...` for what it cannot be."""


def formats() -> tuple[Format, ...]:
    """Every format that is read, in the order in which they are tried."""
    return (
        Format("slurm_show_topology", show.matches, show.read),
        Format("slurm_topology_conf", topology_conf.matches, topology_conf.read),
        Format("slurm_topology_yaml", topology_yaml.matches, topology_yaml.read),
        Format("topograph", topograph.matches, topograph.read),
        Format("slurm_environment", environment.matches, environment.read),
        Format("nvidia_smi", nvidia_smi.matches, nvidia_smi.read),
        Format("rocm_smi", rocm_smi.matches, rocm_smi.read),
        Format("nccl_xml", nccl_xml.matches, nccl_xml.read),
        Format("ibnetdiscover", ibnetdiscover.matches, ibnetdiscover.read),
        Format("ibstat", ibstat.matches, ibstat.read),
        Format("hostlist", hostfile.is_hostlist, hostfile.read_hostlist),
        Format("hostfile", hostfile.is_hostfile, hostfile.read_hostfile),
    )


def read_file(path: Path, format: str | None = None) -> Cluster:
    """The cluster that a file describes. Raises UserError, one line, for anything that is not such a file."""
    return read_text(_text(path), str(path), format)


def read_text(text: str, name: str, format: str | None = None) -> Cluster:
    """The same of a text; name: what messages call it."""
    known = formats()
    if format is not None:
        chosen = [it for it in known if it.name == format]
        if not chosen:
            raise UserError(f"--format {format}: choose one of {', '.join(it.name for it in known)}")
    elif not (chosen := [it for it in known if it.matches(text)]):
        raise UserError(f"{name}: not a topology that is read here; known: {', '.join(it.name for it in known)}")
    return chosen[0].read(text, name)


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > LARGEST:
            raise UserError(f"{path}: larger than {LARGEST >> 20} MiB; not a topology file")
        return path.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
