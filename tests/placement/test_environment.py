"""What is set for a job, what is left to the user, and what is reported."""

from __future__ import annotations

from hpc_train.placement.communication_environment import (
    apply_settings,
    choose_cpu_settings,
    choose_nic_settings,
    choose_socket_settings,
    find_harmful_variables,
)

NEVER = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_P2P_LEVEL", "NCCL_NTHREADS")


def names(settings: list[object]) -> list[str]:
    return [str(it).partition("=")[0] for it in settings]


def test_sockets_name_the_network_exactly() -> None:
    values = {it.name: it.value for it in choose_socket_settings("hsn0", 4, named=True)}
    assert values == {"GLOO_SOCKET_IFNAME": "hsn0", "NCCL_SOCKET_IFNAME": "=hsn0"}
    assert [it.name for it in choose_socket_settings("lo", 1, named=False)] == ["GLOO_SOCKET_IFNAME"]


def test_nics_are_listed_only_to_keep_some_out() -> None:
    fit = ["mlx5_0", "mlx5_3"]
    assert choose_nic_settings([fit, fit], [{}, {}]) == []
    (only,) = choose_nic_settings([fit, fit], [{"mlx5_1": "ethernet where most have infiniband"}, {}])
    assert (only.name, only.value) == ("NCCL_IB_HCA", "=mlx5_0,mlx5_3")
    assert "mlx5_1" in only.reason


def test_no_list_of_nics_where_nodes_name_them_differently() -> None:
    assert choose_nic_settings([["mlx5_0"], ["mlx5_2"]], [{"mlx5_1": "slow"}, {}]) == []
    assert choose_nic_settings([[], []], [{"mlx5_1": "slow"}, {}]) == []


def test_the_users_value_stays() -> None:
    env = {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "=hsn0"}
    done, kept = apply_settings([*choose_socket_settings("hsn0", 2, named=True), *choose_cpu_settings(True)], env)
    assert env == {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "=hsn0", "NCCL_IGNORE_CPU_AFFINITY": "1"}
    assert ([it.name for it in done], kept) == (["NCCL_IGNORE_CPU_AFFINITY"], ["GLOO_SOCKET_IFNAME"])


def test_an_empty_value_is_the_users_too() -> None:
    env = {"NCCL_SOCKET_IFNAME": ""}
    apply_settings(choose_socket_settings("hsn0", 2, named=True), env)
    assert env["NCCL_SOCKET_IFNAME"] == ""


def test_nothing_that_steers_nccl_inside_is_ever_set() -> None:
    everything = [
        *choose_socket_settings("hsn0", 2, named=True),
        *choose_nic_settings([["mlx5_0"]], [{"mlx5_1": "slow"}]),
        *choose_cpu_settings(True),
    ]
    assert not {it.name for it in everything} & set(NEVER)


def test_inherited_variables_that_do_harm_are_found() -> None:
    env = {"NCCL_ALGO": "Ring", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "0", "NCCL_DEBUG": "INFO", "HOME": "/"}
    assert [it.name for it in find_harmful_variables(env)] == ["NCCL_ALGO", "NCCL_P2P_DISABLE"]
    assert env["NCCL_ALGO"] == "Ring"  # reported, not removed


def test_a_list_of_nics_that_matches_more_than_it_says() -> None:
    (found,) = find_harmful_variables({"NCCL_IB_HCA": "mlx5_1:1,mlx5_2"})
    assert "mlx5_10 to mlx5_19" in found.why
    assert find_harmful_variables({"NCCL_IB_HCA": "=mlx5_1,mlx5_2"}) == []
    assert find_harmful_variables({"NCCL_IB_HCA": "mlx5"}) == []
    assert find_harmful_variables({"NCCL_IB_HCA": "^mlx5_1"}) == []


def test_one_visible_gpu_a_rank_hides_its_peers() -> None:
    assert [it.name for it in find_harmful_variables({"CUDA_VISIBLE_DEVICES": "3"}, ranks_of_node=4)] == [
        "CUDA_VISIBLE_DEVICES"
    ]
    assert find_harmful_variables({"CUDA_VISIBLE_DEVICES": "3"}, ranks_of_node=1) == []
    assert find_harmful_variables({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, ranks_of_node=4) == []
