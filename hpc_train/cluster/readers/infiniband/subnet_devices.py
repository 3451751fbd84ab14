"""The devices of an InfiniBand subnet, their cables and the speeds of these, as every reader of a subnet builds them.

Names and codes of speeds: InfiniBand Architecture Specification, volume 1, PortInfo (LinkSpeedActive,
LinkSpeedExtActive). Rates of ports: Linux, drivers/infiniband/core/sysfs.c (rate_show). Signalling rates: rdma-core,
libibmad/src/dump.c (mad_dump_linkspeed, mad_dump_linkspeedext). Codes of ibdiagnet: ibutils2, ibdm (IBLinkSpeed).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from hpc_train.errors import UserError

SWITCH, CA, ROUTER = "switch", "ca", "router"
_LETTERS = {"S": SWITCH, "H": CA, "R": ROUTER}
_GUID = re.compile(r"[SHR]-[0-9a-fA-F]{16}")
_LONGEST = 1000
"""Maximum length of a line, in characters; a node description has up to 64."""


class CableEnd(NamedTuple):
    """One port line: the device at the other end of the cable."""

    far: str
    """Id of the device at the other end."""
    far_port: int
    line: int
    far_name: str | None
    """The other end's node description."""
    rate: str | None
    """Width and speed: 4xHDR."""


@dataclass(slots=True)
class SubnetDevice:
    """A switch, a channel adapter or a router."""

    id: str
    """S-, H- or R- and 16 hexadecimal digits of its node GUID; in ibsim's files any string."""
    kind: str
    line: int | None
    """Line of its record; None for a device that is only seen at the far end of a cable."""
    ports: int = 255
    name: str | None = None
    """Node description of the device."""
    system: str | None = None
    """System image GUID, 16 hexadecimal digits."""
    cables: dict[int, CableEnd] = field(default_factory=dict)
    """Cables by port of this device."""


def get_device_kind(id: str) -> str | None:
    """Return the kind of a device by the first letter of its id; None for an id without a GUID."""
    return _LETTERS[id[0]] if _GUID.fullmatch(id) else None


def check_line_length(line: str, name: str, number: int) -> None:
    """Raise UserError for a line longer than any that a tool writes. name: of the file. number: of the line."""
    if len(line) > _LONGEST:
        raise UserError(f"{name}:{number}: {len(line)} characters in a line; expected at most {_LONGEST}")


@dataclass(frozen=True)
class LinkSpeed:
    """One generation of links; the rates are those of one lane in one direction."""

    name: str
    gbit_s: float
    """Rate as ports report it, 10^9 bit/s (FDR: 56 for four lanes)."""
    signalling: str
    """Signalling rate in Gbit/s, as iblinkinfo prints it."""
    code: int
    """ibdiagnet's code: one bit."""


SPEEDS = (
    LinkSpeed("SDR", 2.5, "2.5", 1),
    LinkSpeed("DDR", 5, "5.0", 2),
    LinkSpeed("QDR", 10, "10.0", 4),
    LinkSpeed("FDR", 14, "14.0625", 1 << 8),
    LinkSpeed("EDR", 25, "25.78125", 1 << 9),
    LinkSpeed("HDR", 50, "53.125", 1 << 10),
    LinkSpeed("NDR", 100, "106.25", 1 << 11),
    LinkSpeed("XDR", 200, "212.5", 1 << 24),
)
FDR10 = LinkSpeed("FDR10", 10, "10.0", 1 << 16)
"""A vendor's variant of QDR, with the line code of FDR; tools write its name, because its rate is QDR's."""
_RATES = {speed.name: speed.gbit_s for speed in (*SPEEDS, FDR10)}


@cache
def parse_rate(rate: str | None) -> float | None:
    """Parse a link's width and speed: 4xHDR -> 200 Gbit/s; None for an unknown speed."""
    match = re.fullmatch(r"(\d{1,2})x(\w+)", rate or "")
    lane = _RATES.get(match[2]) if match else None
    return float(int(match[1]) * lane) if match and lane else None
