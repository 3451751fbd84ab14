"""The job's store answers like torch's, but only to those who know its secret."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from other_user import SOMEBODY, as_somebody, need_root
from torch.distributed.device_mesh import init_device_mesh

from hpc_train.errors import UserError
from hpc_train.runtime.identity import ProcessIdentity
from hpc_train.runtime.rendezvous import RENDEZVOUS_VARIABLE, open_job_store
from hpc_train.runtime.store.client import JobStore
from hpc_train.runtime.store.protocol import (
    ANSWER_BYTES,
    GREETING_BYTES,
    HEADER_BYTES,
    MAGIC,
    PROOF_BYTES,
    REFUSAL,
    Handshake,
    Message,
    Operation,
    encode_message,
    parse_payload_bytes,
)
from hpc_train.runtime.store.server import MAX_STRANGERS, StoreServer

LONG, SHORT = timedelta(seconds=60), timedelta(seconds=0.2)
SECRET = bytes(range(32))


@pytest.fixture
def group() -> Iterator[ProcessPoolExecutor]:
    """Processes of a group. Asked for before `server`, they are forked before it has its thread."""
    with ProcessPoolExecutor(GROUP_SIZE, multiprocessing.get_context("fork")) as pool:
        pool.submit(os.getpid).result()  # the first task forks all
        yield pool


@pytest.fixture
def server() -> Iterator[StoreServer]:
    served = StoreServer("127.0.0.1", SECRET, 8)
    yield served
    served.close()


@pytest.fixture
def store(server: StoreServer) -> Iterator[JobStore]:
    client = JobStore(server.address, SECRET, LONG)
    yield client
    client.close()


def identity(process: int, processes: int) -> ProcessIdentity:
    return ProcessIdentity(process, processes, process, 0, 1, "submitit", socket.gethostname(), "job-1")


ATTEMPT = """
found = {}
def attempt(name, act):
    try:
        found[name] = repr(act())
    except BaseException as error:
        found[name] = f"refused: {type(error).__name__}"
"""
STRANGER = f"""{ATTEMPT}
timeout = timedelta(seconds=0.3)
def ours():
    return JobStore(tuple(arguments), bytes(32), timeout)
def torchs():
    return dist.TCPStore(*arguments, is_master=False, timeout=timeout, wait_for_workers=False)
attempt("our get", lambda: ours().get("secret of the job"))
attempt("our set", lambda: ours().set("secret of the job", "changed"))
attempt("our add", lambda: ours().add("counter", 1000))
attempt("torch's keys", lambda: torchs().list_keys())
attempt("torch's set", lambda: torchs().set("secret of the job", "changed"))
print(json.dumps(found))
"""
THIEF = f"""{ATTEMPT}
(path,) = arguments
attempt("list", lambda: os.listdir(os.path.dirname(path)))
attempt("read", lambda: open(path).read())
attempt("write", lambda: open(path, "w"))
attempt("replace", lambda: (open(path + "x", "w"), os.rename(path + "x", path)))
attempt("remove", lambda: os.unlink(path))
print(json.dumps(found))
"""
IMPORTS = """
import encodings.idna
from datetime import timedelta
import torch.distributed as dist
from hpc_train.runtime.store.client import JobStore
"""


def rank_of_a_job(process: int, folder: Path, heard: Any, over: Any) -> tuple[bytes, int]:
    """Meet the other rank, report where the store is, and what it holds after a stranger has connected."""
    store = open_job_store(identity(process, 2), {RENDEZVOUS_VARIABLE: str(folder)}, None, LONG)
    if process == 0:
        store.set("secret of the job", "as it was")
        store.add("counter", 1)
        assert isinstance(store, JobStore)
        heard.put(store.address)
    over.wait(100)
    found = store.get("secret of the job"), store.add("counter", 0)
    if store.add("left", 1) == 2:
        store.set("all left", "")
    store.wait(["all left"])
    time.sleep(0.1)
    return found


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """Make a folder that everybody may write to, as /tmp."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o1777)
        yield Path(name)


