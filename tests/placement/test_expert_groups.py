"""Groups of expert parallelism, which are parts of dp_shard x cp: where they are, and what placing them costs."""

from __future__ import annotations

import pytest
from placement_fabrics import tree_fabric

from hpc_train.config.compose import compose
from hpc_train.placement.cost.cost_model import estimate_cost
from hpc_train.placement.mesh_groups import list_groups
from hpc_train.traffic.flows import compute_flows, list_axis_sizes

SIZES = {"pp": 2, "dp_replicate": 1, "dp_shard": 3, "cp": 4, "tp": 2, "ep": 6}


def test_neighbours_of_dp_shard_and_cp_share_experts() -> None:
    groups = [set(group) for group in list_groups(SIZES, ("ep",)).tolist()]
    alike = [set(group) for group in list_groups(SIZES, ("expert_shard",)).tolist()]
    for rank in range(48):
        pp, rest = divmod(rank, 24)
        index, tp = divmod(rest, 2)  # of dp_shard x cp
        first = pp * 24 + index // 6 * 12 + tp
        assert set(range(first, first + 12, 2)) in groups
        assert {pp * 24 + index % 6 * 2 + tp, pp * 24 + (index % 6 + 6) * 2 + tp} in alike
    assert len(groups) == 8
    assert len(alike) == 24


def test_other_axes_stay_as_they_are_without_ep() -> None:
    plain = {axis: size for axis, size in SIZES.items() if axis != "ep"}
    for axes in (("pp",), ("dp_shard", "cp"), ("tp",)):
        assert list_groups(SIZES, axes).tolist() == list_groups(plain, axes).tolist()


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_a_model_of_experts_has_a_cost_on_a_fabric(ep: int) -> None:
    config = compose(("model=llama_moe_tiny", "parallel=fsdp", f"parallel.ep={ep}"))
    cost = estimate_cost(
        tree_fabric([(0, 0), (0, 0), (1, 0), (1, 0)], 2),
        list_axis_sizes(config, 8),
        compute_flows(config, 8),
        backend="gloo",
    )
    assert ("ep" in cost.per_axis) == (ep > 1)
    assert (cost.per_axis.get("ep", 0) > 0) == (ep > 2), "two ranks are inside a node, where links cost nothing here"
