"""Server of the job's store: keys and values behind authenticated connections, in a thread of process 0.

The life of a connection, all in that one thread:

    _accept   a stranger: the server sends its nonce
    _admit    the client's proof is right: the server sends its own, and frames may follow
    _answer   one request at a time; a `get` or `wait` is answered once its keys have values (key_values.py)
    _close    the client is gone, or sent what it should not: what it asked to set at its end is set now
"""

from __future__ import annotations

import hmac
import logging
import resource
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from hpc_train.runtime.store.key_values import KeyValues, Request
from hpc_train.runtime.store.protocol import (
    ANSWER_BYTES,
    HEADER_BYTES,
    MAGIC,
    NONCE_BYTES,
    REFUSAL,
    Direction,
    Handshake,
    Message,
    Operation,
    Payload,
    ProtocolError,
    configure_socket,
    encode_message,
    make_nonce,
    parse_payload_bytes,
)

HANDSHAKE_SECONDS = 10.0
"""How long a connection may stay open without proving that it knows the secret."""
MAX_STRANGERS = 512
"""Maximum number of unauthenticated connections; the oldest is dropped for a new one."""
_READ_BYTES = 1 << 18
"""Bytes that are read from a connection at a time."""
_LARGEST_COPIED = 1 << 16
"""Bytes of a message up to which it is copied behind its header, so that both leave in one call."""
_READ, _WRITE = select.EPOLLIN, select.EPOLLOUT
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Connection:
    """A connection from a client, authenticated or not."""

    peer: socket.socket
    nonce: bytes = field(default_factory=make_nonce)
    since: float = field(default_factory=time.monotonic)
    received: bytearray = field(default_factory=bytearray)
    to_send: deque[memoryview] = field(default_factory=deque)
    incoming: Direction | None = None
    """None until the peer has proved that it knows the secret."""
    outgoing: Direction | None = None
    waiting: Request | None = None
    last_value: tuple[bytes, bytes] | None = None
    """Key and value to store when this connection ends."""


