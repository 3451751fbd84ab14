"""Server of the job's store: a dictionary behind authenticated connections, in a thread of process 0."""

from __future__ import annotations

import hmac
import logging
import resource
import selectors
import socket
import threading
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field

from hpc_train.runtime.store.wire import (
    ANSWER_BYTES,
    HEADER_BYTES,
    MAGIC,
    NONCE_BYTES,
    REFUSAL,
    Direction,
    Handshake,
    Message,
    Operation,
    ProtocolError,
    make_nonce,
    payload_bytes,
)

HANDSHAKE_SECONDS = 10.0
"""How long a connection may stay open without proving that it knows the secret."""
STRANGERS = 512
"""Maximum number of unauthenticated connections; the oldest is dropped for a new one."""
_READ_BYTES = 1 << 18
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Request:
    """A `get` or `wait` that completes when all its keys exist."""

    connection: _Connection
    operation: Operation
    keys: list[bytes]
    missing: set[bytes]


@dataclass(eq=False)
class _Connection:
    """A connection from a client, authenticated or not."""

    peer: socket.socket
    nonce: bytes = field(default_factory=make_nonce)
    since: float = field(default_factory=time.monotonic)
    received: bytearray = field(default_factory=bytearray)
    to_send: bytearray = field(default_factory=bytearray)
    incoming: Direction | None = None
    """None until the peer has proved that it knows the secret."""
    outgoing: Direction | None = None
    waiting: _Request | None = None