def test_another_user_can_neither_read_nor_write_the_store_of_a_job(tmp_path: Path) -> None:
    need_root()
    with multiprocessing.Manager() as manager, ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        heard, over = manager.Queue(), manager.Event()
        job = [pool.submit(rank_of_a_job, process, tmp_path, heard, over) for process in range(2)]
        try:
            found = as_somebody(STRANGER, *heard.get(timeout=60), imports=IMPORTS)
        finally:
            over.set()
        assert [rank.result() for rank in job] == [(b"as it was", 1)] * 2
    assert len(found) == 5
    assert all(said.startswith("refused: Dist") for said in found.values()), found


def test_another_user_can_neither_read_nor_replace_the_secret(public_folder: Path) -> None:
    need_root()
    path = public_folder / ".rendezvous-job-1.json"
    before = os.umask(0)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(open_job_store, identity(0, 2), {RENDEZVOUS_VARIABLE: str(public_folder)}, None, LONG)
        while not path.exists():
            time.sleep(0.01)
        os.umask(before)
        assert path.stat().st_mode & 0o777 == 0o600
        found = as_somebody(THIEF, str(path))
        second = open_job_store(identity(1, 2), {RENDEZVOUS_VARIABLE: str(public_folder)}, None, LONG)
        for store in (second, first.result()):
            assert isinstance(store, JobStore)
            store.close()
    assert found.pop("list") == f"['{path.name}']"
    assert found == dict.fromkeys(["read", "write", "replace", "remove"], "refused: PermissionError")


def planted(folder: Path, kind: str) -> Path:
    """Plant a file where the other processes look for process 0's."""
    path = folder / ".rendezvous-job-1.json"
    text = f'["127.0.0.1", 9, "{SECRET.hex()}"]'
    if kind == "pipe":
        os.mkfifo(path, 0o600)
        return path
    path.write_text(text)
    path.chmod(0o640 if kind == "readable by the group" else 0o600)
    if kind == "another user's":
        need_root()
        os.chown(path, SOMEBODY, SOMEBODY)
    if kind == "link":
        path.rename(folder / "elsewhere")
        path.symlink_to(folder / "elsewhere")
    if kind == "long":
        path.write_text(text + " " * 10_000 + "x")
    if kind == "without a secret":
        path.write_text('["127.0.0.1", 9, ""]')
    return path


@pytest.mark.parametrize(
    "kind", ["another user's", "readable by the group", "pipe", "link", "long", "without a secret"]
)
def test_what_process_0_did_not_write_is_refused(tmp_path: Path, kind: str) -> None:
    path = planted(tmp_path, kind)
    with pytest.raises(UserError, match="is not what process 0 of this job writes") as refused:
        open_job_store(identity(1, 2), {RENDEZVOUS_VARIABLE: str(tmp_path)}, None, LONG)
    assert str(path) in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def random_calls(seed: int) -> list[tuple[str, tuple[Any, ...]]]:
    draw = random.Random(seed)
    calls: list[tuple[str, tuple[Any, ...]]] = []
    for _ in range(300):
        key, number = f"key {draw.randrange(6)}", draw.randrange(-5, 1 << 40)
        text, other = draw.choice(["", "a", "\0é", "b" * 3000]), draw.choice(["", "a", "b" * 3000])
        calls.append(
            draw.choice(
                [
                    ("set", (key, text)),
                    ("check", ([key, f"key {draw.randrange(6)}"],)),
                    ("compare_set", (key, other, text)),
                    ("delete_key", (key,)),
                    ("add", (f"count {draw.randrange(3)}", number)),
                    ("multi_set", ([key, "key 0"], [text, other])),
                    ("append", (key, other)),
                    ("num_keys", ()),
                    ("wait", ([key], timedelta(0))),
                    ("wait", ([], SHORT)),
                    ("multi_get", ([],)),
                    ("check", ([],)),
                    ("add", ("large", draw.choice([1 << 62, -(1 << 62), (1 << 63) - 1]))),
                ]
            )
        )
    return calls


def answer(store: Any, name: str, arguments: tuple[Any, ...]) -> Any:
    try:
        return getattr(store, name)(*arguments)
    except dist.DistError as error:
        return type(error)


