"""What context parallelism costs: bytes sent, products computed, memory: counted, and compared with formulas."""

from __future__ import annotations

import gc
import math
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from drawn import draw
from hypothesis import given
from hypothesis import strategies as st
from matrix import Case
from peak_bytes import PeakBytes
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpc_train.config.model import TransformerConfig
from hpc_train.config.parallel import ContextConfig, ParallelConfig
from hpc_train.config.run import RunConfig
from hpc_train.interfaces import MicroBatch, World
from hpc_train.models.initial_values import initialise_parameters
from hpc_train.models.layers import ScaledDotProduct
from hpc_train.models.registry import build_model as build_model
from hpc_train.parallel import mesh_axes
from hpc_train.parallel.context import context_parallel
from hpc_train.parallel.context.ring_schedule import find_visible_block
from hpc_train.parallel.mesh_axes import SequenceShare
from hpc_train.testing import run_ranks

BATCH, HEADS, KV_HEADS, WIDTH, LENGTH = 2, 4, 2, 8, 32
METHODS = {"ring": ContextConfig(balanced=False), "balanced": ContextConfig(), "ulysses": ContextConfig("ulysses")}
FLASH = "_scaled_dot_product_flash_attention_for_cpu"


def _config(cp: int, method: str) -> RunConfig:
    return replace(Case(1, ()).config(), parallel=ParallelConfig(cp=cp, context=METHODS[method]))


class Ledger(TorchDispatchMode):
    """Bytes given to each kind of message, and the pairs of query and key that attention kernels computed."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.pairs: Counter[str] = Counter()
        self.order = ""
        """s: a message begins to be sent, r: to be received, a: attention to a block."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.order += {"send": "s", "recv_": "r", FLASH: "a", f"{FLASH}_backward": "a"}.get(name, "")
        if func.namespace == "c10d" and "recv" not in name:
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            self.calls[name] += 1
            self.bytes[name] += max(tensor.nbytes for tensor in tensors)
        if name in (FLASH, f"{FLASH}_backward"):
            self._attention(name, args)
        return func(*args, **(kwargs or {}))

    def _attention(self, name: str, args: Any) -> None:
        forward = name == FLASH
        q, k = args[:2] if forward else args[1:3]
        causal = any(args[4 if forward else 7 :])  # torch leaves out a last argument that has its default
        rows, columns = q.shape[2], k.shape[2]
        self.pairs["forward" if forward else "backward"] += rows * (rows + 1) // 2 if causal else rows * columns


