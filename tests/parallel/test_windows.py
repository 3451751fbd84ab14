"""Windows and soft-caps of attention over the ranks of cp: exact, and with only the messages that somebody needs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from matrix import Case
from torch import Tensor, nn

from hpc_train.config.parallel import ContextConfig, ParallelConfig
from hpc_train.interfaces import World
from hpc_train.models.attention import plain_attention
from hpc_train.models.layers import ScaledDotProduct
from hpc_train.parallel import mesh_axes
from hpc_train.parallel.context import context_parallel
from hpc_train.parallel.context.ring_schedule import KeyValueRing
from hpc_train.testing import run_ranks
from hpc_train.traffic.ring_blocks import RingLayout, count_messages

LENGTH = 48
METHODS = {"ring": ContextConfig(balanced=False), "balanced": ContextConfig(), "ulysses": ContextConfig("ulysses")}
RULES = [(3, None), (9, 2.0), (20, None), (60, None), (None, 2.0)]
"""Windows within a chunk, over one boundary, over several, over everything; soft-caps."""


def _results(attention: nn.Module, tensors: list[Tensor]) -> list[Tensor]:
    *inputs, grad = tensors
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = attention(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def _attend(world: World) -> dict[str, tuple[float, int]]:
    """Largest error on this rank's positions against one piece, and the messages that it sent forward."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, LENGTH, number, 5) for number in (4, 2, 2, 4)]
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).transpose(1, 2) for s in shapes]
    found, messages = {}, [0]
    exchange, pass_on = KeyValueRing.exchange, KeyValueRing.pass_on

    def count_exchange(ring: KeyValueRing, shift: int, outgoing: Tensor | None, like: Tensor | None) -> object:
        messages[0] += outgoing is not None
        return exchange(ring, shift, outgoing, like)

    def count_pass(ring: KeyValueRing, tensor: Tensor) -> object:
        messages[0] += 1
        return pass_on(ring, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KeyValueRing, "exchange", count_exchange)
        patch.setattr(KeyValueRing, "pass_on", count_pass)
        patch.setattr(plain_attention, "MAX_SCORES", 1 << 9)  # several blocks of queries
        for method, context in METHODS.items():
            config = replace(Case(1, ()).config(), parallel=ParallelConfig(cp=world.size, context=context))
            mine = mesh_axes.get_sequence_share(config, world).positions(LENGTH)
            for window, softcap in RULES:
                core = ScaledDotProduct(causal=True, dropout=0.0, window=window, softcap=softcap)
                expected = _results(core, tensors)
                distributed = context_parallel.distribute_attention(core, config, world)
                messages[0] = 0
                results = _results(distributed, [x[:, :, mine] for x in tensors])
                pairs = zip(results, expected, strict=True)
                error = max((a - b[:, :, mine]).abs().max().item() for a, b in pairs)
                found[f"{method} {window} {softcap}"] = (error, messages[0])
    return found


@pytest.mark.parametrize("cp", [2, 4])
def test_attention_over_ranks_is_that_of_one_piece(cp: int) -> None:
    ranks = run_ranks(_attend, cp, parallel=ParallelConfig(cp=cp))
    for rank in ranks:
        wrong = {case: error for case, (error, _) in rank.items() if not error <= 1e-12}
        assert not wrong
    for window, softcap in RULES:
        for method in ("ring", "balanced"):
            sent = sum(rank[f"{method} {window} {softcap}"][1] for rank in ranks)
            layout = RingLayout(cp, LENGTH // cp, method == "balanced")
            # Keys and values forward and again backward, and their gradients.
            assert sent == 3 * cp * count_messages(layout, window)


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("window", [1, 2, 5, 8, 13, 40])
def test_pairs_are_those_of_the_mask(balanced: bool, window: int) -> None:
    """Against the mask of all positions, for every two ranks."""
    layout = RingLayout(4, 8, balanced)
    places = torch.arange(32)
    back = places.unsqueeze(1) - places
    visible = (back >= 0) & (back < window)
    for rank in range(4):
        for source in range(4):
            pairs = {(pair.query, pair.key): pair.back for pair in layout.list_pairs(rank, source, window)}
            for i, query in enumerate(layout.list_chunks(rank)):
                for j, key in enumerate(layout.list_chunks(source)):
                    size = layout.chunk
                    part = visible[query * size : (query + 1) * size, key * size : (key + 1) * size]
                    assert bool(part.any()) == ((i, j) in pairs)
                    if part.any():
                        assert pairs[i, j] == (query - key) * size


def test_a_window_saves_most_messages() -> None:
    """Of 16 ranks with 1,024 positions each: a window of 1,024 needs the keys of one other rank in place of 15."""
    assert count_messages(RingLayout(16, 1024, False), 1024) == 15 / 16
    assert count_messages(RingLayout(16, 1024, False), None) == 15
    assert count_messages(RingLayout(16, 1024, True), 512) < 2