@pytest.mark.parametrize("seed", range(5))
def test_answers_are_those_of_torchs_own_store(store: JobStore, seed: int) -> None:
    oracle = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LONG)
    pairs = [
        (store, oracle),
        (store.clone(), oracle.clone()),
        tuple(dist.PrefixStore("p", it) for it in (store, oracle)),
    ]
    for index, (name, arguments) in enumerate(random_calls(seed)):
        ours, torchs = pairs[index % 3]
        if name == "wait" and arguments[0] and torchs.check(arguments[0]):
            continue  # whether a wait of no time finds a key is a race in torch's
        assert answer(ours, name, arguments) == answer(torchs, name, arguments), (name, arguments)
        torchs.check(["key 0"])  # torch's `set` does not wait: another client could be served before it
    keys = [f"key {index}" for index in range(6) if oracle.check([f"key {index}"])]
    assert store.multi_get(keys) == oracle.multi_get(keys)
    assert [store.get(key) for key in keys] == [oracle.get(key) for key in keys]
    for each in (store, oracle):  # last, as they leave other keys behind
        assert answer(each, "barrier", ("alone", 1, SHORT)) is None
        assert answer(each, "barrier", ("not alone", 2, SHORT)) is dist.DistStoreError
    through = dist.PrefixStore("inner", store)
    through.set("k", b"\xff\x00")
    assert (through.get("k"), store.get("inner/k")) == (b"\xff\x00", b"\xff\x00")


def test_a_wait_ends_with_its_timeout_or_with_the_last_key(store: JobStore, server: StoreServer) -> None:
    with pytest.raises(dist.DistStoreError, match="wait timeout after 200ms, keys: a, b"):
        store.wait(["a", "b"], SHORT)
    with pytest.raises(dist.DistStoreError, match="wait timeout"):
        dist.PrefixStore("inner", store).wait(["a"], SHORT)
    other = JobStore(server.address, SECRET, LONG)
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(store.wait, ["a", "b"]), threads.submit(dist.PrefixStore("p", store).get, "c")]
        both = threads.submit(store.multi_get, ["b", "a"])
        for key in ("a", "b", "p/c"):
            assert not all(call.done() for call in waiting)
            other.set(key, key.upper())
        assert [call.result() for call in waiting] == [None, b"P/C"]
        assert both.result() == [b"B", b"A"]
    store.set_timeout(SHORT)
    with pytest.raises(dist.DistStoreError, match="wait timeout after 200ms, keys: never"):
        store.get("never")


def set_at_end_and_die(address: Connection) -> None:
    JobStore(address.recv(), SECRET, LONG).set_at_end("other", "gone")
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_key_is_set_when_the_process_that_asked_for_that_is_killed() -> None:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=set_at_end_and_die, args=(receiver,))
    process.start()  # before there is a server with its thread
    server = StoreServer("127.0.0.1", SECRET, 8)
    store = JobStore(server.address, SECRET, LONG)
    store.set_at_end("own", "gone")
    sender.send(server.address)
    assert store.get("other") == b"gone"
    process.join()
    assert not store.check(["own"])
    store.close()
    server.close()


def test_the_end_of_the_server_ends_what_waits(store: JobStore, server: StoreServer) -> None:
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(store.wait, ["never"])
        while not server.key_values.waiting:
            time.sleep(0.01)
        server.close()
        with pytest.raises(dist.DistNetworkError, match="process 0, which serves it, has ended"):
            waiting.result()
    with pytest.raises(dist.DistNetworkError):
        store.set("a", "b")


def group_over(process: int, folder: Path) -> list[float]:
    store = open_job_store(identity(process, 4), {RENDEZVOUS_VARIABLE: str(folder)}, None, LONG)
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=process, world_size=4, timeout=LONG)
    del store  # the process group still holds it
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    total = torch.full((1,), float(process))
    dist.all_reduce(total)
    row = torch.full((1,), float(process))
    dist.all_reduce(row, group=mesh.get_group("columns"))
    half = dist.new_group([1, 3])
    if process in (1, 3):
        dist.all_reduce(row, group=half)
    dist.monitored_barrier()
    dist.destroy_process_group()
    return [total.item(), row.item()]


