"""Tensor parallelism, its parts: whose key heads a rank computes, the split loss, and where shards of shards are."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from outcome import Array, Held, whole
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from hpc_train._torch.dtensor import shard_offset
from hpc_train.config.parallel import ParallelConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import IGNORED_TARGET, World
from hpc_train.models.layers import RMSNorm1p
from hpc_train.parallel.loss import sum_split_cross_entropy
from hpc_train.parallel.tensor.full_norms import check_norm, list_counted_heads, split_full_norms
from hpc_train.parallel.tensor.layers import TensorAxis
from hpc_train.parallel.tensor.local_parameters import ParameterLayout, ParameterLayouts, distribute_parameters
from hpc_train.testing import run_ranks
from hpc_train.traffic.model_axes import assign_kv_heads


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_each_query_head_attends_to_its_own_key_head(kv_heads: int, group: int, factor: int) -> None:
    heads = kv_heads * group
    for ranks in (n for n in range(1, heads * factor + 1) if heads % n == 0):
        own = heads // ranks
        for rank in range(ranks):
            held_heads = assign_kv_heads(heads, kv_heads, rank, ranks)
            assert own % len(held_heads) == 0, "torch serves equally many query heads with each"
            for head in range(own):
                assert held_heads[head * len(held_heads) // own] == (rank * own + head) // group


def test_fewer_key_heads_than_ranks_are_computed_once() -> None:
    assert [assign_kv_heads(8, 2, rank, 4) for rank in range(4)] == [(0,), (0,), (1,), (1,)]
    assert [assign_kv_heads(8, 4, rank, 2) for rank in range(2)] == [(0, 1), (2, 3)]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_a_norm_over_all_heads_counts_each_key_head_once(kv_heads: int, group: int, factor: int) -> None:
    heads = kv_heads * group
    for ranks in (n for n in range(1, heads * factor + 1) if heads % n == 0):
        counted = []
        for rank in range(ranks):
            own = assign_kv_heads(heads, kv_heads, rank, ranks)
            counted += [own[index] for index in list_counted_heads(heads, kv_heads, rank, ranks)]
        assert sorted(counted) == list(range(kv_heads))


NORMS = {"query": nn.RMSNorm(4 * 6, eps=1e-5), "key": RMSNorm1p(2 * 6, eps=1e-5)}
"""Over tp=4: a query head each, and two ranks for each of the two key heads."""


def _normalise(world: World, whole: dict[str, nn.Module], inputs: dict[str, Tensor]) -> dict[str, list[Array]]:
    """Each rank's part of both norms' results, and of the gradients of inputs and weights."""
    axis = TensorAxis(world.mesh["tp"], sequence=False)
    parent = nn.Module()
    parent.head_dim = 6  # type: ignore[assignment]
    inputs = {name: values.to(world.device) for name, values in inputs.items()}
    norms: dict[str, nn.Module] = {name: copy.deepcopy(norm).to(inputs[name]) for name, norm in whole.items()}
    layouts: ParameterLayouts = {}
    split_full_norms(parent, norms, axis, layouts)
    for norm in norms.values():
        distribute_parameters(norm, axis.mesh, layouts)
    found = {}
    for name, norm in norms.items():
        units = assign_kv_heads(4, inputs[name].shape[-1] // 6, axis.rank, axis.size)
        own = inputs[name].unflatten(-1, (-1, 6))[..., list(units), :].flatten(-2).requires_grad_()
        out = norm(own)
        (out.double() * _weigh(out, axis.rank)).sum().backward()
        (weight,) = norm.parameters()
        assert own.grad is not None
        assert isinstance(weight.grad, DTensor)
        found[name] = [value.detach().double().cpu().numpy() for value in (out, own.grad, weight.grad.full_tensor())]
    return found


def _weigh(out: Tensor, rank: int) -> Tensor:
    """Another factor of the loss for every element on every rank."""
    return torch.linspace(1.0, 2.0 + rank, out.numel(), dtype=torch.float64, device=out.device).view(out.shape)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.bfloat16, 2**-8)])
def test_split_norms_over_all_heads_are_those_of_one_process(dtype: torch.dtype, tolerance: float) -> None:
    """Results, and gradients of inputs and weights, where two ranks compute the same key head."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for norm in NORMS.values():
            norm.weight.copy_(torch.rand(norm.weight.shape, generator=generator))
    inputs = {
        name: torch.randn(2, 3, norm.weight.numel(), generator=generator, dtype=torch.float64).to(dtype)
        for name, norm in NORMS.items()
    }
    ranks = run_ranks(_normalise, 4, NORMS, inputs, parallel=ParallelConfig(tp=4))
    for name, norm in NORMS.items():
        heads, whole_norm = norm.weight.numel() // 6, copy.deepcopy(norm).to(dtype).double()
        x = inputs[name].double().requires_grad_()
        expected = whole_norm(x)
        parts = [expected.unflatten(-1, (-1, 6))[..., assign_kv_heads(4, heads, rank, 4)[0], :] for rank in range(4)]
        sum((part * _weigh(part, rank)).sum() for rank, part in enumerate(parts)).backward()
        gradient = np.zeros(x.shape)
        for rank, (out, by_x, by_weight) in enumerate(found[name] for found in ranks):
            head = assign_kv_heads(4, heads, rank, 4)[0]
            _assert_near(out, parts[rank].detach().cpu().numpy(), tolerance)
            gradient[..., 6 * head : 6 * head + 6] += by_x
            _assert_near(by_weight, whole_norm.weight.grad.numpy(), tolerance)
        assert x.grad is not None
        _assert_near(gradient, x.grad.numpy(), tolerance)


