"""Parse ibnetdiscover's dump, and ibsim's net files, which have the same syntax: records of a device and its ports.

Grammar: rdma-core, infiniband-diags/ibnetdiscover.c (out_switch, out_ca and their ports); ibsim/sim_net.c.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpc_train.cluster.readers.infiniband.subnet_devices import (
    CA,
    ROUTER,
    SWITCH,
    CableEnd,
    SubnetDevice,
    check_line_length,
    get_device_kind,
)
from hpc_train.errors import UserError


def parse_ibnetdiscover(text: str, name: str) -> dict[str, SubnetDevice]:
    """Parse the devices that have a record of their own, in the file's order. name: what messages call the file."""
    parser = _Parser(name)
    for number, line in enumerate(_iterate_lines(text), 1):
        # Nearly all lines of a large dump are ports in ibnetdiscover's own form; one expression reads them whole.
        if line.startswith("[") and (port := _USUAL_PORT.match(line)):
            parser.add_usual_port(port, number)
        elif line:
            parser.take(line.strip(), number)
    if not parser.devices:
        raise UserError(f"{name}:{number}: the file ends before any device; expected a line such as {_HEADER_EXAMPLE}")
    # A file that was cut in its last line still parses if the cut falls after the cable; but then the name, which other
    # lines have in a comment, is missing.
    record, _, comment = line.partition("#")
    if '"' in record and '"' not in comment and parser.names_in[record[0] == "["]:
        raise UserError(
            f"{name}:{number}: the file ends before the name: {line[:60]!r}; expected one as in other lines"
        )
    return parser.devices


def _iterate_lines(text: str) -> Iterator[str]:
    """Yield what text.split("\\n") lists, without the list: its strings would take twice the memory of the text."""
    position = 0
    while position <= len(text):
        end = text.find("\n", position + _PIECE)
        end = len(text) if end < 0 else end
        yield from text[position:end].split("\n")
        position = end + 1


_PIECE = 1 << 20
"""Characters of which the lines are made at a time."""
_WORDS = {"switch": SWITCH, "ca": CA, "hca": CA, "rt": ROUTER, "router": ROUTER}
_HEADER_EXAMPLE = 'Switch 36 "S-0002c90200421234"'
_PORT_EXAMPLE = '[1] "S-0002c90200421234"[21]'
_HEADER = re.compile(r'(switch|h?ca|rt|router)\s+(\d{1,3})\s+"([^"]+)"\s*(?:\(scp\)\s*)?(#.*)?', re.IGNORECASE)
_PORT = re.compile(
    r'\[(\d{1,3})\](?:\[ext \d+\])?\s*(?:\([0-9a-fA-F]+\))?\s*"([^"]+)"\s*(?:\[(\d{1,3})\])?(?:\[ext \d+\])?'
    r"\s*(?:\([0-9a-fA-F]+\))?\s*((?:\w+=\w+\s*)*)(#.*)?"
)
_USUAL_PORT = re.compile(
    r'\[(\d{1,3})\](?:\([0-9a-f]+\))?\s*"([SHR]-[0-9a-f]{16})"\[(\d{1,3})\](?:\([0-9a-f]+\))?'
    r"[ \t]*#[^\"\n]{0,100}\"([^\"\n]{1,100})\"[^\"\n]{0,60}?\b(\d+x[A-Z]+\d*)\b[^\"\n]{0,60}$"
)
_PORT_RATE = re.compile(r"\b\d+x[A-Z]+\d*\b")
_PLAIN_NAME = re.compile(r"#\s*([^\"]*?)\s*(?:\b(?:enhanced|base) port\b.*|\blid\b.*|\blmc\b.*)?")
_SYSTEM = re.compile(r"sysimgguid=0x([0-9a-fA-F]{1,16})\b")
_ASSIGNMENT = re.compile(r"(?:vendid|devid|(?:sysimg|switch|h?ca|rt|node|port)guids?|width|speed|pdebug)\s*[=+].*")
_GROUPING = re.compile(r"Chassis \d+.*|Non-Chassis Nodes|Hostname: .*")
_DIAGNOSTIC = re.compile(r"(?:src/|ib\w+: |\w+\.c[:;]\d).*")
_PROMPT = re.compile(r"\[?[\w.-]+@[\w.-]+[^\"]*[#$%>][^\"]*")
_SIMULATOR = re.compile(r"(?:module|include|do)\b.*|@.*")


