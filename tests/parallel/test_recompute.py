"""Activation recomputation and offload: the same gradients, bit for bit, from fewer bytes and more matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import matrix
import numpy as np
import pytest
import torch
from drawn import draw
from live_bytes import Watch
from outcome import Outcome, assert_close, engine_steps, reference, whole
from plain_setup import GPT2, LAYOUTS, LENGTH, LLAMA, SEQUENCES, engine_of, global_batch, model, share
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from hpc_train._torch.observation import TorchDispatchMode
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.models.initial_values import initialise_parameters
from hpc_train.models.registry import build_model
from hpc_train.parallel.apply import build
from hpc_train.parallel.memory import activation_offload, recompute
from hpc_train.parallel.memory.activation_offload import ActivationMoves
from hpc_train.parallel.memory.copy_stream import CopyStream
from hpc_train.parallel.memory.recompute_once import recompute_once
from hpc_train.parallel.rules.check import check_support
from hpc_train.parallel.user_model import replace_forward
from hpc_train.testing import run_ranks
from hpc_train.training.optimizer import make_optimizer, require_determinism, seed_step

MODE = "parallel.recompute.mode="
OPTIM = ("optim.max_norm=0.05", "optim.eps=1e-6")
STEPS = (0, 1)
MODES = {
    "full": (f"{MODE}full",),
    "every second": (f"{MODE}full", "parallel.recompute.every=2"),
    "selective": (f"{MODE}selective",),
    "softmax": (f"{MODE}selective", "parallel.recompute.keep=[aten.mm,silu]"),
}


def _every_mode(world: World, configs: dict[str, RunConfig]) -> dict[str, Outcome]:
    return {
        mode: engine_steps(engine_of("untied", config, world), world, config, "untied", "short_last", STEPS)
        for mode, config in configs.items()
    }


@pytest.mark.parametrize("layout", draw(("ddp-2", "zero3-2", "zero3-3-kept", "hsdp-2x2"), ("ddp-2", "zero3-2")))
def test_recomputation_gives_the_numbers_of_one_process(layout: str) -> None:
    configs = {mode: LAYOUTS[layout].config(*OPTIM, *more) for mode, more in MODES.items()}
    ranks = run_ranks(_every_mode, LAYOUTS[layout].ranks, configs, parallel=configs["full"].parallel)
    truth = reference("untied", LAYOUTS["ddp-1"].config(*OPTIM), STEPS)
    for mode in MODES:
        outcomes = [rank[mode] for rank in ranks]
        np.testing.assert_allclose(outcomes[0].losses, truth.losses, rtol=1e-10)
        np.testing.assert_allclose(outcomes[0].norms, truth.norms, rtol=1e-10)
        for step in STEPS:
            gradients = whole([outcome.gradients[step] for outcome in outcomes])
            assert_close(gradients, whole([truth.gradients[step]]), 1e-10)
        assert_close(whole([outcome.state for outcome in outcomes]), whole([truth.state]), 1e-10)


def _with_dropout(world: World, config: RunConfig) -> Outcome:
    require_determinism()
    engine = engine_of("untied", config, world, dropout=0.3)
    seed_step(0, 0, world.dp_index)
    return engine_steps(engine, world, config, "untied", "two", STEPS)


DROPOUT = {
    "none": (),
    "full": MODES["full"],
    "again": MODES["full"],
    "selective": (f"{MODE}selective", "parallel.recompute.keep=[mm]"),
}


def _every_dropout(world: World, configs: dict[str, RunConfig]) -> dict[str, Outcome]:
    return {mode: _with_dropout(world, config) for mode, config in configs.items()}


@pytest.mark.parametrize(("layout", "precision"), [("ddp-2", "bf16"), ("zero3-2", "fp64")])
def test_dropout_is_the_same_when_a_block_runs_again(layout: str, precision: str) -> None:
    """Bit for bit, in deterministic mode, and so is the same run done twice."""
    configs = {mode: LAYOUTS[layout].config(f"precision={precision}", *more) for mode, more in DROPOUT.items()}
    for rank in run_ranks(_every_dropout, LAYOUTS[layout].ranks, configs, parallel=configs["none"].parallel):
        for mode in ("full", "again", "selective"):
            assert rank[mode].losses == rank["none"].losses
            pairs = [*zip(rank[mode].gradients, rank["none"].gradients, strict=True)]
            for got, wanted in [*pairs, (rank[mode].state, rank["none"].state)]:
                for a, b in zip(got, wanted, strict=True):
                    np.testing.assert_array_equal(a.local, b.local, err_msg=f"{mode}: {a.name}")
        assert len(set(rank["none"].losses)) == len(STEPS)


# What is kept for backward, in bytes, and how often operators run.


def _watched(world: World, layers: int, config: RunConfig) -> tuple[int, Watch]:
    """(bytes held between forward and backward, what backward ran)."""
    module = build_model(LLAMA(layers=layers))
    initialise_parameters(module, 0)
    engine = build(module, lambda split: make_optimizer(split, config.optim), config, world)
    tokens = global_batch("untied", 0).inputs
    with Watch() as forward:
        out = engine.parts[0](tokens)
    kept = forward.alive()
    with Watch() as backward:
        out.sum().backward()
    return kept, backward


def _counted(world: World, configs: dict[str, RunConfig]) -> dict[str, tuple[int, int, int]]:
    """By mode: (bytes that two more blocks keep; matrix products, attentions that backward runs in two blocks more)."""
    found = {}
    for mode, config in configs.items():
        (few, short), (many, deep) = (_watched(world, layers, config) for layers in (2, 4))
        attention = "_scaled_dot_product_flash_attention_for_cpu"
        calls = [deep.calls[name] - short.calls[name] for name in ("mm", attention)]
        found[mode] = (many - few, calls[0], calls[1])
    return found


@cache
def _counts() -> dict[str, tuple[int, int, int]]:
    configs = {mode: LAYOUTS["ddp-1"].config(*more) for mode, more in {"none": (), **MODES}.items()}
    return run_ranks(_counted, 1, configs)[0]


def _count_attentions(world: World, case: matrix.Case) -> int:
    engine = matrix.fresh(case, world)
    with Watch() as step:
        engine.forward_backward(matrix.share(matrix.global_batch(case.kind, 0), world, case.micro))
    return step.calls["_scaled_dot_product_flash_attention_for_cpu"]


@pytest.mark.parametrize(("mode", "runs"), [("none", 1), ("full", 2)])
def test_a_backward_in_two_parts_runs_a_block_again_once(mode: str, runs: int) -> None:
    """Not once for each of its matrices. Of four blocks a rank has two, for four micro-batches each."""
    overrides = ("parallel.pp=2", "parallel.pipeline.schedule=zbv", f"{MODE}{mode}")
    case = matrix.Case(2, overrides, "llama", micro=4)
    assert run_ranks(_count_attentions, 2, case, parallel=case.config().parallel) == [runs * 2 * 4] * 2


def _held_in_two_parts(once: bool) -> tuple[int, int, int]:
    """(bytes that a block's forward leaves, those between the parts of its backward, and those after both)."""
    block, x = _block()
    with Watch() as watch:
        out = recompute_once(block, x) if once else block(x)
        after_forward = watch.alive()
        gradient = torch.autograd.grad(out.sum(), x, retain_graph=True)
        del gradient
        between = watch.alive()
        gradients = torch.autograd.grad(out.sum(), list(block.parameters()))
        del out, gradients
    return after_forward, between, watch.alive()


def test_between_the_parts_of_a_backward_a_block_holds_what_it_would_without_recomputation() -> None:
    block, x = _block()
    after_forward, between, after = _held_in_two_parts(once=True)
    assert after_forward == block(x).nbytes, "its input is the caller's"
    assert between == _held_in_two_parts(once=False)[1]
    assert between > 5 * after_forward
    assert after == 0


TOKENS, HIDDEN, KV, WIDE, HEADS, FP64 = SEQUENCES * LENGTH, 20, 10, 27, 2, 8
INPUT = TOKENS * HIDDEN * FP64
PRODUCTS = TOKENS * (3 * HIDDEN + 2 * KV + 2 * WIDE) * FP64
"""Results of q, o and down; of k and v; of gate and up."""
ATTENTION = TOKENS * (HIDDEN + HEADS) * FP64
"""The mixed values, and the logarithm of the sum of each row's exponentials."""


def test_full_keeps_only_the_inputs_of_blocks() -> None:
    assert _counts()["full"][0] == 2 * INPUT
    assert _counts()["none"][0] > 20 * INPUT


def test_every_second_block_keeps_what_it_would() -> None:
    assert _counts()["every second"][0] == INPUT + _counts()["none"][0] // 2


def test_selective_keeps_the_inputs_and_the_results_of_its_operators() -> None:
    assert _counts()["selective"][0] == 2 * (INPUT + PRODUCTS + ATTENTION)
    assert _counts()["softmax"][0] == 2 * (INPUT + PRODUCTS + TOKENS * WIDE * FP64)


LINEAR = 7
"""q, k, v, o, gate, up, down; backward takes two products for each."""


@pytest.mark.parametrize(
    ("mode", "products", "attentions"),
    [("none", 0, 0), ("full", LINEAR - 1, 1), ("every second", (LINEAR - 1) / 2, 0.5), ("selective", 0, 0)],
)
def test_backward_repeats_what_was_not_kept_and_nothing_else(mode: str, products: float, attentions: float) -> None:
    """By block. The last product of a block, down, is not repeated: backward needs its inputs only."""
    _, mm, attention = _counts()[mode]
    assert mm / 2 == 2 * LINEAR + products
    assert attention / 2 == attentions


# Offload of activations.


def _block() -> tuple[nn.Module, Tensor]:
    module = build_model(GPT2)
    initialise_parameters(module, 0)
    x = torch.randn(SEQUENCES, LENGTH, GPT2.hidden, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return next(iter(module.double().blocks().values())), x.requires_grad_()


def _offload(*blocks: nn.Module) -> ActivationMoves:
    moves = ActivationMoves(torch.device("cpu"))
    for block in blocks:
        replace_forward(block, partial(activation_offload.wrap_offload, block, moves))
    return moves


def _gradients(block: nn.Module, x: Tensor, moves: ActivationMoves | None = None) -> tuple[list[Tensor], bool, Watch]:
    """(gradients, whether the result of attention was held until backward, what forward ran)."""
    kept: list[StorageWeakRef] = []
    block.attention.core.register_forward_hook(lambda _, __, out: kept.append(StorageWeakRef(out.untyped_storage())))
    with Watch() as forward:
        out = block(x)
    if moves is not None:
        moves.release_originals()  # as at the end of the next block
    there = not kept[0].expired()
    out.square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in block.parameters())], there, forward


