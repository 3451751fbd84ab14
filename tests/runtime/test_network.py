"""Processes listen where the others of their job can reach them, and nowhere else."""

from __future__ import annotations

import socket

import pytest

from hpc_train.errors import UserError
from hpc_train.runtime.identity import find_interface_address, find_local_address, list_interfaces

THIS_HOST = socket.gethostname()


def test_on_one_node_the_loopback_is_enough() -> None:
    assert find_local_address(THIS_HOST, nodes=1, interface=None) == ("127.0.0.1", "lo")


def test_every_interface_is_found_with_the_address_it_can_listen_on() -> None:
    found = list_interfaces()
    assert found["lo"] == "127.0.0.1"
    for address in found.values():
        with socket.create_server((address, 0)) as listener:
            assert listener.getsockname()[0] == address


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_named_interface_is_taken_at_any_number_of_nodes(nodes: int) -> None:
    for name, address in list_interfaces().items():
        assert find_local_address(THIS_HOST, nodes, interface=name) == (address, name)


def test_an_unknown_interface_is_one_line_with_those_there_are() -> None:
    with pytest.raises(UserError, match=r"cluster.fabric.interface=ib7: .* has .*lo") as wrong:
        find_local_address(THIS_HOST, nodes=2, interface="ib7")
    assert len(str(wrong.value).splitlines()) == 1
    assert find_interface_address("ib7") is None


def test_several_nodes_never_meet_on_a_name_that_is_the_loopback() -> None:
    with pytest.raises(UserError, match=r"localhost resolves to 127\.0\.0\.1 on itself, .* cluster.fabric.interface"):
        find_local_address("localhost", nodes=2, interface=None)


def test_several_nodes_need_a_name_that_resolves() -> None:
    with pytest.raises(UserError, match=r"no-such-host\.invalid does not resolve"):
        find_local_address("no-such-host.invalid", nodes=2, interface=None)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(UserError, match=r"192\.0\.2\.77 resolves to"):
        find_local_address("192.0.2.77", nodes=2, interface=None)