class _Parser:
    def __init__(self, name: str) -> None:
        self.name = name
        self.devices: dict[str, SubnetDevice] = {}
        self.system: str | None = None
        self.current: SubnetDevice | None = None
        self.texts: dict[str, str] = {}
        """Ids, names and rates by themselves: a large dump has each many times, and one string for all saves memory."""
        self.names_in = {True: False, False: False}
        """Whether port lines, and whether headers, have names in this file."""

    def take(self, line: str, number: int) -> None:
        if not line or line.startswith(("#", "vendid=0x", "devid=0x", "switchguid=0x", "caguid=0x")):
            return
        check_line_length(line, self.name, number)
        if line.startswith("[") and (port := _PORT.fullmatch(line)):
            self._parse_port(port, number)
        elif '"' in line and (header := _HEADER.fullmatch(line)):
            self._parse_header(header, number)
        elif system := _SYSTEM.match(line):
            self.system = system[1].lower().zfill(16)
        elif not self._is_aside(line):
            raise self._make_error(line, number)

    def _is_aside(self, line: str) -> bool:
        """Whether a line is a heading or a terminal's; before the first record also anything that is part of none."""
        if _ASSIGNMENT.fullmatch(line) or _GROUPING.fullmatch(line):
            return True
        if _SIMULATOR.fullmatch(line):
            return False
        before = not self.devices and '"' not in line
        return before or bool(_DIAGNOSTIC.fullmatch(line) or _PROMPT.fullmatch(line))

    def _make_error(self, line: str, number: int) -> UserError:
        where = f"{self.name}:{number}: "
        if _SIMULATOR.fullmatch(line):
            return UserError(f"{where}{line[:60]!r} is a command of ibsim; expected a file of devices and cables only")
        if line.startswith("["):
            return UserError(f"{where}a port that is cut off or misspelt: {line[:60]!r}; expected {_PORT_EXAMPLE}")
        return UserError(f"{where}not understood: {line[:60]!r}; expected {_HEADER_EXAMPLE} or {_PORT_EXAMPLE}")

    def _parse_header(self, match: re.Match[str], number: int) -> None:
        word, ports, id, comment = match.groups()
        kind, described = _WORDS[word.lower()], self.devices.get(id)
        # ibsim allows any id, ibnetdiscover puts the kind into its first letter.
        if get_device_kind(id) not in (None, kind):
            raise UserError(f"{self.name}:{number}: {id} is called {word}; expected the kind that its letter says")
        if described and (described.kind, described.ports) != (kind, int(ports)):
            raise UserError(
                f"{self.name}:{number}: {id} has {ports} ports, in line {described.line} {described.ports}; "
                "expected as many"
            )
        if described is None:
            name = self._get_quoted(comment, number) or self._get_plain_name(comment)
            self.names_in[False] |= name is not None
            described = self.devices[id] = SubnetDevice(id, kind, number, int(ports), name, self.system)
        self.current, self.system = described, None

    def _parse_port(self, match: re.Match[str], number: int) -> None:
        near, far, far_port, _, comment = match.groups()
        device = self.current
        if device is None:
            raise UserError(
                f"{self.name}:{number}: a port of a record that began before the file; expected {_HEADER_EXAMPLE} first"
            )
        if far_port is None and get_device_kind(far):
            raise UserError(f"{self.name}:{number}: the port of {far} is missing; expected {_PORT_EXAMPLE}")
        port = int(near)
        if not 1 <= port <= device.ports:
            raise UserError(f"{self.name}:{number}: port {port} of {device.id}; expected 1 to {device.ports}")
        rate = _PORT_RATE.search(comment, comment.rfind('"') + 1) if comment else None
        cable = CableEnd(far, int(far_port or 1), number, self._get_quoted(comment, number), rate[0] if rate else None)
        self.names_in[True] |= cable.far_name is not None
        self._add_cable(device, port, cable, number)

    def add_usual_port(self, match: re.Match[str], number: int) -> None:
        """Parse a port line in ibnetdiscover's own form, with a name and a rate."""
        device = self.current
        near, far, far_port, far_name, rate = match.groups()
        if device is None or not 1 <= (port := int(near)) <= device.ports:
            self.take(match.string.strip(), number)  # says what is wrong
            return
        self.names_in[True] = True
        share = self.texts.setdefault
        cable = CableEnd(share(far, far), int(far_port), number, share(far_name, far_name), share(rate, rate))
        self._add_cable(device, port, cable, number)

    def _add_cable(self, device: SubnetDevice, port: int, cable: CableEnd, number: int) -> None:
        far = cable.far
        before = device.cables.setdefault(port, cable)
        if before is cable:
            return
        if before[:2] != cable[:2]:
            raise UserError(
                f"{self.name}:{number}: {device.id}[{port}] goes to {far}[{cable.far_port}], in line {before.line} to "
                f"{before.far}[{before.far_port}]; expected one cable a port"
            )

    def _get_quoted(self, comment: str | None, number: int) -> str | None:
        """Return the text between the first and the last quotation mark."""
        if not comment or (first := comment.find('"')) < 0:
            return None
        last = comment.rfind('"')
        if first == last:
            raise UserError(
                f'{self.name}:{number}: a name that does not end: {comment[first:][:60]!r}; expected "name"'
            )
        return comment[first + 1 : last]

    def _get_plain_name(self, comment: str | None) -> str | None:
        """Return a name without quotation marks, which ibsim also takes."""
        match = _PLAIN_NAME.fullmatch(comment) if comment else None
        return (match[1] or None) if match else None