class StoreServer:
    """Serve keys and values to the holders of `secret`, until `close`."""

    def __init__(self, address: str, secret: bytes, clients: int) -> None:
        """Listen on a free port of `address` (IPv4). clients: approximate number expected."""
        _allow_open_files(clients + STRANGERS)
        self._listener = socket.create_server((address, 0), backlog=4096)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._secret = secret
        self._values: dict[bytes, bytes] = {}
        self._requests: defaultdict[bytes, list[_Request]] = defaultdict(list)
        self._strangers: dict[_Connection, None] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._ear, self._mouth = socket.socketpair()
        self._selector.register(self._ear, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="job-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections and stop the thread."""
        with suppress(OSError):
            self._mouth.send(b"x")
        self._thread.join()

    def _serve(self) -> None:
        while True:
            for key, events in self._selector.select(1.0 if self._strangers else None):
                if key.fileobj is self._ear:
                    self._end()
                    return
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._handle(key.data, events)
            self._drop_strangers()

    def _end(self) -> None:
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._mouth.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # out of file descriptors, or the peer is gone already
            _log.warning("the job's store cannot take a connection: %s", error.strerror)
            time.sleep(0.01)
            return
        peer.setblocking(False)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection = _Connection(peer)
        self._strangers[connection] = None
        self._selector.register(peer, selectors.EVENT_READ, connection)
        self._send(connection, MAGIC + connection.nonce)

    def _drop_strangers(self) -> None:
        """Close the oldest unauthenticated connections if they are too many or too old."""
        oldest_allowed = time.monotonic() - HANDSHAKE_SECONDS
        while self._strangers:
            oldest = next(iter(self._strangers))
            if len(self._strangers) <= STRANGERS and oldest.since >= oldest_allowed:
                return
            self._close(oldest)

    def _handle(self, connection: _Connection, events: int) -> None:
        if connection.peer.fileno() < 0:
            return  # closed by an earlier event of this round
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(connection)
            if events & selectors.EVENT_READ:
                self._receive(connection)
        except (OSError, ProtocolError):
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
        while connection.incoming is not None and (message := _next_message(connection)) is not None:
            self._answer(connection, message)

    def _admit(self, connection: _Connection) -> None:
        """Check a client's proof once all of it has arrived."""
        if len(connection.received) < ANSWER_BYTES:
            return
        if len(connection.received) > ANSWER_BYTES:
            raise ProtocolError("a client that does not wait for our proof")
        nonce, proof = bytes(connection.received[:NONCE_BYTES]), bytes(connection.received[NONCE_BYTES:])
        connection.received.clear()
        handshake = Handshake(self._secret, self.address, connection.nonce, nonce)
        if not hmac.compare_digest(proof, handshake.client_proof()):
            self._send(connection, REFUSAL)
            raise ProtocolError("a client that does not know the secret")
        del self._strangers[connection]
        connection.incoming, connection.outgoing = handshake.to_server(), handshake.to_client()
        self._send(connection, handshake.server_proof())

    def _answer(self, connection: _Connection, message: Message) -> None:
        if connection.waiting is not None:
            raise ProtocolError("a client that asks before it has its answer")
        parts = [bytes(part) for part in message.parts]
        match message.code, parts:
            case Operation.GET | Operation.WAIT, keys:
                missing = {key for key in keys if key not in self._values}
                self._resolve(_Request(connection, Operation(message.code), keys, missing))
            case Operation.SET, [*pairs] if len(pairs) % 2 == 0:
                for key, value in zip(pairs[::2], pairs[1::2], strict=True):
                    self._store(key, value)
                self._reply(connection)
            case Operation.ADD, [key]:
                self._reply(connection, self._add(key, message.number))
            case Operation.CHECK, keys:
                self._reply(connection, int(all(key in self._values for key in keys)))
            case Operation.COMPARE_SET, [key, expected, desired]:
                self._reply(connection, 0, [self._compare_set(key, expected, desired)])
            case Operation.DELETE, [key]:
                self._reply(connection, int(self._values.pop(key, None) is not None))
            case Operation.COUNT, []:
                self._reply(connection, len(self._values))
            case Operation.APPEND, [key, value]:
                self._store(key, self._values.get(key, b"") + value)
                self._reply(connection)
            case _:
                raise ProtocolError("a request that makes no sense")

    def _add(self, key: bytes, number: int) -> int:
        before = self._values.get(key, b"0")
        if not before.removeprefix(b"-").isdigit() or len(before) > 20:
            raise ProtocolError("`add` to what is no number")
        total = int(before) + number
        self._store(key, b"%d" % total)
        return total

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """Compare and set, as torch's stores do.

        Returns what the key holds afterwards; `expected` if it holds nothing and something was expected.
        """
        current = self._values.get(key)
        if current == expected or (current is None and not expected):
            self._store(key, desired)
            return desired
        return expected if current is None else current

    def _store(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        for request in self._requests.pop(key, ()):
            request.missing.discard(key)
            if not request.missing:
                self._resolve(request)

    def _resolve(self, request: _Request) -> None:
        """Answer a request if all its keys exist; otherwise keep it until they do."""
        connection = request.connection
        request.missing = {key for key in request.keys if key not in self._values}  # some keys may have been deleted
        if request.missing:
            connection.waiting = request
            for key in request.missing:
                if request not in self._requests[key]:
                    self._requests[key].append(request)
            return
        connection.waiting = None
        values = [self._values[key] for key in request.keys] if request.operation is Operation.GET else []
        try:
            self._reply(connection, 0, values)
        except OSError:
            self._close(connection)

    def _reply(self, connection: _Connection, number: int = 0, parts: list[bytes] | None = None) -> None:
        assert connection.outgoing is not None
        self._send(connection, connection.outgoing.seal(Message(0, number, parts or [])))

    def _send(self, connection: _Connection, data: bytes) -> None:
        if not connection.to_send:
            with suppress(BlockingIOError):
                data = data[connection.peer.send(data) :]
        if data:
            connection.to_send += data
            self._selector.modify(connection.peer, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)

    def _flush(self, connection: _Connection) -> None:
        with suppress(BlockingIOError):
            del connection.to_send[: connection.peer.send(connection.to_send)]
        if not connection.to_send:
            self._selector.modify(connection.peer, selectors.EVENT_READ, connection)

    def _close(self, connection: _Connection) -> None:
        self._strangers.pop(connection, None)
        if connection.waiting is not None:
            for key in connection.waiting.missing:
                if (requests := self._requests.get(key)) and connection.waiting in requests:
                    requests.remove(connection.waiting)
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection.peer)
        connection.peer.close()


def _next_message(connection: _Connection) -> Message | None:
    """Return the next complete message. Raises ProtocolError if it is not from this client."""
    received = connection.received
    if len(received) < HEADER_BYTES:
        return None
    header = bytes(received[:HEADER_BYTES])
    end = HEADER_BYTES + payload_bytes(header)
    if len(received) < end:
        return None
    payload = bytes(received[HEADER_BYTES:end])
    del received[:end]
    assert connection.incoming is not None
    return connection.incoming.open(header, payload)


def _allow_open_files(more: int) -> None:
    """Raise this process's limit on open files, as far as allowed, if it is too low for so many connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = more + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
