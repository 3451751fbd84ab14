"""Wire protocol of the job's store: mutual proof of the job's secret, then authenticated frames.

The server first sends a nonce drawn for this connection; the client answers with its own nonce and a code (HMAC-SHA256)
of both under the secret; the server returns another code. Neither side reveals anything of use before the other has
proved itself, and no answer can be used twice. From then on each frame carries a code (keyed BLAKE2b) under a key of
this connection and direction, and of its sequence number and length: nothing can be inserted, changed, dropped or
repeated unnoticed. Nothing is encrypted: whoever can record the network's packets can read them.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

MAGIC = b"hpc_train store2"
NONCE_BYTES = 32
PROOF_BYTES = 32
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES
REFUSAL = bytes(PROOF_BYTES)
"""Sent by a server in place of its proof to a client that does not know the secret."""
LARGEST_FRAME = 1 << 30
"""Largest frame in bytes, from peers that have proved themselves."""
_HEADER = struct.Struct(">I16s")
"""Of a frame: bytes of its payload, and its code."""
_FIXED = struct.Struct(">BqI")
"""Beginning of a message: its code, its number, and how many parts follow."""
_PLACE = struct.Struct(">QI")
"""What a frame's code covers besides the payload: the frames sent before it, and the bytes of the payload."""
_CODE_BYTES = 16
_LARGEST_UNHASHED = 4096
"""Bytes of a payload up to which codes cover the payload itself; of a larger one, its hash."""
HEADER_BYTES = _HEADER.size
_SOCKET_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),  # seconds without traffic before the peer is probed
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 90_000),  # milliseconds that sent data may stay unacknowledged
)


class Operation(IntEnum):
    """Operation that a client requests."""

    SET = 1
    GET = 2
    WAIT = 3
    ADD = 4
    CHECK = 5
    COMPARE_SET = 6
    DELETE = 7
    COUNT = 8
    APPEND = 9
    MISSING = 10
    CLOCK = 11
    SET_AT_END = 12


class ProtocolError(ValueError):
    """Raised if the other side does not know the secret, or the data received is not what it sent."""


@dataclass(frozen=True)
class Message:
    """A request (code: Operation) or an answer (code: 0)."""

    code: int
    number: int = 0
    parts: Sequence[bytes] = ()


@dataclass(frozen=True)
class Payload:
    """An encoded message, and what its code covers: a large one is hashed once, however many peers it is sent to."""

    data: bytes
    covered: bytes


@dataclass
class Direction:
    """One direction of a connection: the key of its codes, and the number of frames sent that way."""

    key: bytes
    frames: int = field(default=0)

    def _code(self, payload: Payload) -> bytes:
        # The length tells a payload from the hash of another one.
        place = _PLACE.pack(self.frames, len(payload.data))
        self.frames += 1
        return hashlib.blake2b(place + payload.covered, key=self.key, digest_size=_CODE_BYTES).digest()

    def seal(self, payload: Payload) -> bytes:
        """Return the header that makes `payload` the next frame."""
        return _HEADER.pack(len(payload.data), self._code(payload))

    def open(self, header: bytes, data: bytes) -> Message:
        """Verify the next frame and return its message. Raises ProtocolError unless it is what the peer sent."""
        _, code = _HEADER.unpack(header)
        if not hmac.compare_digest(code, self._code(_hash_if_large(data))):
            raise ProtocolError("a frame was changed on its way")
        return _decode(data)


def _hash_if_large(data: bytes) -> Payload:
    return Payload(data, data if len(data) <= _LARGEST_UNHASHED else hashlib.blake2b(data).digest())


def parse_payload_bytes(header: bytes) -> int:
    """Return the length of the payload after a header. Raises ProtocolError if it is too long."""
    length: int = _HEADER.unpack(header)[0]
    if length > LARGEST_FRAME:
        raise ProtocolError(f"a frame of {length} bytes")
    return length


def make_secret() -> bytes:
    """Draw a secret for one attempt of one job."""
    return secrets.token_bytes(32)


def make_nonce() -> bytes:
    """Draw a number for one connection."""
    return secrets.token_bytes(NONCE_BYTES)


@dataclass(frozen=True)
class Handshake:
    """Codes and keys that both sides derive from the secret, the server's address and both nonces."""

    secret: bytes
    address: tuple[str, int]
    server_nonce: bytes
    client_nonce: bytes

    def _derive(self, purpose: bytes) -> bytes:
        address = f"{self.address[0]}:{self.address[1]}".encode()
        text = b"\0".join((MAGIC, purpose, address)) + b"\0" + self.server_nonce + self.client_nonce
        return hmac.digest(self.secret, text, "sha256")

    def make_client_proof(self) -> bytes:
        """Return the code that only a client that knows the secret can send."""
        return self._derive(b"client")

    def make_server_proof(self) -> bytes:
        """Return the code that only a server that knows the secret can send."""
        return self._derive(b"server")

    def to_server(self) -> Direction:
        """Return the direction of requests, for either side."""
        return Direction(self._derive(b"to server"))

    def to_client(self) -> Direction:
        """Return the direction of replies, for either side."""
        return Direction(self._derive(b"to client"))


def encode_message(message: Message) -> Payload:
    """Encode a message. Raises ProtocolError if it is too large for a frame."""
    parts = message.parts
    size = _FIXED.size + 4 * len(parts) + sum(map(len, parts))
    if size > LARGEST_FRAME:
        raise ProtocolError(f"{size} bytes are more than the store takes at once")
    lengths = struct.pack(f">{len(parts)}I", *map(len, parts))
    return _hash_if_large(b"".join((_FIXED.pack(message.code, message.number, len(parts)), lengths, *parts)))


def configure_socket(connected: socket.socket) -> None:
    """Send small frames at once, and notice within two minutes that the other side's node is gone."""
    for level, option, value in _SOCKET_OPTIONS:
        connected.setsockopt(level, option, value)


def _decode(payload: bytes) -> Message:
    try:
        code, number, count = _FIXED.unpack_from(payload)
        lengths = struct.unpack_from(f">{count}I", payload, _FIXED.size)
    except struct.error:
        raise ProtocolError("a frame that ends too early") from None
    position = _FIXED.size + 4 * count
    if position + sum(lengths) != len(payload):
        raise ProtocolError("a frame whose parts do not fill it")
    parts = []
    for length in lengths:
        parts.append(payload[position : position + length])
        position += length
    return Message(code, number, parts)
