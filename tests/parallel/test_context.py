"""Context parallelism gives the attention, the training and the errors that one process with whole sequences gives."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from drawn import draw
from hypothesis import given
from hypothesis import strategies as st
from matrix import LENGTH, STEPS, Case, fresh, global_batch, share, steps, truth
from outcome import Outcome, assert_close, whole
from torch import Tensor, nn

from hpc_train.config.parallel import ContextConfig, ParallelConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import MicroBatch, World
from hpc_train.models.layers import ScaledDotProduct
from hpc_train.parallel import mesh_axes
from hpc_train.parallel.context import block_attention, context_parallel
from hpc_train.parallel.mesh_axes import SequenceShare
from hpc_train.parallel.rules.check import check_support
from hpc_train.testing import run_ranks

TOLERANCE = 1e-10
ULYSSES, UNBALANCED = "parallel.context.method=ulysses", "parallel.context.balanced=false"
HSDP = ("parallel=hsdp", "parallel.dp_replicate=2", "parallel.dp_shard=1")

# Attention by itself -------------------------------------------------------------------------------------------------

METHODS = {"ring": ContextConfig(balanced=False), "balanced": ContextConfig(), "ulysses": ContextConfig("ulysses")}
HEADS = ((4, 4, 8), (4, 2, 5), (4, 1, 3), (8, 8, 1))
"""Heads, key and value heads, width of a head."""
WITHIN = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-4}
"""Absolute, of numbers around 1: float32 sums up to 16 products twice; bfloat16 rounds by 2^-9 at every block."""

AttentionCase = tuple[str, bool, tuple[int, int, int], torch.dtype]
ATTENTION: list[AttentionCase] = list(product(METHODS, (True, False), HEADS, WITHIN))


def _inputs(heads: tuple[int, int, int], dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of the result, as a model's layers give them: (B, T, heads, d) in memory."""
    count, groups, width = heads
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, LENGTH, number, width) for number in (count, groups, groups, count)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).transpose(1, 2) for shape in shapes]