def test_process_groups_and_meshes_start_over_it(tmp_path: Path) -> None:
    with ProcessPoolExecutor(4, multiprocessing.get_context("fork")) as pool:
        found = list(pool.map(group_over, range(4), [tmp_path] * 4))
    assert found == [[6.0, 1.0], [6.0, 6.0], [6.0, 5.0], [6.0, 6.0]]


GROUP_SIZE = 6


class Counted(JobStore):
    """Count this process's requests."""

    requests = 0

    def _call(self, *arguments: Any, **settings: Any) -> Any:
        self.requests += 1
        return super()._call(*arguments, **settings)


def requests_for_groups(rank: int, address: tuple[str, int], lazy: str = "0") -> list[int]:
    os.environ.update(GLOO_ENABLE_STORE_V2_API="1", GLOO_SOCKET_IFNAME="lo", TORCH_GLOO_LAZY_INIT=lazy)
    store, counts = Counted(address, SECRET, LONG), []
    dist.init_process_group("gloo", store=dist.PrefixStore("g", store), rank=rank, world_size=GROUP_SIZE, timeout=LONG)
    counts.append(store.requests)
    for _ in range(3):
        dist.new_group()
    counts.append(store.requests)
    dist.barrier()
    dist.destroy_process_group()
    return counts


def test_a_rank_makes_as_many_requests_for_a_group_of_any_size(group: ProcessPoolExecutor, server: StoreServer) -> None:
    found = list(group.map(requests_for_groups, range(GROUP_SIZE), [server.address] * GROUP_SIZE))
    assert found == [[2, 8]] * GROUP_SIZE


def test_a_rank_that_connects_on_demand_makes_one_request_for_a_group(
    group: ProcessPoolExecutor, server: StoreServer
) -> None:
    found = list(group.map(requests_for_groups, range(GROUP_SIZE), [server.address] * GROUP_SIZE, ["1"] * GROUP_SIZE))
    assert found == [[1, 4]] * GROUP_SIZE


def gloo_asks_once(process: int, folder: Path) -> str:
    os.environ.pop("GLOO_ENABLE_STORE_V2_API", None)
    open_job_store(identity(process, 2), {RENDEZVOUS_VARIABLE: str(folder)}, None, LONG)
    return os.environ["GLOO_ENABLE_STORE_V2_API"]


