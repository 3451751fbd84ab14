"""Real processes meet in one store: in any order, past stale files, on the job's own address and on no fixed port."""

from __future__ import annotations

import json
import multiprocessing
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from hpc_train.errors import UserError
from hpc_train.runtime.identity import ProcessIdentity
from hpc_train.runtime.rendezvous import RENDEZVOUS_VARIABLE, open_job_store

LONG, SHORT = timedelta(seconds=60), timedelta(seconds=1)


def identity(process: int, processes: int, launcher: str = "submitit", key: str = "job-1") -> ProcessIdentity:
    return ProcessIdentity(process, processes, process, 0, 1, launcher, socket.gethostname(), key)


def exchange(
    me: ProcessIdentity, env: Mapping[str, str], interface: str | None = None, timeout: timedelta = LONG
) -> list[str]:
    """Meet the others and return what each said."""
    store = open_job_store(me, env, interface, timeout)
    store.set(f"from {me.process}", f"{me.attempt_key}: {me.process}")
    heard = [store.get(f"from {other}").decode() for other in range(me.processes)]
    if store.add("heard", 1) == me.processes:
        store.set("everybody heard", "")
    store.wait(["everybody heard"])
    if me.process == 0:
        time.sleep(0.2)  # the store ends with process 0, whose peers are in the line above
    return heard


def listening() -> set[tuple[str, int]]:
    """Addresses on which this process has a listening TCP socket."""
    mine = {str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    found = set()
    for table, family, size in (("tcp", socket.AF_INET, 4), ("tcp6", socket.AF_INET6, 16)):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in mine:
                address, port = local.split(":")
                words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, size * 2, 8)]
                found.add((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found


def hosted(folder: Path, interface: str | None) -> set[tuple[str, int]]:
    """Where a process 0 listens once process 1 has come."""
    before = listening()
    store = open_job_store(identity(0, 2), {RENDEZVOUS_VARIABLE: str(folder)}, interface, LONG)
    found = listening() - before
    store.set("seen", "")
    return found


def joined(folder: Path) -> None:
    open_job_store(identity(1, 2), {RENDEZVOUS_VARIABLE: str(folder)}, None, LONG).wait(["seen"])


@pytest.fixture
def pool() -> ProcessPoolExecutor:
    with ProcessPoolExecutor(6, multiprocessing.get_context("fork")) as processes:
        yield processes


Submit = Callable[..., "Future[list[str]]"]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)], ids=str)
def test_processes_meet_in_any_order(pool: ProcessPoolExecutor, tmp_path: Path, order: tuple[int, ...]) -> None:
    futures = []
    for process in order:
        futures.append(pool.submit(exchange, identity(process, 3), {RENDEZVOUS_VARIABLE: str(tmp_path)}))
        time.sleep(0.1)
    assert [future.result() for future in futures] == [["job-1: 0", "job-1: 1", "job-1: 2"]] * 3


def test_what_process_0_published_is_gone_once_all_have_met(pool: ProcessPoolExecutor, tmp_path: Path) -> None:
    futures = [
        pool.submit(exchange, identity(process, 2), {RENDEZVOUS_VARIABLE: str(tmp_path)}) for process in range(2)
    ]
    assert [len(future.result()) for future in futures] == [2, 2]
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_attempt_is_not_read(pool: ProcessPoolExecutor, tmp_path: Path) -> None:
    stale = tmp_path / ".rendezvous-job-0.json"
    stale.write_text(json.dumps(["127.0.0.1", 9]))
    futures = [pool.submit(exchange, identity(process, 2), {RENDEZVOUS_VARIABLE: str(tmp_path)}) for process in (1, 0)]
    assert [future.result() for future in futures] == [["job-1: 0", "job-1: 1"]] * 2
    assert stale.exists()


def test_two_jobs_meet_at_the_same_time_in_one_folder(pool: ProcessPoolExecutor, tmp_path: Path) -> None:
    keys = ("job-1", "job-2")
    futures = {
        key: [
            pool.submit(exchange, identity(process, 2, key=key), {RENDEZVOUS_VARIABLE: str(tmp_path)})
            for process in (0, 1)
        ]
        for key in keys
    }
    for key in keys:
        assert [future.result() for future in futures[key]] == [[f"{key}: 0", f"{key}: 1"]] * 2