def _results(attention: nn.Module, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention(*inputs)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def _attention_errors(world: World) -> dict[AttentionCase, float]:
    """Largest error of the result and the gradients on this rank's positions, against float64 in one piece."""
    found = {}
    for method, causal, heads, dtype in ATTENTION:
        config = replace(Case(1, ()).config(), parallel=ParallelConfig(cp=world.size, context=METHODS[method]))
        tensors, core = _inputs(heads, dtype), ScaledDotProduct(causal=causal, dropout=0.0)
        mine = mesh_axes.get_sequence_share(config, world).positions(LENGTH)
        whole_results = _results(core, *(x.double() for x in tensors))
        results = _results(
            context_parallel.distribute_attention(core, config, world), *(x[:, :, mine] for x in tensors)
        )
        errors = [(a - b[:, :, mine]).abs().max().item() for a, b in zip(results, whole_results, strict=True)]
        found[method, causal, heads, dtype] = max(errors)
    return found


@pytest.mark.parametrize("cp", draw([2, 4], [4]))
def test_attention_over_ranks_is_that_of_one_piece(cp: int) -> None:
    for rank in run_ranks(_attention_errors, cp, parallel=ParallelConfig(cp=cp)):
        wrong = {case: error for case, error in rank.items() if not error <= WITHIN[case[-1]]}
        assert not wrong


@pytest.mark.parametrize(("heads", "causal"), list(product(HEADS, (True, False))))
def test_plain_operations_give_what_the_fused_kernel_gives(heads: tuple[int, int, int], causal: bool) -> None:
    q, k, v, grad = _inputs(heads, torch.float64)
    if not causal:
        k, v = k[:, :, :5], v[:, :, :5]
    out, lse = block_attention.attend_block(q, k, v, causal)
    plain_out, plain_lse = block_attention.attend_block_plainly(q, k, v, causal)
    torch.testing.assert_close(plain_out, out, rtol=0, atol=1e-12)
    torch.testing.assert_close(plain_lse, lse, rtol=0, atol=1e-12)
    arguments = (grad, q, k, v, out, lse + 0.5, causal)  # as if there were more keys in other blocks
    for plain, fused in zip(
        block_attention.differentiate_block_plainly(*arguments),
        block_attention.differentiate_block(*arguments),
        strict=True,
    ):
        torch.testing.assert_close(plain, fused, rtol=0, atol=1e-12)


@given(ranks=st.integers(1, 9), size=st.integers(1, 5), balanced=st.booleans())
def test_the_shares_of_all_ranks_are_the_sequence(ranks: int, size: int, balanced: bool) -> None:
    length = size * ranks * (2 if balanced else 1)
    shares = [SequenceShare(rank, ranks, balanced).positions(length) for rank in range(ranks)]
    assert {len(share) for share in shares} == {length // ranks}
    assert sorted(torch.cat(shares).tolist()) == list(range(length))
    assert all(share.tolist() == sorted(share.tolist()) for share in shares)
    if not balanced:
        assert torch.cat(shares).tolist() == list(range(length))


# The whole model -----------------------------------------------------------------------------------------------------

CASES = {
    "ring-2": Case(2, ("parallel.cp=2",), "llama"),
    "ring-2-learned-positions": Case(2, ("parallel.cp=2",), "gpt2", micro=6),
    "ring-2-unbalanced": Case(2, ("parallel.cp=2", UNBALANCED), "gpt2"),
    "ulysses-2": Case(2, ("parallel.cp=2", ULYSSES), "gpt2", micro=6),
    "ulysses-4-few-kv-heads": Case(4, ("parallel.cp=4", ULYSSES), "llama", micro=16),
    "ring-4-zero3": Case(4, ("parallel=fsdp", "parallel.cp=4"), "tied", micro=16),
    "ring-2-ddp-2": Case(4, ("parallel.cp=2",), "tied", micro=5),
    "ulysses-2-zero3-2": Case(4, ("parallel=fsdp", "parallel.cp=2", ULYSSES), "llama", micro=4),
    "ring-2-hsdp-2": Case(4, (*HSDP, "parallel.cp=2"), "gpt2", micro=8),
    "ring-2-tp-2": Case(4, ("parallel.cp=2", "parallel.tp=2"), "gpt2", micro=16),
    "ulysses-2-tp-2-zero3": Case(4, ("parallel=fsdp", "parallel.cp=2", "parallel.tp=2", ULYSSES), "llama", micro=16),
    "ring-2-recomputed": Case(2, ("parallel.cp=2", "parallel.recompute.mode=selective"), "llama", micro=16),
}


@cache
def _truth(kind: str) -> Outcome:
    return truth(kind)[0]


def _train(world: World, case: Case) -> tuple[Outcome, float, float]:
    """Two steps; the loss of an evaluation before them, and that of the first step."""
    engine = fresh(case, world)
    evaluated = engine.evaluate(share(global_batch(case.kind, 0), world, case.micro))
    outcome = steps(engine, case, world, STEPS)
    return outcome, float(evaluated.loss) / evaluated.tokens, outcome.losses[0]


DRAWN = (
    "ring-2-unbalanced", "ulysses-4-few-kv-heads", "ring-2-recomputed",
)  # fmt: skip
"""Each method and option once; test_matrix.py has pipelines and tensor parallelism beside it."""


@pytest.mark.parametrize("name", draw(CASES, DRAWN))
def test_training_equals_one_process(name: str) -> None:
    case = CASES[name]
    wanted = _truth(case.kind)
    ranks = run_ranks(_train, case.ranks, case, parallel=case.config().parallel)
    for outcome, evaluated, first in ranks:
        assert evaluated == pytest.approx(first, rel=TOLERANCE)
        np.testing.assert_allclose(outcome.losses, wanted.losses, rtol=TOLERANCE)
        np.testing.assert_allclose(outcome.norms, wanted.norms, rtol=TOLERANCE)
    for step, expected in enumerate(wanted.gradients):
        got = whole([outcome.gradients[step] for outcome, _, _ in ranks])
        assert_close(got, whole([expected]), TOLERANCE)
    assert_close(whole([outcome.state for outcome, _, _ in ranks]), whole([wanted.state]), TOLERANCE)


@pytest.mark.parametrize(
    "more",
    [(), (ULYSSES,), pytest.param(("parallel=fsdp",), marks=pytest.mark.long)],
    ids=["ring", "ulysses", "ring-zero3"],
)
def test_bf16_stays_within_its_rounding(more: tuple[str, ...]) -> None:
    """One rounding, 2^-8, for the mean loss; for gradients those of two dozen operations in a row."""
    case = Case(2, (*more, "parallel.cp=2", "precision=bf16", "precision.reduce=fp32"), micro=8)
    wanted = _truth(case.kind)
    ranks = run_ranks(_train, case.ranks, case, parallel=case.config().parallel)
    np.testing.assert_allclose(ranks[0][0].losses[0], wanted.losses[0], rtol=2**-8)
    got = whole([outcome.gradients[0] for outcome, _, _ in ranks])
    assert_close(got, whole([wanted.gradients[0]]), 24 * 2**-8)
    with pytest.raises(AssertionError, match="relative error"):  # it does compute in bf16
        assert_close(got, whole([wanted.gradients[0]]), 1e-4)


def _positions(world: World, case: Case) -> list[tuple[list[int], list[int], list[int]]]:
    """(positions given to the model, tokens, targets) where token i is i and target i is i + 1, for two lengths."""
    engine, config, seen = fresh(case, world), case.config(), []
    part = engine.parts[0]
    part.register_forward_pre_hook(lambda _, __, given: seen.append(given["positions"].tolist()), with_kwargs=True)
    found = []
    for length in (LENGTH, LENGTH // 2):
        tokens = torch.arange(length).unsqueeze(0)
        mine = mesh_axes.select_local_tokens(MicroBatch(tokens, tokens + 1), config, world)
        part(mine.inputs)
        found.append((seen.pop(), mine.inputs[0].tolist(), mine.targets[0].tolist()))
    return found


@pytest.mark.parametrize(
    ("more", "second"), [((), [2, 3, 4, 5]), ((UNBALANCED,), [4, 5, 6, 7]), ((ULYSSES,), [4, 5, 6, 7])], ids=str
)
def test_the_model_is_told_the_positions_of_its_tokens(more: tuple[str, ...], second: list[int]) -> None:
    case = Case(2, ("parallel.cp=2", *more))
    ranks = run_ranks(_positions, 2, case, parallel=case.config().parallel)
    for told, tokens, targets in (length for rank in ranks for length in rank):
        assert told == tokens == [target - 1 for target in targets]
    assert ranks[1][1][1] == second


def _sample(world: World, case: Case) -> float | None:
    engine = fresh(case, world)
    batch = share(global_batch(case.kind, 0), world, case.micro)
    batch.measure = True
    sample = engine.forward_backward(batch).sample
    return None if sample is None else float(sample.norm_square)


def test_gradient_samples_are_of_whole_sequences() -> None:
    """Of the first micro-batch where it is reduced; ddp sees a gradient of parts of sequences only, and gives none."""
    alone, cp = Case(1, (), micro=8), Case(2, ("parallel=fsdp", "parallel.cp=2"), micro=8)
    (wanted,) = run_ranks(_sample, 1, alone, parallel=alone.config().parallel)
    assert run_ranks(_sample, 2, cp, parallel=cp.config().parallel) == pytest.approx([wanted, wanted], rel=TOLERANCE)
    ddp = Case(2, ("parallel.cp=2",), micro=8)
    assert run_ranks(_sample, 2, ddp, parallel=ddp.config().parallel) == [None, None]


# Bad input -----------------------------------------------------------------------------------------------------------

BAD = [
    (2, (ULYSSES,), "llama", "parallel.context.method=ulysses: has no effect with parallel.cp=1; leave it out"),
    (2, (UNBALANCED,), "llama", "parallel.context.balanced=false: has no effect with parallel.cp=1; leave it out"),
    (2, ("parallel.cp=2", ULYSSES, UNBALANCED), "llama", "parallel.context.balanced=false: has no effect with method"),
    (2, ("parallel.cp=2",), "vit", "parallel.cp=2: model=vit has a class token"),
    (
        2,
        ("parallel.cp=2", "train.sequence_length=15"),
        "llama",
        "4 chunks, two per rank of parallel.cp=2; use 12 or 16",
    ),
    (
        2,
        ("parallel.cp=2", "train.sequence_length=14"),
        "llama",
        "use 12 or 16, or parallel.context.balanced=false",
    ),
    (3, ("parallel.cp=3", UNBALANCED), "llama", "=16: does not divide into parallel.cp=3 ranks; use 15 or 18"),
    (4, ("parallel.cp=4", "train.sequence_length=2", UNBALANCED), "llama", "parallel.cp=4 ranks; use 4"),
    (3, ("parallel.cp=3", ULYSSES), "llama", "model.heads=4 do not divide over parallel.cp=3 ranks; use"),
]


@pytest.mark.parametrize(("ranks", "overrides", "kind", "line"), BAD)
def test_what_cannot_be_is_one_line(ranks: int, overrides: tuple[str, ...], kind: str, line: str) -> None:
    with pytest.raises(UserError) as error:
        check_support(Case(ranks, overrides, kind).config(), ranks)
    assert line in str(error.value)
    assert str(error.value).isprintable()


class _Blind(nn.Module):
    """A user's model with attention that is not told any positions."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core

    def forward(self, x: Tensor) -> Tensor:
        """x (B, heads, T, d)."""
        out: Tensor = self.core(x, x, x)
        return out


class _Told(_Blind):
    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """The same with positions."""
        return super().forward(x)


def _refusals(world: World) -> list[str]:
    config = replace(Case(2, ()).config(), parallel=ParallelConfig(cp=2))
    cores = ScaledDotProduct(causal=True, dropout=0.0), ScaledDotProduct(causal=True, dropout=0.5)
    said = []
    for part in (_Told(nn.Identity()), _Blind(cores[0])):
        with pytest.raises(UserError) as error:
            context_parallel.apply_context_parallel(part, config, world)
        said.append(str(error.value))
    dropping = _Told(cores[1])
    gathered = "context: gathered (dropout: no ring) attention in 1 modules over cp=2"
    assert context_parallel.apply_context_parallel(dropping, config, world) == gathered
    part = _Told(cores[0])
    assert (
        context_parallel.apply_context_parallel(part, config, world)
        == "context: balanced ring attention in 1 modules over cp=2"
    )
    with pytest.raises(UserError) as error:
        mesh_axes.select_local_tokens(MicroBatch(*torch.zeros(2, 1, 6)), config, world)
    return [*said, str(error.value)]


def test_a_model_that_does_not_fit_is_one_line() -> None:
    wanted = (
        "_Told has no hpc_train.models.layers.ScaledDotProduct",
        "_Blind.forward takes no `positions`",
        "a sequence of 6 positions does not divide into the 4 equal parts",
    )
    for said in run_ranks(_refusals, 2, parallel=ParallelConfig(cp=2)):
        for line, part in zip(said, wanted, strict=True):
            assert part in line
            assert line.isprintable()


def _heads(world: World) -> str:
    config = replace(Case(2, ()).config(), parallel=ParallelConfig(cp=2, context=ContextConfig("ulysses")))
    core = context_parallel.distribute_attention(ScaledDotProduct(causal=True, dropout=0.0), config, world)
    with pytest.raises(UserError) as error:
        core(*torch.zeros(3, 1, 3, 4, 2))
    return str(error.value)


def test_heads_of_a_users_model_that_do_not_divide_are_one_line() -> None:
    for line in run_ranks(_heads, 2, parallel=ParallelConfig(cp=2)):
        assert line.startswith("parallel.context.method=ulysses: 3 heads do not divide over parallel.cp=2 ranks; use")
