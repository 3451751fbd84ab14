"""Shape: what of a run decides which degrees it can have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hpc_train.config.model import TransformerConfig, VisionTransformerConfig
from hpc_train.config.run import RunConfig


@dataclass(frozen=True)
class Shape:
    """Of a transformer and its batch."""

    layers: int
    heads: int
    feed_forward: int
    vocab: int
    sequence: int
    global_batch: int
    images: bool = False
    """A vision transformer, whose positions nothing splits."""
    ulysses: bool = False
    """parallel.context.method is ulysses, and stays so."""
    balanced: bool = True
    """parallel.context.balanced."""
    vocabulary: bool = True
    """parallel.tensor.vocabulary."""
    ddp_reduces: bool = True
    """Whether precision.reduce is one that DistributedDataParallel has."""
    device: bool = True
    """Whether ranks have memory of their own beside the host's."""
    split_backward: bool = True
    """Whether schedules that split backward are possible: not with compilation."""


def shape_of(config: RunConfig, global_batch: int | None = None) -> Shape:
    """Of a run of a model whose shape is known; global_batch: in place of train.global_batch."""
    model, parallel = config.model, config.parallel
    assert isinstance(model, (TransformerConfig, VisionTransformerConfig))
    images = isinstance(model, VisionTransformerConfig)
    native = "fp64" if config.precision.name == "fp64" else "fp32"
    return Shape(
        layers=model.layers,
        heads=model.heads,
        feed_forward=model.feed_forward,
        vocab=model.vocab_size if isinstance(model, TransformerConfig) else model.classes,
        sequence=config.train.sequence_length,
        global_batch=global_batch or config.train.global_batch,
        images=images,
        ulysses=parallel.context.method == "ulysses",
        balanced=parallel.context.balanced,
        vocabulary=parallel.tensor.vocabulary,
        device=config.cluster.node.gpus > 0,
        ddp_reduces=config.precision.reduce == native,
        split_backward=not parallel.compile,
    )


def divisors(number: int, others: Iterable[float] | None = None) -> list[int]:
    """All divisors, ascending, and `others` that are no larger."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    more = [int(it) for it in others or () if 1 <= it <= number]
    return sorted({*small, *(number // n for n in small), *more})


def tensor_degrees(shape: Shape, world: int) -> list[int]:
    """Degrees of tp that divide the matrices (parallel.support.tensor) and the world."""
    found = [n for n in divisors(world) if shape.heads % n == 0 and shape.feed_forward % n == 0]
    if shape.images:
        return found
    if not shape.vocabulary:
        return found[1:]  # without tp it has no effect, which is refused
    return [tp for tp in found if -(-shape.vocab // tp) * (tp - 1) < shape.vocab]


def context_degrees(shape: Shape, world: int, tp: int) -> list[tuple[int, int]]:
    """(cp, 1 for ulysses or 0 for a ring): degrees that divide the positions (parallel.support.context) and the world.

    Where the run is not set to what needs more than one rank, one is possible, too.
    """
    changed = shape.ulysses or not shape.balanced
    found = [] if changed else [(1, 0)]
    if shape.images:
        return found
    for cp in divisors(world)[1:]:
        if not shape.ulysses and shape.sequence % (2 * cp if shape.balanced else cp) == 0:
            found.append((cp, 0))
        if shape.balanced and shape.sequence % cp == 0 and shape.heads // tp % cp == 0:
            found.append((cp, 1))
    return found