def test_the_ranks_of_a_job_let_gloo_ask_once(tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        assert list(pool.map(gloo_asks_once, range(2), [tmp_path] * 2)) == ["1", "1"]


def test_many_who_wait_for_the_same_large_values_share_one_copy(server: StoreServer, store: JobStore) -> None:
    """Ranks of a large group read megabytes each; a copy for each of a thousand would be the server's memory."""
    keys, values = ["a", "b"], [os.urandom(1 << 20), os.urandom(3 << 20)]
    readers = []
    for _ in range(40):
        reader = socket.socket()
        reader.settimeout(10)
        # With the usual buffer, which grows, the kernel may take a whole answer, and none is left to count.
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        reader.connect(server.address)
        nonce = reader.recv(GREETING_BYTES, socket.MSG_WAITALL)[len(MAGIC) :]
        handshake = Handshake(SECRET, server.address, nonce, bytes(32))
        reader.sendall(handshake.client_nonce + handshake.make_client_proof())
        assert reader.recv(PROOF_BYTES, socket.MSG_WAITALL) == handshake.make_server_proof()
        payload = encode_message(Message(Operation.GET, 0, [key.encode() for key in keys]))
        reader.sendall(handshake.to_server().seal(payload) + payload.data)
        readers.append((reader, handshake.to_client()))
    while len(server.key_values.waiting.get(b"a", ())) < 40:
        time.sleep(0.01)
    store.multi_set(keys, values)
    queued: list[Any] = [connection.to_send for connection in list(server._connections.values())]
    assert sum(map(len, queued)) >= 40
    assert len({id(piece.obj) for pieces in queued for piece in pieces if len(piece.obj) > 1 << 20}) == 1
    for reader, incoming in readers:
        reader.settimeout(None)  # with a timeout, recv returns less than asked for
        header = reader.recv(HEADER_BYTES, socket.MSG_WAITALL)
        data = reader.recv(parse_payload_bytes(header), socket.MSG_WAITALL)
        assert incoming.open(header, data).parts == values
        reader.close()
    assert store.check(["a", "b"])


class Meddler:
    """Proxy between a client and the server that alters traffic after both have proved themselves."""

    def __init__(self, server: tuple[str, int], change: Any) -> None:
        self.change, self._server = change, server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        client, _ = self._listener.accept()
        with client, socket.create_connection(self._server) as server:
            self._pass(server, client, GREETING_BYTES)
            self._pass(client, server, ANSWER_BYTES)
            self._pass(server, client, PROOF_BYTES)
            threading.Thread(target=self._stream, args=(server, client), daemon=True).start()
            with suppress(OSError):
                while data := client.recv(1 << 16):
                    server.sendall(self.change(data))

    def _pass(self, source: socket.socket, target: socket.socket, count: int) -> None:
        target.sendall(source.recv(count, socket.MSG_WAITALL))

    def _stream(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("change", [flipped, lambda data: data + data, lambda data: data[:4] + bytes(16) + data[20:]])
def test_what_is_changed_or_repeated_on_its_way_has_no_effect(
    server: StoreServer, store: JobStore, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add("counter", 5)
    meddler = Meddler(server.address, change)
    # The client's proof names the address it means, so a relayed proof proves nothing: here the client believes
    # that the meddler's address is the server's.
    monkeypatch.setattr(server, "address", meddler.address)
    client = JobStore(meddler.address, SECRET, timedelta(seconds=5))
    with pytest.raises(dist.DistNetworkError):
        [client.add("counter", 1) for _ in range(2)]  # if it is repeated, the first of the two is the client's own
    assert store.add("counter", 0) in (5, 6)
    client.close()


def test_a_server_that_is_elsewhere_than_published_proves_nothing(server: StoreServer) -> None:
    meddler = Meddler(server.address, lambda data: data)
    with pytest.raises(dist.DistNetworkError):
        JobStore(meddler.address, SECRET, timedelta(seconds=1))


def test_who_does_not_know_the_secret_learns_nothing_and_is_told_so_at_once(server: StoreServer) -> None:
    with pytest.raises(dist.DistNetworkError, match="it knows another secret"):
        JobStore(server.address, bytes(32), LONG)
    with socket.create_connection(server.address, timeout=10) as guess:
        guess.recv(GREETING_BYTES, socket.MSG_WAITALL)
        guess.sendall(bytes(ANSWER_BYTES))
        assert guess.recv(1 << 16) == REFUSAL
        assert guess.recv(1 << 16) == b""


def test_an_old_answer_proves_nothing(server: StoreServer) -> None:
    seen: list[bytes] = []

    def record(data: bytes) -> bytes:
        seen.append(data)
        return data

    with socket.create_connection(server.address, timeout=10) as honest:
        nonce = honest.recv(GREETING_BYTES, socket.MSG_WAITALL)[len(MAGIC) :]
        handshake = Handshake(SECRET, server.address, nonce, bytes(32))
        answer = record(handshake.client_nonce + handshake.make_client_proof())
        honest.sendall(answer)
        assert honest.recv(PROOF_BYTES, socket.MSG_WAITALL) == handshake.make_server_proof()
    with socket.create_connection(server.address, timeout=10) as later:
        later.recv(GREETING_BYTES, socket.MSG_WAITALL)
        later.sendall(seen[0])
        assert later.recv(1 << 16) == REFUSAL


def test_strangers_who_hang_up_at_once_do_no_harm(server: StoreServer, store: JobStore) -> None:
    """Closed with RST before the server greets them, so that its first send fails."""
    held, going = threading.Event(), threading.Event()
    original = server._accept

    def accept_later() -> None:
        held.set()
        going.wait(30)
        original()

    server._accept = accept_later  # type: ignore[method-assign]
    for _ in range(20):
        with socket.create_connection(server.address, timeout=10) as stranger:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            held.wait(30)
    going.set()
    assert store.add("counter", 1) == 1
    assert JobStore(server.address, SECRET, LONG).add("counter", 1) == 2


def test_strangers_who_stay_do_not_keep_the_job_out(server: StoreServer) -> None:
    crowd = [socket.create_connection(server.address, timeout=10) for _ in range(200)]
    for index, stranger in enumerate(crowd):
        stranger.sendall(os.urandom(1 + index % 100))
    store = JobStore(server.address, SECRET, LONG)
    store.set("a", "b")
    while len(server._strangers) > MAX_STRANGERS:
        time.sleep(0.01)
    assert store.get("a") == b"b"
    for stranger in crowd:
        stranger.close()


CLIENTS = 512


def many_clients(address: tuple[str, int], first: int, count: int) -> int:
    stores = [JobStore(address, SECRET, LONG) for _ in range(count)]
    for index, store in enumerate(stores, first):
        store.set(f"address/{index}", b"%d" % index * 60)
    for store in stores[:-1]:
        store.add("here", 1)
    if stores[-1].add("here", 1) == CLIENTS:
        stores[-1].set("all here", "")
    stores[0].wait(["all here"])
    found = stores[0].multi_get([f"address/{index}" for index in range(CLIENTS)])
    return sum(value == b"%d" % index * 60 for index, value in enumerate(found))


def test_hundreds_of_clients_are_served(group: ProcessPoolExecutor, server: StoreServer) -> None:
    firsts = range(0, CLIENTS, CLIENTS // 4)
    found = list(group.map(many_clients, [server.address] * 4, firsts, [CLIENTS // 4] * 4))
    assert found == [CLIENTS] * 4


@pytest.mark.forks_beside_threads("the server's thread takes no lock of a client, and the child does not use it")
def test_a_forked_process_has_connections_of_its_own(store: JobStore) -> None:
    assert store.add("counter", 1) == 1
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            os._exit(store.add("counter", 1))
        children.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert [*children, store.add("counter", 1)] == [2, 3, 4]


LEFT_ALONE = """
import os, sys
from datetime import timedelta
import torch, torch.distributed as dist
from hpc_train.runtime.store.client import JobStore
from hpc_train.runtime.store.server import StoreServer
server = StoreServer("127.0.0.1", bytes(32), 2)
store = JobStore(server.address, bytes(32), timedelta(seconds=300), server if sys.argv[1] == "serves" else None)
dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=timedelta(seconds=300))
del store
work = dist.all_reduce(torch.ones(1), async_op=True)
while not server.key_values.waiting:
    pass
print("waits")
"""


def test_a_process_can_end_while_threads_of_torch_wait_in_the_store() -> None:
    """gloo connects lazily here: one of its C++ threads waits in Python for a rank that never comes."""
    env = {**os.environ, "TORCH_GLOO_LAZY_INIT": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen([sys.executable, "-c", LEFT_ALONE, who], env=env, stdout=subprocess.PIPE, text=True)
        for who in ("serves", "does not serve")
    ]
    try:
        assert [process.communicate(timeout=60)[0] for process in started] == ["waits\n"] * 2
        assert [process.returncode for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()


def test_closing_ends_calls_that_wait_in_other_threads(server: StoreServer) -> None:
    store = JobStore(server.address, SECRET, LONG)
    clone = store.clone()
    clone.set_timeout(SHORT)
    with pytest.raises(dist.DistStoreError, match="200ms"):
        clone.get("never")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(store.wait, ["never"])
        while not server.key_values.waiting:
            time.sleep(0.01)
        store.close()
        with pytest.raises(dist.DistNetworkError):
            waiting.result()
    for each in (store, clone):
        with pytest.raises(dist.DistNetworkError, match="this process has closed it"):
            each.set("a", "b")


def test_a_wait_that_ends_names_only_what_is_missing(store: JobStore) -> None:
    store.set("a", "")
    with pytest.raises(dist.DistStoreError, match=r"keys: b$"):
        store.wait(["a", "b"], SHORT)
    with pytest.raises(dist.DistStoreError, match=r"keys: 0, 1, 2, 3 and 6 more$"):
        store.wait([str(index) for index in range(10)], SHORT)
    with pytest.raises(dist.DistStoreError, match="wait timeout after 0ms"):
        store.wait(["b"], timedelta(0))
