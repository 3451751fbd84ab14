"""Read `nvidia-smi nvlink -s` (--status): how many NVLinks of each GPU of a node are up.

The output does not say what is at the other end of a link.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from hpc_train.cluster.readers.node.nvidia_smi_rows import clean_lines, looks_like_matrix, looks_like_peer_matrix
from hpc_train.cluster.spec import UNNAMED_HOST, Cluster, Gpu, Node
from hpc_train.errors import UserError

MAX_GPUS = 64
MAX_LINKS = 64
_GPU = re.compile(
    r"[^\S\n]*GPU (\d{1,3}): ([^\n(]{1,80}?)[^\S\n]*(?:\(UUID:[^\n)]{0,80}\))?[^\S\n]*(NVML:.*|Device .*)?"
)
_LINK = re.compile(r"[^\S\n]*Link (\d{1,3}): (<inactive>|[0-9.]{1,9} GB/s)[^\S\n]*")
_NO_LINKS = re.compile(r"does not (?:have or )?support Nvlink|NVLink is not supported", re.IGNORECASE)
_ALL_DOWN = re.compile(r"all links are inActive", re.IGNORECASE)
_LOOKS = re.compile(
    r"^[^\S\n]*GPU \d{1,3}: [^\n]{1,200}(?:\n[^\S\n]*Link \d{1,3}: (?:<inactive>|[0-9.]{1,9} GB/s)|"
    r"(?:\n[^\S\n]*)?(?:NVML: Unable to retrieve N|Device does not have or support N))",
    re.IGNORECASE | re.MULTILINE,
)
_EXAMPLE = "the whole output of `nvidia-smi nvlink -s`"


@dataclass
class _GpuLinks:
    id: str
    name: str
    line: int
    speeds: list[float | None] = field(default_factory=list)
    """GB/s of each link, one direction; None of one that is down."""
    unsupported: bool = False
    all_down: bool = False

    @property
    def active(self) -> int:
        return sum(speed is not None for speed in self.speeds)


def matches_nvidia_smi_nvlinks(text: str) -> bool:
    """Whether the text has GPUs with their NVLinks, and no matrix of `nvidia-smi topo`."""
    return _LOOKS.search(text) is not None and not looks_like_matrix(text) and not looks_like_peer_matrix(text)


def read_nvidia_smi_nvlinks(text: str, name: str) -> Cluster:
    """Read the GPUs; `nvlinks` counts the links that are up. Notes name GPUs with fewer than others, and slow links.

    Raises UserError for output that is cut or abridged: links are numbered from 0, and GPUs of a kind have as many.
    """
    gpus: list[_GpuLinks] = []
    for number, line in enumerate(clean_lines(text), 1):
        _take_line(gpus, line, f"{name}:{number}")
    if not gpus:
        raise UserError(f"{name}:1: no GPU; expected {_EXAMPLE}")
    _check_whole(gpus, name)
    node = Node(UNNAMED_HOST, tuple(Gpu(gpu.id, name=gpu.name, nvlinks=gpu.active) for gpu in gpus))
    return Cluster("nvidia_smi_nvlinks", (node,), notes=tuple(_list_notes(gpus)))


def _take_line(gpus: list[_GpuLinks], line: str, where: str) -> None:
    if match := _GPU.fullmatch(line):
        id = f"GPU{int(match[1])}"
        if len(gpus) == MAX_GPUS or any(gpu.id == id for gpu in gpus):
            raise UserError(f"{where}: {id} again, or more than {MAX_GPUS} GPUs; expected the output of one node")
        gpus.append(_GpuLinks(id, match[2].strip(), int(where.rpartition(":")[2])))
        line = match[3] or ""
    if not gpus or not line.strip():
        return
    if _NO_LINKS.search(line):
        gpus[-1].unsupported = True
    elif _ALL_DOWN.search(line):
        gpus[-1].all_down = True
    elif link := _LINK.fullmatch(line):
        _add_link(gpus[-1], int(link[1]), link[2], where)
    # A line that begins like one of these and matches none was cut, or shortened to `...`.
    elif re.match(r"\s*(?:Link \d|\[?\.\.\.|NVML|G(?:P(?:U\b.*)?)?$)", line):
        raise UserError(f"{where}: {line.strip()[:60]!r} is not a GPU or the state of a link; expected {_EXAMPLE}")


def _add_link(gpu: _GpuLinks, number: int, state: str, where: str) -> None:
    if number != len(gpu.speeds) or number >= MAX_LINKS:
        raise UserError(f"{where}: link {number} of {gpu.id} after {len(gpu.speeds)} links; expected {_EXAMPLE}")
    speed = state.removesuffix(" GB/s")
    if state != "<inactive>" and not re.fullmatch(r"\d{1,6}(\.\d{1,6})?", speed):
        raise UserError(f"{where}: {state!r}; expected a speed such as 26.562 GB/s, or <inactive>")
    # A link of 0 GB/s carries nothing.
    gpu.speeds.append(None if state == "<inactive>" or not float(speed) else float(speed))


def _check_whole(gpus: list[_GpuLinks], name: str) -> None:
    listed: dict[str, tuple[str, int]] = {}
    for gpu in gpus:
        if gpu.speeds:
            first, links = listed.setdefault(gpu.name, (gpu.id, len(gpu.speeds)))
            if links != len(gpu.speeds):
                raise UserError(
                    f"{name}:{gpu.line}: {len(gpu.speeds)} links of {gpu.id}, {links} of {first}; expected {_EXAMPLE}"
                )
        elif not gpu.unsupported and not gpu.all_down:
            raise UserError(f"{name}:{gpu.line}: no link of {gpu.id}; expected {_EXAMPLE}")


def _list_notes(gpus: list[_GpuLinks]) -> list[str]:
    notes = ["which GPUs the NVLinks join is not in this output (nvidia-smi topo -m has it)"]
    usual = {kind: max(gpu.active for gpu in gpus if gpu.name == kind) for kind in {gpu.name for gpu in gpus}}
    for gpu in gpus:
        if gpu.unsupported:
            notes.append(f"{gpu.id} has no NVLinks")
        elif gpu.active < usual[gpu.name] or gpu.all_down:
            down = f"; link {_list_down(gpu)} down" if gpu.speeds else "; all are down"
            notes.append(f"{gpu.id} has {gpu.active} active NVLinks where others have {usual[gpu.name]}{down}")
    speeds = Counter(speed for gpu in gpus for speed in gpu.speeds if speed is not None)
    if len(speeds) > 1:
        most = max(speeds, key=lambda speed: (speeds[speed], speed))
        slow = [f"{gpu.id}: {speed:g}" for gpu in gpus for speed in gpu.speeds if speed is not None and speed < most]
        if slow:
            notes.append(f"links slower than the usual {most:g} GB/s: {', '.join(slow[:6])}")
    return notes


def _list_down(gpu: _GpuLinks) -> str:
    return ", ".join(str(number) for number, speed in enumerate(gpu.speeds) if speed is None)