def _assert_near(found: Array, expected: Array, tolerance: float) -> None:
    assert np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize("norm", [nn.LayerNorm(12), nn.RMSNorm(12, elementwise_affine=False), nn.Linear(12, 12)])
def test_only_a_root_mean_square_norm_is_over_all_heads(norm: nn.Module) -> None:
    with pytest.raises(
        UserError, match=f"attention.q_norm: is {type(norm).__name__}, and only a root-mean-square norm"
    ):
        check_norm("attention.q_norm", norm)


def _split_loss(world: World, logits: Tensor, target: Tensor) -> tuple[float, Array]:
    mesh, rows = world.mesh["tp"], logits.shape[-1]
    chunk = -(-rows // mesh.size())
    begin = mesh.get_local_rank() * chunk
    mine = logits[..., begin : begin + chunk].clone().requires_grad_()
    out = DTensor.from_local(mine, mesh, (Shard(2),), run_check=False, shape=logits.shape, stride=logits.stride())
    loss = sum_split_cross_entropy(out, target)
    (2 * loss).backward()  # type: ignore[no-untyped-call]
    assert mine.grad is not None
    return float(loss.detach()), mine.grad.cpu().numpy().copy()


@pytest.mark.parametrize("size", [1.0, 1e4])
def test_the_split_loss_is_the_cross_entropy(size: float) -> None:
    """Also of logits whose exponentials overflow, and of tokens that do not count."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(2, 5, 17, generator=generator, dtype=torch.float64) * size).requires_grad_()
    target = torch.randint(17, (2, 5), generator=generator)
    target[0, :2] = IGNORED_TARGET
    expected = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
    (2 * expected).backward()  # type: ignore[no-untyped-call]
    ranks = run_ranks(_split_loss, 3, logits.detach(), target, parallel=ParallelConfig(tp=3))
    for loss, _ in ranks:
        assert loss == pytest.approx(float(expected.detach()), rel=1e-14)
    assert logits.grad is not None
    np.testing.assert_allclose(np.concatenate([found for _, found in ranks], -1), logits.grad, rtol=1e-12, atol=1e-14)


def _wrong_target(world: World) -> str:
    with pytest.raises(RuntimeError) as caught:
        _split_loss(world, torch.zeros(1, 2, 4), torch.tensor([[0, 4]]))
    return str(caught.value)


def test_a_target_outside_the_vocabulary_is_an_error() -> None:
    assert all("not in the vocabulary" in said for said in run_ranks(_wrong_target, 2, parallel=ParallelConfig(tp=2)))


ROWS = 17
"""Over tp=2 they are 9 and 8; over dp_shard=4 beside it 3, 3, 3, 0 and 2, 2, 2, 2."""


def _rows_held(world: World) -> list[Held]:
    table = nn.Embedding(ROWS, 2)
    table.weight.data = torch.arange(2.0 * ROWS).view(ROWS, 2)
    distribute_parameters(table, world.mesh["tp"], {(table, "weight"): ParameterLayout(Shard(0))})
    fully_shard(table, mesh=world.mesh["dp_shard"])
    parameter = next(table.parameters())
    assert isinstance(parameter, DTensor)
    offset = shard_offset(parameter)
    return [
        Held("weight", tuple(parameter.shape), offset, parameter.to_local().detach().double().cpu().numpy().copy(), 0)
    ]


def test_unequal_shards_of_shards_are_where_they_say() -> None:
    ranks = run_ranks(_rows_held, 8, parallel=ParallelConfig(strategy="zero3", tp=2, dp_shard=4))
    np.testing.assert_array_equal(whole(ranks)["weight"], np.arange(2.0 * ROWS).reshape(ROWS, 2))
