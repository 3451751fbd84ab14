"""What a rehearsal says of a layout is what real ranks hold."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from drawn import draw
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_train._torch.rehearsal import MemorylessMode, tensors_in, watch_storage_sizes
from hpc_train.config.compose import compose
from hpc_train.config.parallel import Degrees, resolve_degrees
from hpc_train.config.run import RunConfig
from hpc_train.interfaces import World
from hpc_train.models.registry import build_model
from hpc_train.parallel.apply import build
from hpc_train.planner.rehearsal import one_rank
from hpc_train.planner.rehearsal.memory_ledger import MemoryLedger
from hpc_train.planner.rehearsal.rehearse import rehearse_run
from hpc_train.planner.rehearsal.result import CountedMemory, HeldShard
from hpc_train.planner.rehearsal.start_up import StoreSpeed, estimate_start_up, measure_store
from hpc_train.testing import run_ranks
from hpc_train.training.optimizer import make_optimizer

SMALL = (
    "model.hidden=24",
    "model.heads=4",
    "model.kv_heads=2",
    "model.feed_forward=20",
    "model.vocab_size=257",
    "train.sequence_length=16",
    "train.global_batch=8",
    "train.micro_batch=1",
)
"""257 rows and 20 columns divide over nothing."""
ONE = "model.layers=1"
LAYOUTS = {
    "hsdp x cp": ("parallel=hsdp", "parallel.dp_replicate=2", "parallel.dp_shard=1", "parallel.cp=2", ONE),
    "zero1 x tp": ("parallel=zero1", "parallel.tp=2", ONE),
    "norms over all heads x tp": (
        "parallel.tp=4",
        "model.pre_norms=false",
        "model.post_norms=true",
        "model.query_key_norm=full",
        ONE,
    ),
    "tied, interleaved": (
        "parallel=zero3",
        "parallel.pp=2",
        "parallel.pipeline.schedule=interleaved_1f1b",
        "model.tied_embeddings=true",
    ),
    "tied, there and back x tp": ("parallel=3d", "parallel.pipeline.schedule=zbv", "model.tied_embeddings=true"),
}


def config_of(*overrides: str) -> RunConfig:
    return compose((*SMALL, *overrides))


def real_pieces(world: World, config: RunConfig) -> tuple[HeldShard, ...]:
    """Return the pieces of this rank, from what parallel.apply.build has made with memory and values."""
    with torch.device("meta"):
        model = build_model(config.model)
    engine = build(model, lambda split: make_optimizer(split, config.optim), config, world)
    return tuple(one_rank._describe_piece(piece) for piece in engine.shards())


@pytest.mark.parametrize("name", draw(LAYOUTS, ["hsdp x cp", "tied, there and back x tp"]))
def test_every_rank_holds_what_real_ranks_do(name: str) -> None:
    config = config_of(*LAYOUTS[name])
    real = run_ranks(real_pieces, 4, config, parallel=config.parallel, timeout=300)
    rehearsed = rehearse_run(config, 4, "all")
    assert not rehearsed.problems
    assert [built.pieces for built in rehearsed.ranks] == real
    assert all(built.counted.peak for built in rehearsed.ranks if built.rank == 0)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells a ledger of real operators."""

    def __init__(self, ledger: MemoryLedger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.ledger.record(out, list(tensors_in((*args, *(kwargs or {}).values()))))
        return out


@contextmanager
def watching(ledger: MemoryLedger) -> Iterator[None]:
    with watch_storage_sizes(ledger.resized), Watch(ledger):
        yield


def real_step(world: World, config: RunConfig) -> CountedMemory:
    """The same ledger over a real step of two micro-batches."""
    degrees = resolve_degrees(config.parallel, world.size)
    with torch.device("meta"):
        model = build_model(config.model)
    engine = build(model, lambda split: make_optimizer(split, config.optim), config, world)
    ledger, batch = MemoryLedger(), one_rank._make_batch(config, degrees, 2)
    with watching(ledger):
        parameters = ledger.label(one_rank._list_parameters(engine), "parameters")
        state = [piece.local for piece in engine.shards() if piece.name.startswith("optim.")]
        counted, unknown = one_rank._train_step(
            engine, batch, ledger, CountedMemory(parameters, ledger.label(state, "optimizer"))
        )
    assert unknown is None
    return counted


@pytest.mark.parametrize(
    "overrides",
    [("parallel=fsdp",), ("parallel=zero2", "parallel.tp=2", "parallel.dp_shard=1", "precision=bf16")],
    ids=["zero3", "tp-bf16"],
)
def test_the_counted_memory_is_that_of_a_real_step(overrides: tuple[str, ...]) -> None:
    config = config_of(*overrides, "model.hidden=64", "model.vocab_size=300", "train.sequence_length=64")
    real = run_ranks(real_step, 2, config, parallel=config.parallel, timeout=300)
    rehearsed = rehearse_run(config, 2, "all")
    assert rehearsed.micro_batches == 2
    counted = rehearsed.ranks[0].counted
    for part in ("parameters", "optimizer", "gradients"):
        assert getattr(counted, part) == getattr(real[0], part), part
    for part in ("activations", "gathered", "peak"):  # a collective's thread lets go of its buffers a moment later
        assert getattr(counted, part) == pytest.approx(getattr(real[0], part), rel=0.005), part


def test_masks_of_positions_are_not_computed() -> None:
    """Positions keep their values, because meshes and counts depend on integers; what is made of them need not."""
    sizes = []
    with MemorylessMode(lambda out, given: sizes.append(sum(tensor.nbytes for tensor in tensors_in(out)))):
        positions = torch.arange(1 << 12)
        mask = (positions.unsqueeze(1) ^ positions) < 7
        few = positions[:8].unsqueeze(1) ^ positions[:8]
    assert few.sum() == sum(i ^ j for i in range(8) for j in range(8))
    assert not isinstance(positions, FakeTensor)
    assert isinstance(mask, FakeTensor)
    assert mask.shape == (1 << 12, 1 << 12)
    assert [size for size in sizes if size > 1 << 20] == [8 << 24, 1 << 24]


def test_16384_ranks() -> None:
    """A pipeline of two, HSDP over what is left, sequences over two and matrices over four ranks."""
    config = compose(
        (
            "model=llama_70b",
            "model.layers=4",
            "parallel=hsdp",
            "parallel.pp=2",
            "parallel.dp_replicate=8",
            "parallel.dp_shard=128",
            "parallel.cp=2",
            "parallel.tp=4",
            "train.global_batch=4096",
            "train.micro_batch=1",
            "train.sequence_length=8192",
            "precision=bf16",
        )
    )
    here = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # which the processes that it forks begin with
    rehearsed = rehearse_run(config, 16384, "0,16383")
    assert not rehearsed.problems
    assert rehearsed.proof is not None
    assert rehearsed.proof.micro_batches == 4
    assert rehearsed.coverage.tensors == 4 * 9 + 3
    first, last = (built.counted for built in rehearsed.ranks)
    assert first.activations is not None
    assert last.activations is not None
    assert first.activations > 2**30, "that much on a real one"
    assert rehearsed.rss - here < 2**30
    assert first.parameters == rehearsed.closed_form[0]["parameters"]


def test_the_start_grows_with_what_the_store_does_for_each_rank() -> None:
    """Twice the ranks take twice as long to join; from 128 on no rank connects to all others."""
    speed = StoreSpeed(connection=1e-3, request=1e-4)
    small, large, larger = (
        estimate_start_up(Degrees(1, ranks // 8, 8, 1, 1), speed, 0.5) for ranks in (64, 2048, 4096)
    )
    assert small.join_seconds == pytest.approx(64 * (1e-3 + 8e-4))
    assert larger.join_seconds == pytest.approx(2 * large.join_seconds)
    assert (small.groups, small.group_requests, large.group_requests) == (6, 12, 6)
    assert small.sockets == 64 * 63 // 2 + 64 * 7 // 2 * 2
    assert large.sockets == 0
    assert large.seconds == pytest.approx(large.join_seconds + 2048 * 6 * 1e-4 + 0.5)
    assert "from 2,048 running processes to the mesh" in large.describe()
    assert estimate_start_up(Degrees(1, 1, 8, 1, 1), speed, 0.0).groups == 5, (
        "an axis of all ranks is the default group"
    )


def test_the_store_is_measured_here() -> None:
    speed = measure_store()
    # Which of the two takes longer depends on what else the machine does.
    assert 0 < speed.request < 1
    assert 0 < speed.connection < 1
