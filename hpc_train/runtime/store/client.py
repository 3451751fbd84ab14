"""Client of the job's store: a torch.distributed.Store that process groups of gloo and NCCL accept like any other."""

from __future__ import annotations

import atexit
import hmac
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from hpc_train.runtime.store.wire import (
    GREETING_BYTES,
    HEADER_BYTES,
    MAGIC,
    PROOF_BYTES,
    REFUSAL,
    Handshake,
    Message,
    Operation,
    ProtocolError,
    make_nonce,
    payload_bytes,
)

if TYPE_CHECKING:
    from hpc_train.runtime.store.server import StoreServer

_RETRY_SECONDS = 0.05
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
        self._idle: list[_Connection] = []
        self._process = os.getpid()
        # Process groups keep only the C++ half of a store alive, but call the Python half, which must live as long.
        atexit.register(self.close)
        self._release(_Connection(address, secret, timeout.total_seconds()))

    def close(self) -> None:
        """Close the connections, and this process's server if it has one; the store cannot be used afterwards."""
        atexit.unregister(self.close)
        if self._process != os.getpid():
            return
        while self._idle:
            self._idle.pop().close()
        if self._server is not None:
            self._server.close()

    def clone(self) -> dist.Store:
        """Return this store: it serves several threads at once."""
        return self

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

    def append(self, key: str, value: str | bytes) -> None:
        self._call(Operation.APPEND, [key, value])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys, waiting until all have one."""
        return list(self._call(Operation.GET, keys).parts)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._call(Operation.SET, [part for pair in zip(keys, values, strict=True) for part in pair])

    def has_extended_api(self) -> bool:
        """Return True: append, multi_get and multi_set are supported."""
        return True

    def _call(
        self, operation: Operation, parts: Sequence[str | bytes], number: int = 0, timeout: timedelta | None = None
    ) -> Message:
        seconds = float((timeout or self.timeout).total_seconds())  # type: ignore[attr-defined] # torch's stub lacks it
        deadline = time.monotonic() + seconds
        connection = self._acquire(seconds)
        try:
            request = Message(operation, number, [part.encode() if isinstance(part, str) else part for part in parts])
            answer = connection.exchange(request, deadline)
        except TimeoutError:
            connection.close()  # a late answer must not be taken for that of another request
            keys = ", ".join(part for part in parts[:4] if isinstance(part, str))
            raise dist.DistStoreError(f"wait timeout after {seconds * 1000:.0f}ms, keys: {keys}") from None
        except (OSError, ProtocolError) as error:
            connection.close()
            raise dist.DistNetworkError(f"the job's store at {_name(self.address)}: {_why(error)}") from None
        except BaseException:
            connection.close()
            raise
        self._release(connection)
        return answer

    def _acquire(self, seconds: float) -> _Connection:
        if self._process != os.getpid():  # forked: these connections belong to the parent
            self._idle, self._process, self._server = [], os.getpid(), None
        try:
            return self._idle.pop()
        except IndexError:
            return _Connection(self.address, self._secret, seconds)

    def _release(self, connection: _Connection) -> None:
        self._idle.append(connection)


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
                raise dist.DistNetworkError(f"{_name(address)}: {_why(error)}") from None
            except ConnectionError as error:  # too many connected at once, so the server dropped some
                if time.monotonic() + _RETRY_SECONDS > deadline:
                    raise dist.DistNetworkError(f"{_name(address)}: {_why(error)}") from None
                time.sleep(_RETRY_SECONDS)
            except (OSError, ProtocolError) as error:
                raise dist.DistNetworkError(f"{_name(address)}: {_why(error)}") from None

    def _open(self, address: tuple[str, int], secret: bytes, deadline: float) -> None:
        self._socket = socket.create_connection(address, timeout=_left(deadline))
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            greeting = self._read(GREETING_BYTES, deadline)
            if not greeting.startswith(MAGIC):
                raise ProtocolError("is not the store of an hpc_train job")
            handshake = Handshake(secret, address, greeting[len(MAGIC) :], make_nonce())
            self._socket.sendall(handshake.client_nonce + handshake.client_proof())
            proof = self._read(PROOF_BYTES, deadline)
            if hmac.compare_digest(proof, REFUSAL):
                raise ProtocolError("is the store of another job: it knows another secret")
            if not hmac.compare_digest(proof, handshake.server_proof()):
                raise ProtocolError("is not the job's store: it does not know the job's secret")
            self._outgoing, self._incoming = handshake.to_server(), handshake.to_client()
        except BaseException:
            self.close()
            raise

    def exchange(self, request: Message, deadline: float) -> Message:
        """Send a request and wait for its answer. Raises TimeoutError, OSError and ProtocolError."""
        self._socket.settimeout(_left(deadline))
        self._socket.sendall(self._outgoing.seal(request))
        header = self._read(HEADER_BYTES, deadline)
        return self._incoming.open(header, self._read(payload_bytes(header), deadline))

    def _read(self, count: int, deadline: float) -> bytes:
        received = bytearray()
        while len(received) < count:
            self._socket.settimeout(_left(deadline))
            data = self._socket.recv(min(count - len(received), _MOST_READ_AT_ONCE))
            if not data:
                raise ConnectionResetError("process 0, which serves it, has ended")
            received += data
        return bytes(received)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.close()


def _left(deadline: float) -> float:
    """Return the seconds until the deadline. Raises TimeoutError if none are left."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def _name(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