def _cost(world: World, method: str, dtype: torch.dtype) -> tuple[Ledger, Ledger]:
    """Of the forward and of the backward of one attention."""
    core = context_parallel.distribute_attention(
        ScaledDotProduct(causal=True, dropout=0.0), _config(world.size, method), world
    )
    length = LENGTH // world.size
    q, k, v = (
        torch.randn(BATCH, heads, length, WIDTH, dtype=dtype).requires_grad_() for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    with Ledger() as forward:
        out = core(q, k, v)
    with Ledger() as backward:
        out.sum().backward()
    return forward, backward


def _costs(cp: int, method: str, dtype: torch.dtype = torch.float32) -> list[tuple[Ledger, Ledger]]:
    return run_ranks(_cost, cp, method, dtype, parallel=ParallelConfig(cp=cp))


def _bytes(heads: int, cp: int, item: int) -> int:
    """Of the heads of a rank's share of the positions."""
    return BATCH * heads * (LENGTH // cp) * WIDTH * item


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cp", [2, 4])
def test_ring_sends_keys_and_values_and_then_their_gradients_too(cp: int, dtype: torch.dtype) -> None:
    """(cp - 1) (k + v) forward and (cp - 1) (k + v + dk + dv) backward, the gradients in float32 at least."""
    keys, gradients = 2 * _bytes(KV_HEADS, cp, dtype.itemsize), 2 * _bytes(KV_HEADS, cp, 4)
    for forward, backward in _costs(cp, "balanced", dtype):
        assert forward.bytes == {"send": (cp - 1) * keys}
        assert backward.bytes == {"send": (cp - 1) * (keys + gradients)}


@pytest.mark.parametrize("cp", [2, 4])
def test_ulysses_exchanges_four_times_forward_and_four_times_backward(cp: int) -> None:
    """q, k, v and the result; where there are fewer key and value heads than ranks, each goes to several."""
    heads = 2 * HEADS + 2 * max(KV_HEADS, cp)
    for passes in _costs(cp, "ulysses"):
        for ledger in passes:
            assert ledger.calls == {"alltoall_base_": 4}
            assert ledger.bytes == {"alltoall_base_": _bytes(heads, cp, 4)}


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_the_future_is_not_computed_and_balanced_work_is_even(cp: int, method: str) -> None:
    """Together the ranks compute each pair of a query and a key before it once: LENGTH (LENGTH + 1) / 2 of them."""
    costs = _costs(cp, method)
    work = [forward.pairs["forward"] for forward, _ in costs]
    assert work == [backward.pairs["backward"] for _, backward in costs]
    size, half = LENGTH // cp, LENGTH * (LENGTH + 1) // 2
    if method == "ulysses":  # all pairs, for a part of the heads
        assert work == [half] * cp
    elif method == "balanced":
        assert work == [size * (size + 1) // 2 + (cp - 1) * size * size // 2] * cp
        assert sum(work) == half
    else:
        assert work == [size * (size + 1) // 2 + rank * size * size for rank in range(cp)]
        assert sum(work) == half


def test_messages_are_on_their_way_while_a_block_is_computed() -> None:
    """Forward: the next keys and values, but in the last round. Backward: those, and since the second round the
    gradients that the round before has added to; the last message brings them home."""
    for forward, backward in _costs(4, "balanced"):
        assert forward.order == "sra" * 3 + "a"
        assert backward.order == "sra" + "sra" + "sr" + "sra" + "sr" + "a" + "sr"


@given(ranks=st.integers(1, 6), size=st.integers(1, 4), causal=st.booleans(), balanced=st.booleans())
def test_the_blocks_of_all_rounds_are_the_mask(ranks: int, size: int, causal: bool, balanced: bool) -> None:
    per_rank = size * (2 if balanced else 1)
    length = per_rank * ranks
    places = [SequenceShare(rank, ranks, balanced).positions(length) for rank in range(ranks)]
    seen = torch.zeros(length, length, dtype=torch.int64)
    for rank in range(ranks):
        for source in range(ranks):
            block = find_visible_block(rank, source, per_rank, causal=causal, balanced=balanced)
            if block is not None:
                rows, columns = places[rank][block.queries], places[source][block.keys]
                part = torch.ones(len(rows), len(columns), dtype=torch.int64)
                seen[rows.unsqueeze(1), columns] += part.tril() if block.causal else part
    everything = torch.ones(length, length, dtype=torch.int64)
    assert torch.equal(seen, everything.tril() if causal else everything)


# Memory --------------------------------------------------------------------------------------------------------------

LONG = 1024
MODEL = TransformerConfig(
    name="llama", vocab_size=16, layers=2, hidden=32, heads=4, kv_heads=4, feed_forward=48, max_positions=LONG
)


def _attention_memory(world: World, method: str, expected: float) -> tuple[int, int]:
    """(bytes kept for backward, the largest tensor) of one attention over LONG positions."""
    core = context_parallel.distribute_attention(
        ScaledDotProduct(causal=True, dropout=0.0), _config(world.size, method), world
    )
    q, k, v = (torch.randn(1, LONG // world.size, 4, WIDTH).transpose(1, 2).requires_grad_() for _ in range(3))
    gc.collect()
    with PeakBytes() as live:
        out = core(q, k, v)
        kept = live.settled(1.01 * expected)
        out.sum().backward()
    return kept, live.largest


@pytest.mark.parametrize("method", draw(METHODS, ["balanced", "ulysses"]))
def test_attention_keeps_what_grows_with_a_ranks_share_and_no_square(method: str) -> None:
    """Kept: for the ring keys, values and the result, for Ulysses q, k, v as exchanged, and the result before and after
    its exchange; and the log-sum-exp. The largest tensor holds keys and values."""
    for cp in (2, 4):
        share = LONG // cp * 4 * WIDTH * 4
        expected = (5 if method == "ulysses" else 3) * share + share / WIDTH
        for kept, largest in run_ranks(_attention_memory, cp, method, expected, parallel=ParallelConfig(cp=cp)):
            assert kept == pytest.approx(expected, rel=0.01)
            assert largest <= 2 * share


def _training_memory(world: World, method: str) -> int:
    """Peak of a forward and backward of a model on one sequence of LONG tokens: the least of five, because the threads
    of collectives may keep a message of theirs a little longer than it takes."""
    config, model = _config(world.size, method), build_model(MODEL)
    initialise_parameters(model, 0)
    context_parallel.apply_context_parallel(model, config, world)
    tokens = torch.zeros(1, LONG, dtype=torch.int64)
    mine = mesh_axes.select_local_tokens(MicroBatch(tokens, tokens), config, world)
    peaks = []
    for _ in range(5):
        model.zero_grad()
        gc.collect()
        with PeakBytes() as live:
            model.loss_sum(model(mine.inputs), mine.targets).backward()
        peaks.append(live.peak)
    return min(peaks)


@cache
def _alone() -> int:
    """Peak of one rank with the whole sequence."""
    (peak,) = run_ranks(_training_memory, 1, "balanced", parallel=ParallelConfig(cp=1))
    return peak


@pytest.mark.parametrize("method", draw(METHODS, ["balanced"]))
def test_activations_of_a_model_fall_as_one_over_cp(method: str) -> None:
    gradients = 4 * sum(math.prod(parameter.shape) for parameter in build_model(MODEL).parameters())
    assert _alone() > 40 * gradients
    for cp in (2, 4):
        for peak in run_ranks(_training_memory, cp, method, parallel=ParallelConfig(cp=cp)):
            assert peak < 1.05 * (_alone() / cp) + gradients
