"""Wire protocol of the job's store: mutual proof of the job's secret, then authenticated frames.

The server first sends a nonce drawn for this connection; the client answers with its own nonce and a code (HMAC-SHA256)
of both under the secret; the server returns another code. Neither side reveals anything of use before the other has
proved itself, and no answer can be used twice. From then on each frame carries a code (keyed BLAKE2b) under a key of
this connection and direction, and of its sequence number: nothing can be inserted, changed, dropped or repeated
unnoticed. Nothing is encrypted: whoever can record the network's packets can read them.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

MAGIC = b"hpc_train store1"
NONCE_BYTES = 32
PROOF_BYTES = 32
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES
REFUSAL = bytes(PROOF_BYTES)
"""Sent by a server in place of its proof to a client that does not know the secret."""
LARGEST_FRAME = 1 << 30
"""Largest frame in bytes, from peers that have proved themselves."""
_HEADER = struct.Struct(">I16s")
_FIXED = struct.Struct(">BqI")
_CODE_BYTES = 16
HEADER_BYTES = _HEADER.size


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


class ProtocolError(ValueError):
    """Raised if the other side does not know the secret, or the data received is not what it sent."""


@dataclass(frozen=True)
class Message:
    """A request (code: Operation) or an answer (code: 0)."""

    code: int
    number: int = 0
    parts: Sequence[bytes] = ()


@dataclass
class Direction:
    """One direction of a connection: the key of its codes, and the number of frames sent that way."""

    key: bytes
    frames: int = field(default=0)

    def _code(self, payload: bytes) -> bytes:
        number = self.frames.to_bytes(8, "big")
        self.frames += 1
        return hashlib.blake2b(number + payload, key=self.key, digest_size=_CODE_BYTES).digest()

    def seal(self, message: Message) -> bytes:
        """Build the frame of the next message. Raises ProtocolError if it is too large for a frame."""
        payload = _encode(message)
        if len(payload) > LARGEST_FRAME:
            raise ProtocolError(f"{len(payload)} bytes are more than the store takes at once")
        return _HEADER.pack(len(payload), self._code(payload)) + payload

    def open(self, header: bytes, payload: bytes) -> Message:
        """Verify the next frame and return its message. Raises ProtocolError unless it is what the peer sent."""
        _, code = _HEADER.unpack(header)
        if not hmac.compare_digest(code, self._code(payload)):
            raise ProtocolError("a frame was changed on its way")
        return _decode(payload)


def payload_bytes(header: bytes) -> int:
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
        where = f"{self.address[0]}:{self.address[1]}".encode()
        text = b"\0".join((MAGIC, purpose, where)) + b"\0" + self.server_nonce + self.client_nonce
        return hmac.digest(self.secret, text, "sha256")

    def client_proof(self) -> bytes:
        return self._derive(b"client")

    def server_proof(self) -> bytes:
        return self._derive(b"server")

    def to_server(self) -> Direction:
        return Direction(self._derive(b"to server"))

    def to_client(self) -> Direction:
        return Direction(self._derive(b"to client"))


def _encode(message: Message) -> bytes:
    parts = message.parts
    lengths = struct.pack(f">{len(parts)}I", *map(len, parts))
    return b"".join((_FIXED.pack(message.code, message.number, len(parts)), lengths, *parts))


def _decode(payload: bytes) -> Message:
    try:
        code, number, count = _FIXED.unpack_from(payload)
        lengths = struct.unpack_from(f">{count}I", payload, _FIXED.size)
    except struct.error:
        raise ProtocolError("a frame that ends too early") from None
    at = _FIXED.size + 4 * count
    if at + sum(lengths) != len(payload):
        raise ProtocolError("a frame whose parts do not fill it")
    parts = []
    for length in lengths:
        parts.append(payload[at : at + length])
        at += length
    return Message(code, number, parts)