class StoreServer:
    """Serve keys and values to the holders of `secret`, until `close`."""

    def __init__(self, address: str, secret: bytes, clients: int) -> None:
        """Listen on a free port of `address` (IPv4). clients: approximate number expected."""
        _allow_open_files(clients + MAX_STRANGERS)
        self._listener = socket.create_server((address, 0), backlog=4096)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._secret = secret
        self.key_values = KeyValues()
        self._strangers: dict[_Connection, None] = {}
        self._poll = select.epoll()
        self._connections: dict[int, _Connection] = {}
        # `close` is called by another thread: a byte on this pair wakes the one that waits in poll.
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._poll.register(self._listener, _READ)
        self._poll.register(self._wake_reader, _READ)
        self._thread = threading.Thread(target=self._serve, name="job-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections and stop the thread."""
        with suppress(OSError):
            self._wake_writer.send(b"x")
        self._thread.join()

    def _serve(self) -> None:
        wake, listener = self._wake_reader.fileno(), self._listener.fileno()
        while True:
            # Only strangers need a clock: without any, nothing wakes the thread while ranks train.
            for descriptor, events in self._poll.poll(1.0 if self._strangers else None):
                if descriptor == wake:
                    self._close_all()
                    return
                if descriptor == listener:
                    self._accept()
                elif (connection := self._connections.get(descriptor)) is not None:
                    self._handle(connection, events)
            self._drop_strangers()

    def _close_all(self) -> None:
        for connection in list(self._connections.values()):
            connection.peer.close()
        self._listener.close()
        self._wake_reader.close()
        self._wake_writer.close()
        self._poll.close()

    def _accept(self) -> None:
        """Take a new connection, and greet it. It is a stranger until it has proved that it knows the key."""
        try:
            peer, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # out of file descriptors, or the peer is gone already
            _log.warning("the job's store cannot take a connection: %s", error.strerror)
            if self._strangers:
                self._close(next(iter(self._strangers)))
            else:
                time.sleep(0.01)
            return
        peer.setblocking(False)
        connection = _Connection(peer)
        self._connections[peer.fileno()] = connection
        self._strangers[connection] = None
        try:
            configure_socket(peer)
            self._poll.register(peer, _READ)
            self._send(connection, MAGIC + connection.nonce)
        except OSError:  # the peer is gone already
            self._close(connection)

    def _drop_strangers(self) -> None:
        """Close the oldest unauthenticated connections if they are too many or too old."""
        oldest_allowed = time.monotonic() - HANDSHAKE_SECONDS
        while self._strangers:
            oldest = next(iter(self._strangers))
            if len(self._strangers) <= MAX_STRANGERS and oldest.since >= oldest_allowed:
                return
            self._close(oldest)

    def _handle(self, connection: _Connection, events: int) -> None:
        try:
            if events & _WRITE:
                self._flush(connection)
                if not connection.to_send:
                    self._poll.modify(connection.peer, _READ)
            # Errors and hang-ups, too: recv then raises, or returns nothing.
            if events & ~_WRITE:
                self._receive(connection)
        except (OSError, ProtocolError):
            self._close(connection)
        except Exception:
            _log.exception("the job's store drops a connection whose request it cannot answer")
            self._close(connection)

    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.peer.recv(_READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise ProtocolError("the client is gone")
        connection.received += data
        if connection.incoming is None:
            self._admit(connection)
        while connection.incoming is not None and (message := _parse_next_message(connection)) is not None:
            self._answer(connection, message)

    def _admit(self, connection: _Connection) -> None:
        """Check a client's proof once all of it has arrived."""
        if len(connection.received) < ANSWER_BYTES:
            return
        if len(connection.received) > ANSWER_BYTES:
            raise ProtocolError("a client that does not wait for our proof")
        nonce, proof = bytes(connection.received[:NONCE_BYTES]), bytes(connection.received[NONCE_BYTES:])
        # Nothing may follow the proof before our own has been sent: what came early could not have been authenticated.
        connection.received.clear()
        handshake = Handshake(self._secret, self.address, connection.nonce, nonce)
        if not hmac.compare_digest(proof, handshake.make_client_proof()):
            self._send(connection, REFUSAL)
            raise ProtocolError("a client that does not know the secret")
        del self._strangers[connection]
        connection.incoming, connection.outgoing = handshake.to_server(), handshake.to_client()
        self._send(connection, handshake.make_server_proof())

    def _answer(self, connection: _Connection, message: Message) -> None:
        """Carry out a client's request and reply. Raises ProtocolError for one that no client of ours sends."""
        # One request at a time: a client that sends more could fill our memory with requests that wait.
        if connection.waiting is not None:
            raise ProtocolError("a client that asks before it has its answer")
        match message.code, list(message.parts):
            case Operation.GET | Operation.WAIT, keys:
                self._answer_when_present(connection, Operation(message.code), keys)
            case Operation.MISSING, keys:
                self._reply(connection, 0, [key for key in keys if key not in self.key_values])
            case Operation.SET, [*pairs] if len(pairs) % 2 == 0:
                for key, value in zip(pairs[::2], pairs[1::2], strict=True):
                    self.key_values.set(key, value)
                self._reply(connection)
            case Operation.ADD, [key]:
                self._reply(connection, self.key_values.add(key, message.number))
            case Operation.CHECK, keys:
                self._reply(connection, int(all(key in self.key_values for key in keys)))
            case Operation.COMPARE_SET, [key, expected, desired]:
                self._reply(connection, 0, [self.key_values.compare_set(key, expected, desired)])
            case Operation.DELETE, [key]:
                self._reply(connection, int(self.key_values.delete(key)))
            case Operation.COUNT, []:
                self._reply(connection, len(self.key_values))
            case Operation.CLOCK, []:
                self._reply(connection, time.time_ns())
            case Operation.SET_AT_END, [key, value]:
                connection.last_value = key, value
                self._reply(connection)
            case Operation.APPEND, [key, value]:
                self.key_values.append(key, value)
                self._reply(connection)
            case _:
                raise ProtocolError("a request that makes no sense")

    def _answer_when_present(self, connection: _Connection, operation: Operation, keys: Sequence[bytes]) -> None:
        """Answer a `get` or `wait` as soon as all its keys have values."""

        def answer() -> None:
            connection.waiting = None
            try:
                if operation is Operation.GET:
                    self._send_frame(connection, self.key_values.encode(keys))
                else:
                    self._reply(connection)
            except (OSError, ProtocolError):
                self._close(connection)

        connection.waiting = Request(keys, answer)
        self.key_values.answer_when_complete(connection.waiting)

    def _reply(self, connection: _Connection, number: int = 0, parts: Sequence[bytes] = ()) -> None:
        self._send_frame(connection, encode_message(Message(0, number, parts)))

    def _send_frame(self, connection: _Connection, payload: Payload) -> None:
        assert connection.outgoing is not None
        header = connection.outgoing.seal(payload)
        if len(payload.data) <= _LARGEST_COPIED:
            self._send(connection, header + payload.data)
        else:
            self._send(connection, header, payload.data)

    def _send(self, connection: _Connection, *data: bytes) -> None:
        # If older data waits already, poll says when the socket takes more; sending now would change the order.
        idle = not connection.to_send
        connection.to_send.extend(map(memoryview, data))
        if idle:
            self._flush(connection)
            if connection.to_send:
                self._poll.modify(connection.peer, _READ | _WRITE)

    def _flush(self, connection: _Connection) -> None:
        """Send what the socket takes."""
        waiting = connection.to_send
        try:
            while waiting:
                sent = connection.peer.send(waiting[0])
                if sent < len(waiting[0]):
                    waiting[0] = waiting[0][sent:]
                else:
                    waiting.popleft()
        except BlockingIOError:
            return

    def _close(self, connection: _Connection) -> None:
        self._strangers.pop(connection, None)
        if connection.waiting is not None:
            self.key_values.forget(connection.waiting)
        # The number of a closed descriptor may belong to a new connection by now.
        if self._connections.get(connection.peer.fileno()) is connection:
            del self._connections[connection.peer.fileno()]
        with suppress(OSError):
            connection.peer.close()
        if (last := connection.last_value) is not None:
            connection.last_value = None
            self.key_values.set(*last)


def _parse_next_message(connection: _Connection) -> Message | None:
    """Return the next complete message. Raises ProtocolError if it is not from this client."""
    received = connection.received
    if len(received) < HEADER_BYTES:
        return None
    header = bytes(received[:HEADER_BYTES])
    end = HEADER_BYTES + parse_payload_bytes(header)
    if len(received) < end:
        return None
    payload = bytes(received[HEADER_BYTES:end])
    del received[:end]
    assert connection.incoming is not None
    return connection.incoming.open(header, payload)


def _allow_open_files(more: int) -> None:
    """Raise this process's limit on open files, as far as allowed, if it is too low for so many connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = more + 256
    if soft != resource.RLIM_INFINITY and soft < needed:
        with suppress(OSError, ValueError):
            raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
