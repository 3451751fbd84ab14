"""Client of the job's store: a torch.distributed.Store that process groups of gloo and NCCL accept like any other."""

from __future__ import annotations

import atexit
import errno
import hmac
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from hpc_train.runtime.store.protocol import (
    GREETING_BYTES,
    HEADER_BYTES,
    MAGIC,
    PROOF_BYTES,
    REFUSAL,
    Handshake,
    Message,
    Operation,
    ProtocolError,
    configure_socket,
    encode_message,
    make_nonce,
    parse_payload_bytes,
)

if TYPE_CHECKING:
    from hpc_train.runtime.store.server import StoreServer

_RETRY_SECONDS = 0.05
_DIAGNOSIS_SECONDS = 2.0
"""How long an error message waits to learn which keys were missing."""
_KEYS_NAMED = 4
"""Keys that such a message names."""
_MOST_READ_AT_ONCE = 1 << 20


class JobStore(dist.Store):
    """Store of the job's keys and values, safe for any number of threads: each call has its own connection.

    Errors are those of torch's stores: DistStoreError if a wait took longer than its timeout, DistNetworkError if the
    server cannot be reached, is gone, or does not know the secret.
    """

    def __init__(
        self, address: tuple[str, int], secret: bytes, timeout: timedelta, server: StoreServer | None = None
    ) -> None:
        """Connect to the server at `address`. server: this process's own, which is closed with the store."""
        super().__init__()
        self.set_timeout(timeout)
        self.address = address
        self._secret = secret
        self._server = server
        self._pool = _Pool(address, secret)
        # Process groups keep only the C++ half of a store alive, but call the Python half, which must live as long.
        atexit.register(self._close_at_exit)
        self._pool.release(self._pool.acquire(timeout.total_seconds()))

    def close(self) -> None:
        """Close the connections, and this process's server if it has one. Calls that wait end with DistNetworkError.

        The store and its clones cannot be used afterwards.
        """
        atexit.unregister(self._close_at_exit)
        if self._pool.is_forked():
            return
        self._pool.close()
        if self._server is not None:
            self._server.close()

    def _close_at_exit(self) -> None:
        # Threads of process groups call the store. One that calls Python, or is in it, while the interpreter ends
        # would abort the process: so they end first, those that wait here by an error.
        if self._pool.is_forked():
            return
        self._pool.close()
        if dist.is_initialized():
            from hpc_train._torch.process_groups import abort_process_groups

            with suppress(Exception):  # the process ends either way
                abort_process_groups()
        self.close()

    def clone(self) -> dist.Store:
        """Return another store of the same keys, with a timeout of its own."""
        return _Clone(self)

    def set(self, key: str, value: str | bytes) -> None:
        self._call(Operation.SET, [key, value])

    def get(self, key: str) -> bytes:
        """Return the value of a key, waiting until it has one."""
        return self._call(Operation.GET, [key]).parts[0]

    def add(self, key: str, amount: int) -> int:
        return self._call(Operation.ADD, [key], amount).number

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._call(Operation.CHECK, keys).number)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Block until all keys have values. Raises DistStoreError after `timeout` (default: the store's)."""
        self._call(Operation.WAIT, keys, timeout=timeout)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._call(Operation.COMPARE_SET, [key, expected, desired]).parts[0]

    def delete_key(self, key: str) -> bool:
        return bool(self._call(Operation.DELETE, [key]).number)

    def num_keys(self) -> int:
        return self._call(Operation.COUNT, []).number

    deleteKey, getNumKeys = delete_key, num_keys  # as torch's C++ calls them, a PrefixStore for one

    def append(self, key: str, value: str | bytes) -> None:
        self._call(Operation.APPEND, [key, value])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys, waiting until all have one."""
        return list(self._call(Operation.GET, keys).parts)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._call(Operation.SET, [part for pair in zip(keys, values, strict=True) for part in pair])

    def set_at_end(self, key: str, value: str) -> None:
        """Have the server set a key when this process ends, however it ends.

        The server notices by the end of a connection: at once, or within two minutes where the whole node is gone.
        """
        seconds = float(self.timeout.total_seconds())  # type: ignore[attr-defined] # torch's stub lacks it
        try:
            self._pool.keep_open(Message(Operation.SET_AT_END, 0, [key.encode(), value.encode()]), seconds)
        except (OSError, ProtocolError) as error:
            raise dist.DistNetworkError(
                f"the job's store at {_format_address(self.address)}: {_explain(error)}"
            ) from None

    def read_clock(self) -> float:
        """Return time.time() of the process that serves the store."""
        return self._call(Operation.CLOCK, []).number / 1e9

    def has_extended_api(self) -> bool:
        """Return True: append, multi_get and multi_set are supported."""
        return True

    def _call(
        self, operation: Operation, parts: Sequence[str | bytes], number: int = 0, timeout: timedelta | None = None
    ) -> Message:
        timeout = self.timeout if timeout is None else timeout  # type: ignore[attr-defined] # torch's stub lacks it
        seconds = float(timeout.total_seconds())
        encoded = [part.encode() if isinstance(part, str) else part for part in parts]
        try:
            return self._pool.exchange(Message(operation, number, encoded), seconds)
        except (OSError, ProtocolError) as error:
            if not isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:  # the latter: its node is gone
                raise dist.DistNetworkError(
                    f"the job's store at {_format_address(self.address)}: {_explain(error)}"
                ) from None
        keys = self._find_missing(encoded) if operation in (Operation.GET, Operation.WAIT) else encoded[:1]
        raise dist.DistStoreError(f"wait timeout after {seconds * 1000:.0f}ms, keys: {_list_keys(keys)}")

    def _find_missing(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Return which keys have no value, for an error message; all of them if the server does not answer."""
        try:
            return self._pool.exchange(Message(Operation.MISSING, 0, keys), _DIAGNOSIS_SECONDS).parts or keys
        except (OSError, ProtocolError, dist.DistError):
            return keys


class _Clone(JobStore):
    """A store that shares the connections of another one."""

    def __init__(self, original: JobStore) -> None:
        dist.Store.__init__(self)
        self.set_timeout(original.timeout)  # type: ignore[attr-defined] # torch's stub lacks it
        self.address, self._secret, self._server = original.address, original._secret, None
        self._pool = original._pool
        self._pool.clones.append(self)  # the Python half lives as long as that of the original


class _Pool:
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
        if self.is_forked():  # these connections belong to the parent
            self._idle, self._busy, self._held_open, self._process = [], set(), [], os.getpid()
        if self._closed:
            raise dist.DistNetworkError(
                f"the job's store at {_format_address(self.address)}: this process has closed it"
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
        self._busy.discard(connection)
        self._idle.append(connection)
        if self._closed:
            self.close()

    def close(self) -> None:
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
                raise dist.DistNetworkError(f"{_format_address(address)}: {_explain(error)}") from None
            except ConnectionError as error:  # too many connected at once, so the server dropped some
                if time.monotonic() + _RETRY_SECONDS > deadline:
                    raise dist.DistNetworkError(f"{_format_address(address)}: {_explain(error)}") from None
                time.sleep(_RETRY_SECONDS)
            except (OSError, ProtocolError) as error:
                raise dist.DistNetworkError(f"{_format_address(address)}: {_explain(error)}") from None

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
            data = self._socket.recv(min(count - len(received), _MOST_READ_AT_ONCE))
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


def _list_keys(keys: Sequence[bytes]) -> str:
    named = ", ".join(key.decode(errors="replace") for key in keys[:_KEYS_NAMED])
    return named + (f" and {len(keys) - _KEYS_NAMED} more" if len(keys) > _KEYS_NAMED else "")


def _format_address(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"


def _explain(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