def test_offload_copies_what_is_kept_once_and_lets_go_of_it() -> None:
    plain, there, _ = _gradients(*_block())
    assert there
    block, x = _block()
    moved, there, forward = _gradients(block, x, _offload(block))
    assert not there
    for a, b in zip(moved, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert forward.copied == _saved_bytes(*_block())


def _saved_bytes(block: nn.Module, x: Tensor) -> int:
    """Of the different tensors that backward needs, without parameters and without what is too small to move."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    saved: dict[tuple[object, ...], Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage().data_ptr()
        if memory not in parameters and tensor.nbytes >= activation_offload.MIN_OFFLOAD_BYTES:
            saved[memory, tensor.storage_offset(), tensor.shape, tensor.stride()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x)
    return sum(tensor.nbytes for tensor in saved.values())


def test_offload_with_full_recomputation_copies_the_input_of_the_block() -> None:
    plain, _, _ = _gradients(*_block())
    block, x = _block()
    replace_forward(block, partial(recompute.wrap_recompute, keep=None))
    moved, _, forward = _gradients(block, x, _offload(block))
    assert forward.copied == x.nbytes
    for a, b in zip(moved, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


class _Odd(nn.Module):
    """Saves a tensor that overlaps itself and one that is not contiguous, and may change what it has saved."""

    def __init__(self, changes: bool = False) -> None:
        super().__init__()
        self.changes = changes

    def forward(self, x: Tensor) -> Tensor:
        """x (n, n) -> (n, n)."""
        product = x.t() * x[:1].expand_as(x) * x.exp()
        if self.changes:
            product.add_(1)
        out: Tensor = product.sin()
        if self.changes:
            product.add_(1)
        return out


def test_offload_keeps_what_is_not_contiguous() -> None:
    results = []
    for offloads in (False, True):
        block = _Odd()
        moves = _offload(block) if offloads else None
        x = torch.linspace(0, 1, 64 * 64).view(64, 64).requires_grad_()
        out = block(x)
        if moves is not None:
            moves.release_originals()
        results.append(torch.autograd.grad(out.sum(), x)[0])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_offload_refuses_a_block_that_changes_what_it_saved() -> None:
    block = _Odd(changes=True)
    _offload(block)
    with pytest.raises(UserError, match="the forward of _Odd changes a tensor in place after an operator has saved it"):
        block(torch.ones(64, 64, requires_grad=True))


def test_host_memory_is_used_again() -> None:
    block, x = _block()
    moves = _offload(block)
    places = []
    for _ in range(3):
        out = block(x)
        moves.release_originals()
        out.sum().backward()
        del out
        places.append(sorted(one.data_ptr() for free in moves.memory._free.values() for one in free))
    assert places[0]
    assert places[0] == places[1] == places[2]


class _Late(TorchDispatchMode):
    """Puts copies off."""

    def __init__(self, queue: list[tuple[Any, Any]]) -> None:
        super().__init__()
        self._queue = queue

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        self._queue.append((args[0], args[1]))
        return args[0]


class LateStream(CopyStream):
    """Makes each copy as late as it may be: when the computation waits for a mark behind it."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._queue: list[tuple[Tensor, Tensor]] = []
        self._done = 0

    @contextmanager
    def queue(self) -> Iterator[None]:
        with _Late(self._queue):
            yield

    def mark(self) -> int:
        return len(self._queue)

    def wait(self, mark: int | None) -> None:
        for target, source in self._queue[self._done : mark or 0]:
            target.copy_(source)
        self._done = max(self._done, mark or 0)


@pytest.mark.parametrize("waits", [True, False])
def test_nothing_is_used_before_its_copies_are_made(waits: bool) -> None:
    """With copies as late as the waits allow, all numbers are right; without the waits they are not."""
    results = []
    for offloads in (False, True):
        module = build_model(GPT2)
        initialise_parameters(module, 0)
        blocks = list(module.double().blocks().values())
        if offloads:
            late = _offload(*blocks).stream = LateStream()
            if not waits:
                late.wait = lambda _: None
        x = torch.randn(SEQUENCES, LENGTH, GPT2.hidden, generator=torch.Generator().manual_seed(0)).double()
        for _ in range(2):
            out = x.requires_grad_()
            for block in blocks:
                out = block(out)
            out.square().sum().backward()
        results.append([x.grad, *(parameter.grad for block in blocks for parameter in block.parameters())])
    same = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert same == waits


def _offloaded_steps(world: World, config: RunConfig) -> Outcome:
    module = model("gpt2")
    _offload(*module.blocks().values())
    engine = build(module, lambda split: make_optimizer(split, config.optim), config, world)
    return engine_steps(engine, world, config, "gpt2", "two", STEPS)


def test_offload_under_fully_shard_gives_the_numbers_of_one_process() -> None:
    config = LAYOUTS["zero3-2"].config(*OPTIM)
    ranks = run_ranks(_offloaded_steps, 2, config, parallel=config.parallel)
    truth = reference("gpt2", LAYOUTS["ddp-1"].config(*OPTIM), STEPS)
    assert_close(whole([rank.state for rank in ranks]), whole([truth.state]), 1e-10)


# Bad input.

ZERO_BUBBLE = ("model=gpt2_tiny", "parallel.pp=2", "parallel.pipeline.schedule=zbv", "train.micro_batch=2")


def _first_step(world: World, kind: str, config: RunConfig) -> str:
    with pytest.raises(UserError) as caught:
        engine_of(kind, config, world).forward_backward(share(global_batch(kind, 0), world))
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "more", "says"),
    [
        ("bare", (f"{MODE}full",), "parallel.recompute.mode=full: Bare does not say what its blocks are"),
        ("gpt2", (f"{MODE}selective", "parallel.recompute.keep=[mn]"), "keep: mn is not an operator of torch"),
        ("gpt2", (f"{MODE}selective", "parallel.recompute.keep=[mm,silu]"), "keep: silu matches no operator of Block"),
        ("gpt2", ("parallel.recompute.offload=true",), "offload=true: this rank computes on a CPU"),
    ],
)
def test_what_matches_nothing_is_one_line(kind: str, more: tuple[str, ...], says: str) -> None:
    config = LAYOUTS["zero3-2"].config(*more)
    for said in run_ranks(_first_step, 2, kind, config, parallel=config.parallel):
        assert says in said
        assert "\n" not in said


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("parallel.recompute.every=2",), "every=2: has no effect with mode=none"),
        ((f"{MODE}full", "parallel.recompute.keep=[mm]"), "keep: has no effect with mode=full"),
        ((f"{MODE}selective", "parallel.recompute.keep=[]"), "keep=[]: selective without anything to keep"),
        ((f"{MODE}selective", "parallel.recompute.offload=true"), "what mode=selective keeps cannot be moved"),
        ((f"{MODE}selective", *ZERO_BUBBLE), "schedule=zbv splits backward, and torch hands out"),
        ((f"{MODE}full", "parallel.recompute.offload=true", *ZERO_BUBBLE), "recompute.offload=true: parallel.pipeline"),
    ],
)
def test_what_has_no_effect_is_refused_before_any_rank_is_started(more: tuple[str, ...], says: str) -> None:
    with pytest.raises(UserError, match=says.replace("[", r"\[")):
        check_support(LAYOUTS["ddp-2"].config(*more), 2)
