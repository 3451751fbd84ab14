"""Connections to the server of the job's store: each proves the job's secret once, then carries one request at a time.

A thread that asks takes an idle connection of the pool, or opens another, and gives it back with its answer. A
connection whose call failed is closed, because a late answer must not be taken for that of another request.
"""

from __future__ import annotations

import hmac
import os
import socket
import time
from contextlib import suppress

import torch.distributed as dist

from hpc_train.runtime.store.protocol import (
    GREETING_BYTES,
    HEADER_BYTES,
    MAGIC,
    PROOF_BYTES,
    REFUSAL,
    Handshake,
    Message,
    ProtocolError,
    configure_socket,
    encode_message,
    make_nonce,
    parse_payload_bytes,
)

_RETRY_SECONDS = 0.05
_MAX_READ_AT_ONCE = 1 << 20


class ConnectionPool:
    """Connections to one server, each used by one thread at a time."""

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        self.address, self._secret = address, secret
        self.clones: list[dist.Store] = []
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._held_open: list[_Connection] = []
        """Open until this process ends, for `set_at_end`."""
        self._closed = False
        self._process = os.getpid()

    def is_forked(self) -> bool:
        """Return whether this is a child of the process that has opened the connections."""
        return self._process != os.getpid()

    def exchange(self, request: Message, seconds: float) -> Message:
        """Send a request and wait for its answer. Raises TimeoutError, OSError, ProtocolError and DistNetworkError."""
        deadline = time.monotonic() + seconds
        connection = self.acquire(seconds)
        try:
            reply = connection.exchange(request, deadline)
        except BaseException:
            self._busy.discard(connection)
            connection.close()  # a late answer must not be taken for that of another request
            raise
        self.release(connection)
        return reply

    def acquire(self, seconds: float) -> _Connection:
        """Return an idle connection, or a new one made within `seconds`. Raises DistNetworkError."""
        if self.is_forked():  # these connections belong to the parent
            self._idle, self._busy, self._held_open, self._process = [], set(), [], os.getpid()
        if self._closed:
            raise dist.DistNetworkError(
                f"the job's store at {format_address(self.address)}: this process has closed it"
            )
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = _Connection(self.address, self._secret, seconds)
        self._busy.add(connection)
        return connection

    def keep_open(self, request: Message, seconds: float) -> None:
        """Send a request on a connection of its own, which stays open until this process ends."""
        connection = _Connection(self.address, self._secret, seconds)
        connection.exchange(request, time.monotonic() + seconds)
        self._held_open.append(connection)
        os.register_at_fork(after_in_child=connection.close)  # a child that lives on would keep it open

    def release(self, connection: _Connection) -> None:
        """Give back a connection for other threads."""
        self._busy.discard(connection)
        self._idle.append(connection)
        if self._closed:
            self.close()

    def close(self) -> None:
        """Close all connections; calls of other threads that wait on one end with an error."""
        self._closed = True
        for connection in list(self._busy):
            connection.interrupt()
        for connections in (self._idle, self._held_open):
            while connections:
                connections.pop().close()


class _Connection:
    """One authenticated connection; one request at a time."""

    def __init__(self, address: tuple[str, int], secret: bytes, seconds: float) -> None:
        """Connect. Raises DistNetworkError if no server that knows the secret answers within `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                self._open(address, secret, deadline)
                return
            except ConnectionRefusedError as error:
                raise dist.DistNetworkError(f"{format_address(address)}: {explain_error(error)}") from None
            except ConnectionError as error:  # too many connected at once, so the server dropped some
                if time.monotonic() + _RETRY_SECONDS > deadline:
                    raise dist.DistNetworkError(f"{format_address(address)}: {explain_error(error)}") from None
                time.sleep(_RETRY_SECONDS)
            except (OSError, ProtocolError) as error:
                raise dist.DistNetworkError(f"{format_address(address)}: {explain_error(error)}") from None

    def _open(self, address: tuple[str, int], secret: bytes, deadline: float) -> None:
        self._socket = socket.create_connection(address, timeout=_compute_time_left(deadline))
        try:
            configure_socket(self._socket)
            greeting = self._read(GREETING_BYTES, deadline)
            if not greeting.startswith(MAGIC):
                raise ProtocolError("is not the store of an hpc_train job")
            handshake = Handshake(secret, address, greeting[len(MAGIC) :], make_nonce())
            self._socket.sendall(handshake.client_nonce + handshake.make_client_proof())
            proof = self._read(PROOF_BYTES, deadline)
            if hmac.compare_digest(proof, REFUSAL):
                raise ProtocolError("is the store of another job: it knows another secret")
            if not hmac.compare_digest(proof, handshake.make_server_proof()):
                raise ProtocolError("is not the job's store: it does not know the job's secret")
            self._outgoing, self._incoming = handshake.to_server(), handshake.to_client()
        except BaseException:
            self.close()
            raise

    def exchange(self, request: Message, deadline: float) -> Message:
        """Send a request and wait for its answer. Raises TimeoutError, OSError and ProtocolError."""
        self._socket.settimeout(_compute_time_left(deadline))
        payload = encode_message(request)
        self._socket.sendall(self._outgoing.seal(payload) + payload.data)
        header = self._read(HEADER_BYTES, deadline)
        return self._incoming.open(header, self._read(parse_payload_bytes(header), deadline))

    def _read(self, count: int, deadline: float) -> bytes:
        received = bytearray()
        while len(received) < count:
            self._socket.settimeout(_compute_time_left(deadline))
            data = self._socket.recv(min(count - len(received), _MAX_READ_AT_ONCE))
            if not data:
                raise ConnectionResetError("process 0, which serves it, has ended")
            received += data
        return bytes(received)

    def interrupt(self) -> None:
        """End the call of another thread that uses this connection, with an error."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.close()


def _compute_time_left(deadline: float) -> float:
    """Return the seconds until the deadline. Raises TimeoutError if none are left."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("timed out")
    return seconds


def format_address(address: tuple[str, int]) -> str:
    """Format an address as host:port."""
    return f"{address[0]}:{address[1]}"


def explain_error(error: Exception) -> str:
    """Return the text of an error, without the number that an OSError has."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