def test_the_store_listens_on_the_loopback_alone(pool: ProcessPoolExecutor, tmp_path: Path) -> None:
    peer = pool.submit(joined, tmp_path)
    ((address, _port),) = pool.submit(hosted, tmp_path, None).result()
    peer.result()
    assert address == "127.0.0.1"


def test_the_store_listens_on_the_named_interface_alone(pool: ProcessPoolExecutor, tmp_path: Path) -> None:
    from hpc_train.runtime.identity import list_interfaces

    # Interfaces of a development cluster come and go with the Slurm tests beside this one.
    lasting = {name: own for name, own in list_interfaces().items() if not name.startswith("devcluster")}
    assert lasting
    for name, own in lasting.items():
        peer = pool.submit(joined, tmp_path)
        ((address, _port),) = pool.submit(hosted, tmp_path, name).result()
        peer.result()
        assert address == own


def test_two_stores_get_two_ports(pool: ProcessPoolExecutor, tmp_path: Path) -> None:
    ports = set()
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    peers = [pool.submit(joined, tmp_path / name) for name in ("first", "second")]
    for future in [pool.submit(hosted, tmp_path / name, None) for name in ("first", "second")]:
        ports |= {port for _, port in future.result()}
    assert all(peer.result() is None for peer in peers)
    assert len(ports) == 2


def test_one_process_needs_nobody() -> None:
    store = open_job_store(identity(0, 1), {}, None, LONG)
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_process_0_says_who_did_not_come(pool: ProcessPoolExecutor, tmp_path: Path) -> None:
    lonely = pool.submit(exchange, identity(0, 3), {RENDEZVOUS_VARIABLE: str(tmp_path)}, None, SHORT)
    with pytest.raises(UserError, match=r"1 of 3 processes came within 1 s"):
        lonely.result()
    assert list(tmp_path.iterdir()) == []


def test_the_others_say_which_file_they_waited_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"waited 1 s for .*\.rendezvous-job-1\.json, which process 0 writes"):
        open_job_store(identity(1, 2), {RENDEZVOUS_VARIABLE: str(tmp_path)}, None, SHORT)


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1}', "17"])
def test_a_damaged_file_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / ".rendezvous-job-1.json").write_text(text)
    with pytest.raises(UserError, match=r"is not what process 0 of this job writes") as wrong:
        open_job_store(identity(1, 2), {RENDEZVOUS_VARIABLE: str(tmp_path)}, None, SHORT)
    assert len(str(wrong.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"MASTER_PORT": "1"}, "MASTER_ADDR is not set"),
        ({"MASTER_ADDR": "localhost"}, "MASTER_PORT is not set"),
        ({"MASTER_ADDR": "localhost", "MASTER_PORT": "http"}, "MASTER_PORT='http' is not a port"),
        ({"MASTER_ADDR": "localhost", "MASTER_PORT": "70000"}, "MASTER_PORT='70000' is not a port"),
    ],
)
def test_a_torchrun_environment_that_leads_nowhere_is_one_line(env: dict[str, str], words: str) -> None:
    with pytest.raises(UserError) as wrong:
        open_job_store(identity(1, 2, launcher="torchrun"), env, None, SHORT)
    assert words in str(wrong.value)
    assert len(str(wrong.value).splitlines()) == 1


def free_address() -> dict[str, str]:
    """Where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}


def test_a_store_that_nobody_serves_is_one_line() -> None:
    with pytest.raises(UserError, match=r"the job's store at 127\.0\.0\.1:\d+ cannot be reached") as wrong:
        open_job_store(identity(1, 2, launcher="torchrun"), free_address(), None, SHORT)
    assert len(str(wrong.value).splitlines()) == 1


def test_ranks_started_by_hand_meet_at_the_address_they_are_given(pool: ProcessPoolExecutor) -> None:
    env = free_address()
    futures = [pool.submit(exchange, identity(process, 2, launcher="torchrun"), env) for process in (1, 0)]
    assert [future.result() for future in futures] == [["job-1: 0", "job-1: 1"]] * 2
