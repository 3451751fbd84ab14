"""From a file that describes a topology to a Cluster, whoever wrote it: the format is told by its content."""

from __future__ import annotations

import codecs
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpc_train.cluster import ibstat, nccl_xml, nvidia_smi, rocm_smi
from hpc_train.cluster.infiniband import reader as ibnetdiscover
from hpc_train.cluster.slurm import environment, hostfile, show, topograph, topology_conf, topology_yaml
from hpc_train.cluster.spec import Cluster
from hpc_train.errors import UserError

LARGEST = 64 << 20
"""Size limit in bytes; ibnetdiscover writes about a kilobyte per adapter, so this is a fabric of 60,000."""
LARGEST_TEXT = 8 << 20
"""Size limit in bytes of files that an administrator writes."""
LARGEST_NODE = 4 << 20
"""Size limit in bytes of files that describe one node."""


@dataclass(frozen=True)
class Format:
    """One kind of topology file."""

    name: str
    """As `topology read --format` takes it."""
    matches: Callable[[str], bool]
    """Whether a text looks like it; no two formats may claim the same text."""
    read: Callable[[str, str], Cluster]
    """(text, file name for messages) -> Cluster. UserError `FILE:LINE: what; expected ...` for what it cannot be."""
    largest: int = LARGEST
    """Longest text accepted, in characters."""


def formats() -> tuple[Format, ...]:
    """Every format that is read, in the order in which they are tried."""
    return (
        Format("slurm_show_topology", show.matches, show.read, LARGEST_TEXT),
        Format("slurm_topology_conf", topology_conf.matches, topology_conf.read, LARGEST_TEXT),
        Format("slurm_topology_yaml", topology_yaml.matches, topology_yaml.read, LARGEST_TEXT),
        Format("topograph", topograph.matches, topograph.read, LARGEST_TEXT),
        Format("slurm_environment", environment.matches, environment.read),
        Format("nvidia_smi", nvidia_smi.matches, nvidia_smi.read, LARGEST_NODE),
        Format("rocm_smi", rocm_smi.matches, rocm_smi.read, LARGEST_NODE),
        Format("nccl_xml", nccl_xml.matches, nccl_xml.read, LARGEST_NODE),
        Format("ibnetdiscover", ibnetdiscover.matches, ibnetdiscover.read),
        Format("ibstat", ibstat.matches, ibstat.read, LARGEST_NODE),
        Format("hostlist", hostfile.is_hostlist, hostfile.read_hostlist),
        Format("hostfile", hostfile.is_hostfile, hostfile.read_hostfile),
    )


def read_file(path: Path, format: str | None = None) -> Cluster:
    """The cluster that a file describes. Raises UserError, one line, for anything that is not such a file."""
    return read_text(_text(path), str(path), format)


def read_text(text: str, name: str, format: str | None = None) -> Cluster:
    """The same of a text; name: what messages call it."""
    known = formats()
    text = _plain(text)
    if format is not None:
        chosen = [it for it in known if it.name == format]
        if not chosen:
            raise UserError(f"--format {format}: choose one of {', '.join(it.name for it in known)}")
    elif not (chosen := [it for it in known if it.matches(text)]):
        raise UserError(f"{name}: not a topology that is read here; known: {', '.join(it.name for it in known)}")
    if len(text) > chosen[0].largest:
        most = chosen[0].largest >> 20
        raise UserError(f"{name}: {len(text) >> 20} MiB that look like {chosen[0].name}; expected at most {most} MiB")
    return chosen[0].read(text, name)


def decode(content: bytes) -> str:
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
            content = file.read(LARGEST + 1)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    if len(content) > LARGEST:
        raise UserError(f"{path}: larger than {LARGEST >> 20} MiB; not a topology file")
    return decode(content)
